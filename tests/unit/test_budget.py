"""How many nodes pay for themselves: the best of all sizes, zero included."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.errors import SettingError, ShapeError
from slipstream.trees.budget import best_size, curve, rates

REACH = torch.tensor([0.9, 0.5, 0.1])


def test_the_rate_of_every_size():
    found = rates(REACH, [1.0, 1.5, 2.0, 4.0], other_seconds=1.0)
    expected = torch.tensor([1 / 2, 1.9 / 2.5, 2.4 / 3, 2.5 / 5], dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    assert best_size(REACH, [1.0, 1.5, 2.0, 4.0], other_seconds=1.0) == 2


def test_zero_when_nothing_pays():
    assert best_size(REACH, lambda n: n) == 0
    assert best_size(torch.zeros(0), lambda n: n) == 0
    assert best_size(torch.zeros(5), lambda n: 1.0) == 0  # the fewest among equals


def test_a_free_pass_takes_all():
    assert best_size(REACH, lambda n: 1.0) == 3


def test_a_step_in_the_cost_is_jumped_over():
    """A pass in tiles of eight tokens: the greedy stop at the first step would lose."""
    reach = torch.full((15,), 0.9)

    def tiles(n):
        return 1.0 if n <= 4 else 1.8

    speeds = rates(reach, tiles)
    assert speeds[4] < speeds[3]  # where a rule that stops at the first loss stops
    assert best_size(reach, tiles) == 15


def test_equals_looking_at_every_size():
    chance = random.Random(0)
    for _ in range(200):
        reach = sorted((chance.random() for _ in range(chance.randint(0, 12))), reverse=True)
        cost = [chance.uniform(0.1, 2) for _ in range(len(reach) + 1)]
        other = chance.random()
        speeds = [(1 + sum(reach[:n])) / (cost[n] + other) for n in range(len(reach) + 1)]
        found = best_size(torch.tensor(reach, dtype=torch.float64), cost, other_seconds=other)
        assert speeds[found] == pytest.approx(max(speeds))


def test_more_drafting_time_never_makes_the_tree_smaller():
    sizes = [best_size(REACH, lambda n: 0.5 * n, other_seconds=s) for s in (0, 1, 2, 4, 8, 99)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_a_measured_list_ends_the_choice():
    assert best_size(REACH, [1.0, 1.0]) == 1
    assert curve([1.0, 2.0, 3.0], num_nodes=1).tolist() == [1.0, 2.0]
    assert curve(lambda n: n / 2, num_nodes=2).tolist() == [0.5, 1.0, 1.5]


def test_bad_input_is_refused():
    with pytest.raises(ShapeError):
        best_size(REACH[None], [1.0])
    for reach in (torch.tensor([0.5, 0.6]), torch.tensor([1.2]), torch.tensor([float("nan")])):
        with pytest.raises(SettingError, match="reach"):
            best_size(reach, [1.0, 1.0])
    for cost in ([], [0.0], [1.0, -1.0], [float("nan")]):
        with pytest.raises(SettingError, match="cost"):
            best_size(REACH, cost)
