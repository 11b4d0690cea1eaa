"""Differences judged: ties by construction, bugs by construction."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fakes import OracleDrafter, RandomDrafter, TableTarget
from slipstream.bench import equality
from slipstream.bench.equality import Divergence, Judge, first_difference, judge_for, verdict
from slipstream.bench.lossless import answers, compare_answers
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.sampling import Sampler
from slipstream.types import Sampling
from slipstream.verify.walk import walk

GREEDY = Sampling()
KEYED = Sampling(temperature=0.8, top_p=0.9, seed=5)
PROMPT = [3, 1, 4, 1, 5]


def tied(gap: float, margin_at: int = 4) -> TableTarget:
    """A target whose best two tokens are `gap` apart at one position of PROMPT's answer."""

    def edit(context, logits):
        if len(context) != len(PROMPT) + margin_at:
            return logits
        best = logits.topk(2)
        changed = logits.clone()
        changed[best.indices[1]] = best.values[0] - gap
        return changed

    return TableTarget(edit=edit)


def judge(target: TableTarget, sampling: Sampling = GREEDY) -> Judge:
    return Judge(load=lambda: target, sampling=sampling)


def swapped(target: TableTarget, at: int) -> tuple[list[int], list[int]]:
    """Plain decoding's answer, and the same with the runner-up at `at` (and rubbish behind)."""
    plain = target.answer(PROMPT, 10)
    other = target.logits_of(PROMPT + plain[:at]).topk(2).indices.tolist()
    return plain, [*plain[:at], other[0] if other[0] != plain[at] else other[1], 0, 0]


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2, 3], [1, 2]) == 2


@pytest.mark.parametrize(("gap", "is_tie"), [(5e-5, True), (0.0, True), (1e-3, False)])
def test_a_tie_is_a_small_margin(gap, is_tie):  # B06, B08
    target = tied(gap)
    plain, emitted = swapped(target, 4)
    found = judge(target).judge(7, PROMPT, plain, emitted)
    assert (found.prompt_index, found.position, found.is_tie) == (7, 4, is_tie)
    assert found.margin == pytest.approx(gap, abs=1e-6)
    assert (found.target_token, found.emitted_token) == (plain[4], emitted[4])


def test_a_third_token_is_no_tie_even_where_the_best_two_are():
    target = tied(0.0)
    plain, emitted = swapped(target, 4)
    third = int(target.logits_of(PROMPT + plain[:4]).topk(3).indices[2])
    found = judge(target).judge(0, PROMPT, plain, [*emitted[:4], third])
    assert not found.is_tie and found.margin > 1e-3


def test_an_answer_that_ends_early_is_no_tie():
    target = tied(0.0)
    plain = target.answer(PROMPT, 10)
    found = judge(target).judge(0, PROMPT, plain, plain[:6])
    assert found.margin == float("inf") and not found.is_tie
    assert (found.position, found.emitted_token) == (6, None)


def test_sampled_margins_are_of_log_p_and_noise():
    target = TableTarget(scale=1.0)
    plain = target.answer(PROMPT, 12, temperature=0.8, top_p=0.9, seed=5)
    asked = judge(target, KEYED)
    for at in range(12):  # plain decoding's own token is the best at every position
        assert asked.margin(PROMPT, plain[:at], [plain[at]]) == 0.0
    other_seed = judge(target, replace(KEYED, seed=6))
    assert any(other_seed.margin(PROMPT, plain[:at], [plain[at]]) > 0 for at in range(12))
    outside = int(target.logits_of(PROMPT).argmin())
    assert asked.margin(PROMPT, [], [outside]) == float("inf")


def test_the_edge_of_the_nucleus_is_a_tie():
    """A token that top-p keeps by a hair is not impossible for the other side's rounding."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    target = TableTarget(vocab_size=3, edit=lambda context, _: logits[0])
    for top_p in (0.8 - 1e-6, 0.8 + 1e-6):
        asked = judge(target, Sampling(temperature=1.0, top_p=top_p, seed=3))
        assert asked.margin(PROMPT, [], [0, 1, 2]) < 20
    far = judge(target, Sampling(temperature=1.0, top_p=0.75, seed=3))
    assert far.margin(PROMPT, [], [2]) == float("inf")


def test_verdicts():
    tie = Divergence(0, 3, 1e-6, 1, 2, True)
    bug = Divergence(1, 3, 2.0, 1, 2, False)
    assert verdict([], 500, is_exact=True) == "lossless"
    assert verdict([tie], 500, is_exact=True) == "ties"
    assert verdict([tie, bug], 10**6, is_exact=True) == "different"
    assert verdict([tie] * 2, 500, is_exact=True) == "inconclusive"
    assert verdict([tie] * 2, 20_000, is_exact=True) == "ties"
    assert verdict([tie] * 9, 500, is_exact=False) == "ties"
    assert verdict([], 0, is_exact=True) == "inconclusive"


class RoundingTarget(TableTarget):
    """bfloat16 in miniature: the logits of a pass depend a little on its width."""

    def __init__(self, gap: float = 0.0, **options):
        super().__init__(**options)
        self.spec = replace(self.spec, dtype=torch.bfloat16)
        self.gap = gap

    def forward(self, trees, cache, slots, **options):
        output = super().forward(trees, cache, slots, **options)
        if max(len(tree) for tree in trees) > 1:
            best = output.logits.topk(2)
            closeness = best.values[..., 0] - best.values[..., 1]
            lift = torch.where(closeness < self.gap, closeness + 0.01, torch.zeros(()))
            output.logits.scatter_add_(-1, best.indices[..., 1:], lift[..., None])
        return output


def test_width_flips_are_found_where_rounding_turns_the_choice():  # B09
    target = RoundingTarget(gap=0.4)
    plain = target.answer([3], 100)
    flips = equality.width_flips(target, [3], plain, GREEDY)
    best = [target.logits_of([3, *plain[:at]]).topk(2).values for at in range(1, 100)]
    gaps = [float(pair[0] - pair[1]) for pair in best]
    close = [gap for gap in gaps if gap < 0.4]
    assert len(close) > 3 and flips == pytest.approx(close, abs=1e-5)
    steady = TableTarget()
    assert equality.width_flip_margin(steady, [PROMPT], [steady.answer(PROMPT, 40)], GREEDY) == 0.0


def test_reduced_precision_is_judged_by_plain_decodings_own_flips():
    target = RoundingTarget(gap=0.4)
    plain_engine = Engine(target, NoDrafter(), walk)
    prompts = [[i, i + 1, i + 2] for i in range(12)]
    arguments = {"max_new_tokens": 40, "num_rows": 1}
    plain = answers(plain_engine, prompts, arguments)
    drafted = answers(Engine(target, RandomDrafter(12), walk), prompts, arguments)
    pairs = prompts, [result.token_ids for result in plain]
    asked = judge_for(target, GREEDY, load_twin=pytest.fail, plain=lambda: pairs)
    report = compare_answers(prompts, plain, drafted, asked)
    assert report.verdict == "ties" and report.num_divergent > 1
    assert all(0 < d.margin <= report.tie_margin for d in report.divergences)
    broken = [replace(drafted[0], token_ids=(*drafted[0].token_ids[:1], 0, 0)), *drafted[1:]]
    assert compare_answers(prompts, plain, broken, asked).verdict == "different"


@pytest.mark.parametrize("sampling", [GREEDY, KEYED])
def test_a_sound_setup_is_lossless_and_a_broken_verifier_is_not(sampling):  # B01
    target = TableTarget()
    prompts = [[i, i + 1, i + 2] for i in range(6)]
    arguments = {
        "max_new_tokens": 30,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }
    plain = answers(Engine(target, NoDrafter(), walk), prompts, arguments | {"num_rows": 1})
    known = [[*ids, *result.token_ids] for ids, result in zip(prompts, plain, strict=True)]
    asked = judge(target, sampling)

    def run(verify):
        drafter = OracleDrafter(known, wrong=0.3, siblings=2)
        return answers(Engine(target, drafter, verify), prompts, arguments | {"num_rows": 3})

    report = compare_answers(prompts, plain, run(walk), asked)
    assert (report.verdict, report.num_tokens, report.divergences) == ("lossless", 180, ())
    assert report.tau > 1.5 and report.tie_margin is None

    def believe_everything(tree, logits, sampler, root_position):
        sound = walk(tree, logits, sampler, root_position)
        if len(tree) == 1:
            return sound
        return replace(sound, path=(0, 1), next_token=sound.next_token)

    report = compare_answers(prompts, plain, run(believe_everything), asked)
    assert report.verdict == "different" and report.num_divergent > 0
    value = report.to_dict()
    keys = {"prompt_index", "position", "margin", "target_token", "emitted_token"}
    assert keys <= set(value["divergences"][0])


def test_nothing_is_loaded_when_nothing_differs():
    target = TableTarget()
    asked = judge_for(target, GREEDY, load_twin=pytest.fail, plain=pytest.fail)
    plain = answers(Engine(target, NoDrafter(), walk), [PROMPT], {"num_rows": 1})
    assert compare_answers([PROMPT], plain, plain, asked).verdict == "lossless"


def test_an_answer_that_failed_makes_it_inconclusive():
    target = TableTarget()
    plain = answers(Engine(target, NoDrafter(), walk), [PROMPT, [9, 9]], {"num_rows": 1})
    failed = [plain[0], replace(plain[1], finish_reason="error", token_ids=())]
    report = compare_answers([PROMPT, [9, 9]], plain, failed, judge(target))
    assert report.verdict == "inconclusive" and report.num_errors == 1


@pytest.mark.parametrize("tied", [True, False])
def test_as_likely_tokens_at_the_edge_of_the_nucleus_are_a_tie(tied: bool) -> None:
    """Which of two equals is the nucleus' last token is rounding's choice."""
    least = 0.04 * (1 - 1e-7 if tied else 0.98)
    logits = torch.tensor([0.9, 0.04, least, 0.02], dtype=torch.float64).log()
    sampling = Sampling(temperature=1.0, top_p=0.925, seed=3)  # keeps the first two
    sampler, found = Sampler(sampling, 4), 0
    for position in range(4000):
        noisy = logits + sampler.noise(position)
        if int(noisy.argmax()) != 2 or int(noisy[:2].argmax()) != 0:
            continue
        found += 1
        margin = equality._margin(logits, sampling, position, [0, 2])
        assert margin < 1e-4 if tied else margin == float("inf")
        assert equality._margin(logits, sampling, position, [0, 3]) == float("inf")
    assert found > 20
