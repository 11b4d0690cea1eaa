"""The dynamic program against plain recursion and enumeration, and the choice by hardware."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from slipstream.errors import SettingError
from slipstream.trees import sequoia
from slipstream.trees.choices import EAGLE1
from slipstream.trees.sequoia import DEFAULT_ACCEPTANCE, acceptance_by_rank, best, choose, expected
from slipstream.trees.static import chain, complete
from slipstream.types import DraftTree, Verdict

ACCEPTANCE = (0.55, 0.2, 0.1)


def closed(acceptance, size):
    """Most tokens of `size` nodes, root included, by the closed recursion over allocations."""

    @cache
    def value(nodes):
        return 1 + given(nodes - 1, 0)

    @cache
    def given(nodes, rank):
        if not nodes or rank == len(acceptance):
            return 0.0 if not nodes else float("-inf")
        return max(
            acceptance[rank] * value(first) + given(nodes - first, rank + 1)
            for first in range(1, nodes + 1)
        )

    return value(size)


def test_without_a_depth_it_is_the_closed_recursion():
    for acceptance in (ACCEPTANCE, (0.6, 0.4), (0.9,), (0.25, 0.25, 0.25, 0.25), (0.1, 0.5)):
        for budget in range(1, 30):
            shape = best(acceptance, budget)
            assert shape.budget == budget and shape.is_gapless
            assert expected(shape, acceptance) == pytest.approx(closed(acceptance, budget + 1))


def test_depth_and_children_are_bounds():
    for depth in range(1, 6):
        for topk in (1, 2, 3):
            shape = best(ACCEPTANCE[:topk], 20, depth)
            assert shape.depth <= depth and shape.topk <= topk
            assert shape.budget == min(20, complete(topk, depth).budget)
    assert best((0.7,), 9, 4) == chain(4)


def test_more_budget_and_more_depth_never_hurt():
    values = [[expected(best(ACCEPTANCE, b, d), ACCEPTANCE) for d in (1, 2, 4, 8)] for b in (4, 9)]
    for row in values:
        assert row == sorted(row)
    assert all(less < more for less, more in zip(*values, strict=True) if less != more)


def test_ranks_that_never_hit_are_not_drafted():
    assert best((0.5, 0.0), 6, 4) == chain(4)
    assert (
        best((0.0, 0.5), 6, 2).budget == 6 or expected(best((0.0, 0.5), 6, 2), (0.0, 0.5)) == 1.75
    )
    assert best((0.0, 0.5), 1).budget == 1  # a tree has a node


def test_what_a_shape_is_worth():
    assert expected(chain(4), (0.7,)) == pytest.approx(1 + 0.7 + 0.49 + 0.343 + 0.2401)
    assert expected(complete(2, 1), (0.7, 0.2)) == pytest.approx(1.9)
    assert expected(EAGLE1, (0.5,)) == pytest.approx(sum(0.5**d for d in range(6)))


def test_the_default_is_an_acceptance_and_makes_a_tree():
    """Used where none was measured: most of the mass on the first child, some left over."""
    assert list(DEFAULT_ACCEPTANCE) == sorted(DEFAULT_ACCEPTANCE, reverse=True)
    assert 0 < sum(DEFAULT_ACCEPTANCE) < 1
    shape = best(DEFAULT_ACCEPTANCE, 25, 5)
    assert shape.budget == 25
    assert expected(shape, DEFAULT_ACCEPTANCE) > expected(EAGLE1, DEFAULT_ACCEPTANCE)


def test_hardware_chooses_size_and_depth():
    """Every size and depth by hand, for a flat, a rising and a stepped cost."""
    costs = [lambda n: 1.0, lambda n: 0.5 + 0.1 * n, lambda n: 1.0 + (n > 4)]
    for cost in costs:
        for draft_seconds in (0.0, 0.05, 0.4):
            found = choose(ACCEPTANCE, cost, draft_seconds=draft_seconds, budget=10, depth=4)
            rates = [1 / cost(1)]
            for budget in range(1, 11):
                for depth in range(1, 5):
                    shape = best(ACCEPTANCE, budget, depth)
                    seconds = cost(1 + shape.budget) + depth * draft_seconds
                    rates.append(expected(shape, ACCEPTANCE) / seconds)
            assert found.tokens / found.seconds == pytest.approx(max(rates))
            if found.shape is not None:
                assert found.tokens == pytest.approx(expected(found.shape, ACCEPTANCE))
                seconds = cost(1 + found.shape.budget) + found.shape.depth * draft_seconds
                assert found.seconds == pytest.approx(seconds)


def test_plain_decoding_can_win():
    found = choose(ACCEPTANCE, lambda n: n, draft_seconds=0.5)
    assert found.shape is None and (found.tokens, found.seconds) == (1.0, 1.0)
    slow = choose(ACCEPTANCE, lambda n: 1.0, draft_seconds=0.0, other_seconds=0.5)
    assert slow.shape.budget == 64 and slow.seconds == 1.5


def test_a_measured_list_bounds_the_size():
    assert choose(ACCEPTANCE, [1.0] * 6, draft_seconds=0.0).shape.budget == 5


def simulate(acceptance, num_steps, seed):
    """Verdicts over a 3-ary tree of depth 2 whose children are accepted by this vector."""
    chance, shape = random.Random(seed), complete(3, 2)
    tree = DraftTree(torch.tensor(shape.ranks), torch.tensor(shape.parents))
    for _ in range(num_steps):
        path = [0]
        while shape.children[path[-1]]:
            at, below = chance.random(), shape.children[path[-1]]
            hits = [sum(acceptance[: rank + 1]) for rank in range(3)]
            child = next((c for c, hit in zip(below, hits, strict=True) if at < hit), None)
            if child is None:
                break
            path.append(child)
        yield tree, Verdict(tuple(path), next_token=0)


def test_acceptance_is_read_off_verdicts():
    found = acceptance_by_rank(simulate(ACCEPTANCE, 4000, 0), topk=3)
    for one, other in zip(found, ACCEPTANCE, strict=True):
        assert one == pytest.approx(other, abs=0.03)
    assert acceptance_by_rank(simulate(ACCEPTANCE, 50, 0), topk=5)[3:] == (0.0, 0.0)


def test_only_children_that_were_tried_count():
    """Node 1 has one child and is reached; its missing second child says nothing."""
    tree = DraftTree(torch.tensor([9, 1, 2, 3]), torch.tensor([-1, 0, 0, 1]))
    assert acceptance_by_rank([(tree, Verdict((0, 1, 3), 7))], topk=2) == (1.0, 0.0)
    assert acceptance_by_rank([(tree, Verdict((0, 2), 7))], topk=2) == (0.0, 1.0)
    assert acceptance_by_rank([(tree, Verdict((0, 1), 7))], topk=2) == (0.5, 0.0)


def test_bad_settings_are_refused():
    for acceptance in ((), (0.0,), (0.7, 0.4), (-0.1, 0.5), (float("nan"),)):
        with pytest.raises(SettingError, match="acceptance"):
            best(acceptance, 4)
    for wrong in ({"budget": 0}, {"budget": 3, "depth": 0}):
        with pytest.raises(SettingError):
            best(ACCEPTANCE, **wrong)
    with pytest.raises(SettingError, match="seconds"):
        choose(ACCEPTANCE, [1.0], draft_seconds=-1.0)
    with pytest.raises(SettingError, match="topk"):
        acceptance_by_rank([], topk=0)
    with pytest.raises(SettingError, match="no drafted node"):
        acceptance_by_rank([(DraftTree.chain([1]), Verdict((0,), 2))], topk=2)


def test_large_trees_are_quick_to_find():
    """Levels stop being added when they no longer matter, long before the budget."""
    table = sequoia._Table(DEFAULT_ACCEPTANCE, 128, 128)
    assert len(table.values) < 40
