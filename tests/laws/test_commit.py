"""Cache after committing any accepted path equals recomputation. Bug reports B03, B44, B49."""

from __future__ import annotations

import random

import pytest
import torch
from test_mask import MODELS, assert_same, pair, path_to, random_tree

from slipstream.cache import SlotCache
from slipstream.target.hf import HFTarget
from slipstream.types import DraftTree


def recomputed(target: HFTarget, tokens: list[int]) -> SlotCache:
    cache = target.new_cache(1, 80)
    target.forward([DraftTree.chain(tokens)], cache, [0], last_only=True)
    cache.commit(0, range(len(tokens)))
    return cache


@pytest.mark.parametrize("name", MODELS)
def test_commit_equals_recomputation_after_every_step(name: str) -> None:
    target, _ = pair(name)
    rng = random.Random(3)
    tokens = [rng.randrange(97) for _ in range(4)]
    cache = recomputed(target, tokens)
    store = cache.keys.data_ptr(), cache.values.data_ptr()
    for _ in range(4):
        tree = random_tree(rng, rng.randint(1, 12), 5, rng.randrange(97))
        target.forward([tree], cache, [0])
        path = path_to(tree, rng.randrange(len(tree)))
        cache.commit(0, path)
        tokens += tree.tokens[path].tolist()
        assert cache.lengths[0] == len(tokens)
        fresh = recomputed(target, tokens)
        for ours, theirs in ((cache.keys, fresh.keys), (cache.values, fresh.values)):
            assert_same(ours[:, 0, :, : len(tokens)], theirs[:, 0, :, : len(tokens)])
    assert store == (cache.keys.data_ptr(), cache.values.data_ptr())  # never reallocated


def test_positions_continue_at_the_committed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 0..K accepted tokens the next pass starts without gap or repeat."""
    target, _ = pair("llama")
    seen: list[list[int]] = []
    forward = target._base.forward

    def counting(*args: object, **kwargs: object) -> object:
        seen.append(kwargs["position_ids"][0].tolist())
        return forward(*args, **kwargs)

    monkeypatch.setattr(target._base, "forward", counting)
    cache = target.new_cache(1, 64)
    length = 0
    for accepted in range(6):
        target.forward([DraftTree.chain(range(6))], cache, [0])
        assert seen[-1] == list(range(length, length + 6))
        cache.commit(0, range(accepted + 1))
        length += accepted + 1


def test_rejected_nodes_leave_no_trace() -> None:
    """A pass that is rolled back changes nothing that is visible later."""
    target, _ = pair("mistral-window")
    rng = random.Random(5)
    tokens = [rng.randrange(97) for _ in range(12)]
    cache = recomputed(target, tokens)
    expected = target.forward([DraftTree.chain([8, 9])], cache, [0]).logits
    cache.rollback(0)
    target.forward([random_tree(rng, 30, 5, 1)], cache, [0])
    cache.rollback(0)
    assert torch.equal(target.forward([DraftTree.chain([8, 9])], cache, [0]).logits, expected)


def test_a_reset_row_serves_another_request() -> None:
    target, _ = pair("llama")
    cache = recomputed(target, list(range(40)))
    cache.reset(0)
    assert cache.lengths[0] == 0 and not cache.keys[:, 0].any() and not cache.values[:, 0].any()
    fresh = target.new_cache(1, 80)
    chain = DraftTree.chain([5, 4, 3])
    again = target.forward([chain], cache, [0]).logits
    assert torch.equal(again, target.forward([chain], fresh, [0]).logits)
