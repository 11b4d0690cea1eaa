"""Kinds of tree by name: what each makes of the same numbers, and how it bounds itself."""

from __future__ import annotations

import pytest
import torch

from slipstream import methods
from slipstream.errors import SettingError
from slipstream.trees import kinds
from slipstream.trees.choices import EAGLE1, MEDUSA
from slipstream.trees.sequoia import DEFAULT_ACCEPTANCE, best
from slipstream.trees.static import chain, complete
from slipstream.types import Drawn


def grow(builder, vocab_size=7, seed=0):
    """A finished tree over random conditionals, and how often children were asked for."""
    generator = torch.Generator().manual_seed(seed)
    builder.start(3)
    num_passes = 0
    while builder.num_children:
        size, width = len(builder.num_children), max(builder.num_children)
        logits = torch.randn(size, vocab_size, generator=generator)
        top = logits.log_softmax(-1).topk(min(width, vocab_size))
        num_passes += 1
        frontier = builder.grow(top.values, top.indices)
        assert (frontier is None) == (not builder.num_children)
        assert frontier is None or len(frontier.tokens) == len(builder.num_children)
    return builder.finish(), num_passes


def test_the_catalogue_knows_every_kind():
    assert set(methods.TREES) == set(kinds.KINDS)
    numbers = {"budget": 5, "depth": 3, "topk": 2}
    fixed = {name for name in kinds.KINDS if kinds.make(name, **numbers).shape is not None}
    assert set(methods.FIXED_TREES) == fixed


@pytest.mark.parametrize("name", kinds.KINDS)
@pytest.mark.parametrize("numbers", [(1, 1, 1), (8, 4, 4), (30, 3, 2), (64, 6, 9)])
def test_every_kind_stays_within_its_numbers(name, numbers):
    budget, depth, topk = numbers
    kind = kinds.make(name, budget=budget, depth=depth, topk=topk)
    for max_depth, max_nodes in ((99, 99), (depth, budget), (1, 1), (2, 5), (3, 2)):
        tree, num_passes = grow(kind.build(max_depth, max_nodes))
        assert 1 <= tree.budget <= min(budget, max_nodes)
        assert tree.num_drafted <= num_passes <= min(depth, max_depth)
        assert kind.topk <= max(topk, EAGLE1.topk)


def test_what_each_fixed_kind_is():
    numbers = {"budget": 40, "depth": 5, "topk": 3}
    assert kinds.make("chain", **numbers).shape == chain(5)
    assert kinds.make("static", **numbers).shape == EAGLE1
    assert kinds.make("static", **numbers | {"budget": 63}, shape=MEDUSA).shape == MEDUSA
    assert kinds.make("kary", **numbers).shape == complete(3, 5, 40)
    assert kinds.make("sequoia", **numbers).shape == best(DEFAULT_ACCEPTANCE[:3], 40, 5)
    measured = (0.3, 0.25)
    found = kinds.make("sequoia", **numbers, acceptance=measured).shape
    assert found == best(measured, 40, 5) and found.topk == 2


@pytest.mark.parametrize("name", ["dynamic", "best-first"])
def test_kinds_whose_scores_decide_refuse_drawn_children(name):
    builder = kinds.make(name, budget=4, depth=2, topk=2).build(2, 4)
    builder.start(0)
    drawn = Drawn(torch.ones(1, 2, dtype=torch.bool), torch.full((1, 3), 1 / 3))
    with pytest.raises(SettingError, match="fixed before anything is drawn"):
        builder.grow(torch.zeros(1, 2), torch.tensor([[1, 2]]), drawn)


def test_best_first_expands_what_a_beam_would_not():
    """Six equal children, two of them in the beam: only best-first sees below the others."""
    first = torch.full((1, 6), 1 / 6).log()
    sure = torch.tensor([[1.0]]).log()
    sizes = {}
    for name in ("dynamic", "best-first"):
        builder = kinds.make(name, budget=12, depth=2, topk=6).build(2, 12)
        builder.beam = 2 if name == "dynamic" else builder.beam
        builder.start(0)
        frontier = builder.grow(first, torch.arange(6)[None])
        width = len(frontier.tokens)
        builder.grow(sure.expand(width, 1), torch.zeros(width, 1, dtype=torch.int64))
        sizes[name] = builder.finish().budget
    assert sizes == {"dynamic": 8, "best-first": 12}


@pytest.mark.parametrize("name", ["dynamic", "best-first"])
def test_a_cost_makes_the_tree_as_large_as_it_pays(name):
    numbers = {"budget": 20, "depth": 4, "topk": 3}
    free, _ = grow(kinds.make(name, **numbers, cost=lambda n: 1.0).build(4, 20))
    dear, _ = grow(kinds.make(name, **numbers, cost=lambda n: 1 + 0.1 * n).build(4, 20))
    none, _ = grow(kinds.make(name, **numbers, cost=lambda n: 9.0 * n).build(4, 20))
    assert free.budget == 20 and 0 < dear.budget < 20 and none.budget == 0


def test_bad_settings_are_refused():
    with pytest.raises(SettingError, match="chain, static, kary, sequoia, dynamic, best-first"):
        kinds.make("bush", budget=1, depth=1, topk=1)
    for name in kinds.KINDS:
        for setting in ("budget", "depth", "topk"):
            with pytest.raises(SettingError, match=f"{setting} is 0"):
                kinds.make(name, **{"budget": 1, "depth": 1, "topk": 1} | {setting: 0})
