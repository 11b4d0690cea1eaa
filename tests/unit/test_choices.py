"""Shapes that others found, and how: by choice list, by counts, by measured accuracy."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from slipstream.errors import SettingError
from slipstream.trees.choices import EAGLE1, MEDUSA, by_accuracy, from_choices, from_counts
from slipstream.trees.static import complete


def nodes_of(shape):
    nodes = [()]
    for rank, parent in zip(shape.ranks[1:], shape.parents[1:], strict=True):
        nodes.append((*nodes[parent], rank))
    return nodes[1:]


def test_eagle1_and_medusa_are_sparse():
    """Algorithms 11b: 25 and 63 nodes, not complete binary trees."""
    assert (EAGLE1.budget, EAGLE1.depth, EAGLE1.topk) == (25, 5, 4)
    assert [EAGLE1.depths.count(depth) for depth in range(1, 6)] == [4, 8, 8, 3, 2]
    assert (MEDUSA.budget, MEDUSA.depth, MEDUSA.topk) == (63, 4, 10)
    assert [MEDUSA.depths.count(depth) for depth in range(1, 5)] == [10, 28, 23, 2]
    for shape in (EAGLE1, MEDUSA):
        assert shape.is_gapless
        per_node = {len(below) for below in shape.children}
        assert per_node != {0, 2} and shape.budget != complete(2, shape.depth).budget


def test_eagle1_node_by_node():
    """The list as section 3.4 of the specification spells it."""
    spelt = (
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    )
    assert set(nodes_of(EAGLE1)) == {tuple(map(int, word)) for word in spelt.split()}


def test_medusa_at_its_corners():
    nodes = set(nodes_of(MEDUSA))
    assert {(9,), (0, 9), (9, 0), (0, 0, 9), (0, 7, 0), (2, 0, 0), (0, 0, 0, 1)} <= nodes
    assert not {(10,), (9, 1), (0, 8, 0), (3, 0, 0), (0, 0, 1, 0), (0, 0, 0, 2)} & nodes


def test_choices_are_sorted_and_parents_required():
    assert from_choices([(1,), (0, 0), (0,), (0,)]).parents == (-1, 0, 0, 1)
    for bad in ([], [()], [(0, 0)], [(-1,)], [(0,), (1, 0)]):
        with pytest.raises(SettingError):
            from_choices(bad)
    for bad in ({}, {(): 0}, {(): 1, (1,): 1}):
        with pytest.raises(SettingError):
            from_counts(bad)


def test_accuracy_picks_the_best_products():
    """Against every node there is; a rank may be skipped when it is worse than the next."""
    for seed in range(20):
        chance = random.Random(seed)
        depth, width, budget = chance.randint(1, 4), chance.randint(1, 4), chance.randint(1, 20)
        accuracy = [[chance.random() / width for _ in range(width)] for _ in range(depth)]
        every = {
            node: math.prod(accuracy[d][rank] for d, rank in enumerate(node))
            for length in range(1, depth + 1)
            for node in itertools.product(range(width), repeat=length)
        }
        best = sorted(every, key=lambda node: -every[node])[:budget]
        assert set(nodes_of(by_accuracy(accuracy, budget))) == set(best)


def test_ranks_that_never_hit_are_left_out():
    shape = by_accuracy([[0.5, 0.0], [0.2, 0.0]], budget=9)
    assert nodes_of(shape) == [(0,), (0, 0)]


def test_bad_accuracies_are_refused():
    for bad in ([], [[0.5], [0.2, 0.1]], [[0.0]], [[]]):
        with pytest.raises(SettingError):
            by_accuracy(bad, budget=3)
    with pytest.raises(SettingError):
        by_accuracy([[0.5]], budget=0)
