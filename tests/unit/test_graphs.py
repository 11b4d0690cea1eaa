"""Passes over fixed buffers, as CUDA graphs replay them, say what the fused decoder says.

Here the pass is run again instead of replayed: buffers, padding and bookkeeping are the same.
"""

from __future__ import annotations

import random

import pytest
import torch

from fakes import random_eagle3, tiny_model
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import UnsupportedTargetError
from slipstream.target import graphs, model
from slipstream.target.hf import HFTarget
from slipstream.types import DraftTree
from slipstream.verify.walk import walk

KINDS = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
}


class Rerun:
    """In the place of a CUDA graph: a replay runs the pass again into the same outputs."""

    def __call__(self, run):
        outputs = run()

        def replay():
            for old, new in zip(outputs, run(), strict=True):
                if old is not None:
                    old.copy_(new)

        return replay, outputs


@pytest.fixture
def graphed(monkeypatch):
    """Makes a graphed target that needs no GPU."""
    monkeypatch.setattr(model, "why_not_graphed", lambda device: None)
    monkeypatch.setattr(graphs, "Capturing", Rerun)
    return lambda kind="llama": HFTarget(tiny_model(kind, **KINDS[kind]), decoder="graphed")


def tree_of(size: int, seed: int) -> DraftTree:
    chance = random.Random(seed)
    parents = [-1] + [chance.randrange(max(0, i - 4), i) for i in range(1, size)]
    return DraftTree(torch.tensor([chance.randrange(97) for _ in parents]), torch.tensor(parents))


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_passes_say_what_fused_ones_say(graphed, kind):
    target = graphed(kind)
    fused = HFTarget(tiny_model(kind, **KINDS[kind]), decoder="fused")
    assert target.spec.decoder == "graphed"
    caches = [each.new_cache(2, 64) for each in (target, fused)]
    for turn, sizes in enumerate([(1, 1), (5, 3), (7, 8), (1, 6), (5, 2), (1, 1)]):
        trees = [tree_of(size, 10 * turn + size) for size in sizes]
        one, other = (
            each.forward(trees, cache, [0, 1], taps=(0, 2))
            for each, cache in zip((target, fused), caches, strict=True)
        )
        for row, size in enumerate(sizes):
            for name in ("logits", "features", "last_hidden"):
                torch.testing.assert_close(
                    getattr(one, name)[row, :size], getattr(other, name)[row, :size]
                )
            path = range(min(2, size))
            for cache in caches:
                cache.commit(row, path)
    assert len(target._graphs) == 2  # two rows of 1 and of 8 nodes
    assert caches[0].lengths == caches[1].lengths
    for name in ("keys", "values"):
        one, other = (getattr(cache, name) for cache in caches)
        for row, length in enumerate(caches[0].lengths):
            torch.testing.assert_close(one[:, row, :, :length], other[:, row, :, :length])


def test_drafting_changes_no_token(graphed):
    target, prompts = graphed(), [[3, 1, 4], [1, 5, 9, 2, 6]]
    options = {"max_new_tokens": 40, "num_rows": 2}
    plain = Engine(target, NoDrafter(), walk).generate(prompts, **options)
    drafted = Engine(target, random_eagle3(target), walk).generate(prompts, **options)
    assert [r.token_ids for r in plain] == [r.token_ids for r in drafted]
    fused = HFTarget(tiny_model(), decoder="fused")
    usual = Engine(fused, NoDrafter(), walk).generate(prompts, **options)
    assert [r.token_ids for r in plain] == [r.token_ids for r in usual]


def test_what_does_not_fit_runs_uncaptured(graphed):
    target = graphed()
    assert len(target._graphs) == 0  # those of the check at load time went with its cache
    cache = target.new_cache(3, 70)
    target.forward([tree_of(65, 1)], cache, [0])  # wider than any capture
    target.forward([tree_of(2, 1), tree_of(3, 2)], cache, [0, 2])  # not side by side
    cache.commit(0, [0])
    long = target.new_cache(1, 70)
    target.forward([DraftTree.chain(range(66))], long, [0], last_only=True)  # a prompt
    long.commit(0, range(66))
    target.forward([tree_of(3, 1)], long, [0])  # with its padding it ends at slot 70
    assert len(target._graphs) == 1
    target.forward([DraftTree.chain([1])], long, [0])
    long.commit(0, [0])
    target.forward([tree_of(3, 1)], long, [0])  # 67 + 4 slots are not there
    assert len(target._graphs) == 2


def test_captures_are_bounded(graphed, monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 3)
    target = graphed()
    cache = target.new_cache(4, 32)
    for row in range(4):
        target.forward([tree_of(2, row)], cache, [row])
    assert len(target._graphs) == 3


def test_without_a_gpu_it_is_refused():
    with pytest.raises(UnsupportedTargetError, match="CUDA"):
        HFTarget(tiny_model(), decoder="graphed")
