"""Medusa's drafter: which hidden state it reads, what it proposes, and every layout of heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import slipstream
from fakes import growth, random_medusa, tiny_target
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import DrafterMismatchError, SettingError
from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Sampling
from slipstream.verify.walk import walk

PROMPTS = [[1, 2, 3, 4, 5], [9, 8], [30, 31, 32, 33, 34, 35, 36], [50]]


def last_hidden(target, tokens):
    """[D] of the position before the root, in one pass without a cache."""
    return target.extract(torch.tensor([tokens[:-1]]), ()).last_hidden[0, -1]


def heads_of(target, drafter, tokens):
    """[heads, V] log-probabilities of every head for a text; ids it does not know are -inf."""
    logits = drafter._heads.logits(last_hidden(target, tokens)[None])[:, 0].log_softmax(-1)
    whole = torch.full((len(logits), target.spec.vocab_size), float("-inf"))
    whole[:, drafter._target_ids] = logits
    return whole


@pytest.mark.parametrize("borrows", [True, False])
def test_it_reads_the_newest_verified_position(borrows):
    """Whatever was accepted, the nodes are the heads' likeliest ids at the position of the root."""
    target = tiny_target()
    drafter = random_medusa(target, borrows=borrows, budget=6)
    seen, propose = [], drafter.propose

    def spy(rows):
        trees = propose(rows)
        seen.extend((list(row.tokens), tree) for row, tree in zip(rows, trees, strict=True))
        return trees

    drafter.propose = spy
    results = Engine(target, drafter, walk).generate(PROMPTS, max_new_tokens=16, num_rows=3)
    plain = Engine(target, NoDrafter(), walk).generate(PROMPTS, max_new_tokens=16)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert any(len(r.reach) > 0 for r in results), "nothing was ever accepted"
    for tokens, tree in seen[::7]:
        expected = heads_of(target, drafter, tokens)
        for node in range(1, len(tree)):
            own = expected[int(tree.depths[node]) - 1, int(tree.tokens[node])]
            assert float(tree.log_probs[node]) == pytest.approx(float(own), abs=1e-4)
        if len(tree) > 1:
            assert int(tree.tokens[1]) == int(expected[0].argmax())


def test_siblings_below_different_parents_are_the_same():
    """Heads do not know of each other: `static` hangs one list of candidates below every node."""
    target = tiny_target()
    drafter = random_medusa(target, tree="static", budget=63, depth=4)
    row = SimpleNamespace(
        key=0, tokens=[4, 5, 6], max_depth=4, max_nodes=63, sampler=Sampler(Sampling(), 97)
    )
    drafter.open(row, last_hidden(target, row.tokens)[None])
    tree = drafter.propose([row])[0]
    below = {}
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        below.setdefault(parent, []).append(token)
    ranked = heads_of(target, drafter, row.tokens).argsort(-1, descending=True)
    assert tree.budget == 63 and len(below) > 10
    for parent, tokens in below.items():
        assert tokens == ranked[int(tree.depths[parent]), : len(tokens)].tolist()


def test_above_temperature_0_it_looks_at_the_targets_noise():
    target = tiny_target()
    drafter = random_medusa(target, tree="chain", depth=3)
    sampler = Sampler(Sampling(temperature=1.5, seed=11), 97)
    row = SimpleNamespace(key=0, tokens=[4, 5, 6], max_depth=3, max_nodes=3, sampler=sampler)
    drafter.open(row, last_hidden(target, row.tokens)[None])
    tree = drafter.propose([row])[0]
    said = heads_of(target, drafter, row.tokens) / 1.5
    expected = [int((said[depth] + sampler.noise(3 + depth)).argmax()) for depth in range(3)]
    assert tree.tokens.tolist()[1:] == expected


def test_there_is_no_depth_beyond_the_heads():
    target = tiny_target()
    for tree in ("best-first", "static", "chain"):
        drafter = random_medusa(target, tree=tree, budget=63, depth=9)
        result = Engine(target, drafter, walk).generate([1, 2], max_new_tokens=20, trace=True)
        assert max(step.tree.num_drafted for step in result.steps) == 4


def test_a_row_without_room_gets_its_root():
    target = tiny_target()
    drafter = random_medusa(target)
    row = SimpleNamespace(key=0, tokens=[4, 5], max_depth=0, max_nodes=9)
    drafter.open(row, torch.zeros(1, 48))
    assert torch.equal(drafter.propose([row])[0].tokens, DraftTree.chain([5]).tokens)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_official_heads_draft(tmp_path, suffix):
    """With projections of their own, and as blocks under the target's whole head."""
    target, tensors = tiny_target(), {}
    generator = torch.Generator().manual_seed(0)
    for head in range(3):
        tensors[f"{head}.0.linear.weight"] = 0.1 * torch.randn(48, 48, generator=generator)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(48)
        if suffix == ".pt":
            tensors[f"{head}.1.weight"] = target.head().clone()
    if suffix == ".pt":
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    else:
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    engine = slipstream.load(target, "medusa", drafter=tmp_path)
    plain = slipstream.load(target, "none").generate(PROMPTS, max_new_tokens=12)
    results = engine.generate(PROMPTS, max_new_tokens=12, trace=True)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert max(step.tree.num_drafted for r in results for step in r.steps) == 3


def test_heads_of_another_target_are_refused(tmp_path):
    torch.save({"0.0.linear.weight": torch.ones(8, 8), "0.0.linear.bias": torch.ones(8)},
               tmp_path / "medusa_lm_head.pt")  # fmt: skip
    with pytest.raises(DrafterMismatchError, match="hidden size 8, tiny-llama has 48"):
        MedusaDrafter.from_checkpoint(tmp_path, tiny_target(), growth())


def test_more_children_than_draft_tokens_are_refused():
    with pytest.raises(SettingError, match="topk is 62, expected at most the draft vocabulary, 61"):
        random_medusa(tiny_target(), topk=62)
