"""Recorded trees cut to smaller ones decode as the smaller ones really do."""

from __future__ import annotations

import pytest
import torch

from fakes import OracleDrafter, TableTarget, random_eagle3, tiny_target
from slipstream.drafters.lookahead import LookaheadDrafter
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.drafters.union import UnionDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import SettingError
from slipstream.tune.acceptance import Position, Recorder, positions, replay, united
from slipstream.types import DraftTree, Verdict
from slipstream.verify.walk import walk

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5]]
LENGTH = 40


def record(target, drafter, **sampling):
    recorder = Recorder(drafter)
    engine = Engine(target, recorder, walk)
    results = engine.generate(PROMPTS, max_new_tokens=LENGTH, **sampling)
    return recorder.recordings, results


def really(target, drafter, **sampling):
    """Passes that decoding with a drafter takes, and the nodes it drafts."""
    engine = Engine(target, drafter, walk)
    results = engine.generate(PROMPTS, max_new_tokens=LENGTH, trace=True, **sampling)
    nodes = sum(step.tree.budget for result in results for step in result.steps)
    return sum(result.num_target_passes for result in results), nodes


def replayed(recordings, how):
    answers = positions(recordings)
    found = replay([len(a) for a in answers], lambda answer, at: how(answers[answer][at]))
    return found.num_passes, sum((w - 1) * count for w, count in found.widths.items())


def wide(target):
    """A network that is right often enough: its random head meets a random target."""
    return random_eagle3(target, tree="dynamic", budget=99, depth=4, topk=3, size=97)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}, {"num_rows": 2}])
def test_recording_does_not_change_the_answer(sampling):
    target = tiny_target()
    recordings, results = record(target, wide(target), **sampling)
    plain = Engine(target, NoDrafter(), walk).generate(PROMPTS, max_new_tokens=LENGTH, **sampling)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert [len(each.trees) for each in recordings] == [LENGTH - 1] * 2
    assert [list(r.tokens[: r.start]) for r in recordings] == PROMPTS
    assert all(t.tokens[0] == e.tokens[e.start + i] for e in recordings
               for i, t in enumerate(e.trees))  # fmt: skip


@pytest.mark.parametrize(("budget", "depth"), [(1, 1), (3, 2), (6, 4), (12, 3), (24, 4)])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_cut_recording_takes_the_passes_of_the_smaller_tree(budget, depth, temperature):
    target = tiny_target(std=0.05)
    recordings, _ = record(target, wide(target), temperature=temperature)
    smaller = random_eagle3(target, tree="dynamic", budget=budget, depth=depth, topk=3, size=97)
    expected = really(target, smaller, temperature=temperature)
    assert replayed(recordings, lambda p: p.best(budget, depth)) == expected


def test_recordings_come_in_the_order_of_the_prompts_whoever_ends_first():
    target = tiny_target()
    recorder = Recorder(NgramDrafter(budget=2, depth=2))
    engine = Engine(target, recorder, walk)
    first = engine.generate(PROMPTS[0], max_new_tokens=4).token_ids
    said = engine.generate(PROMPTS, max_new_tokens=12, num_rows=2, stop=[first[3]])
    assert len({len(each.token_ids) for each in said}) == 2
    assert [list(e.tokens[: e.start]) for e in recorder.recordings[1:]] == PROMPTS


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_lookup_is_replayed_at_every_length(depth):
    target = TableTarget(vocab_size=10, order=1)
    recordings, _ = record(target, NgramDrafter(budget=8, depth=8))
    expected = really(target, NgramDrafter(budget=depth, depth=depth))
    assert expected[0] < 2 * (LENGTH - 1)  # something is accepted
    assert replayed(recordings, lambda p: p.chain(depth)) == expected


def test_a_union_reaches_as_far_as_the_better_part():
    target = TableTarget()
    whole = [[*prompt, *target.answer(prompt, LENGTH)] for prompt in PROMPTS]
    good = OracleDrafter(whole, depth=3, wrong=0.3, seed=1)
    other = OracleDrafter(whole, depth=3, wrong=0.3, seed=2)
    parts = [positions(record(target, drafter)[0]) for drafter in (good, other)]
    cuts = [lambda a, i, part=part: part[a][i].chain(3) for part in parts]
    found = replay([LENGTH - 1] * 2, united(*cuts))
    passes, nodes = really(target, UnionDrafter(good, other, 6))
    assert found.num_passes == passes
    counted = sum((w - 1) * count for w, count in found.widths.items())
    assert nodes <= counted <= 1.3 * nodes  # refused nodes that both drafted are counted twice


def test_the_chain_of_a_tree_is_its_first_children():
    tree = DraftTree(torch.tensor([9, 1, 2, 3, 4]), torch.tensor([-1, 0, 0, 1, 3]))
    assert Position(tree, Verdict((0, 1, 3, 4), 7)).chain(2) == (2, 2)
    assert Position(tree, Verdict((0, 1, 3, 4), 7)).chain(9) == (3, 3)
    assert Position(tree, Verdict((0, 2), 7)).chain(3) == (3, 0)


def test_a_drafter_that_learns_from_verified_trees_is_refused():
    with pytest.raises(SettingError, match="lookahead"):
        Recorder(LookaheadDrafter())


def test_no_position_means_plain_decoding():
    found = replay([0], lambda answer, position: (0, 0))
    assert (found.tau, found.num_passes, found.mean(float)) == (1.0, 0, 0.0)
