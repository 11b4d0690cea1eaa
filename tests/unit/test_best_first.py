"""The heap over marginals: which nodes, in which order, and what never enters."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import SettingError, ShapeError
from slipstream.trees.best_first import from_marginals

TWO = torch.tensor([[0.6, 0.3, 0.1], [0.9, 0.06, 0.04]]).log()
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def test_nodes_come_in_order_of_their_joint_probability():
    tree = from_marginals(9, TWO, IDS, budget=5)
    assert tree.tokens.tolist() == [9, 1, 4, 2, 4, 3]  # .6, .54, .3, .27, .1
    assert tree.parents.tolist() == [-1, 0, 1, 0, 3, 0]
    given = torch.tensor([1.0, 0.6, 0.9, 0.3, 0.9, 0.1])
    torch.testing.assert_close(tree.log_probs.exp(), given)
    assert tree.is_drawn is None and tree.draft_probs is None


def test_candidates_may_come_in_any_order():
    shuffle = torch.tensor([2, 0, 1])
    mixed = from_marginals(9, TWO[:, shuffle], IDS[:, shuffle], budget=7)
    straight = from_marginals(9, TWO, IDS, budget=7)
    assert torch.equal(mixed.tokens, straight.tokens)
    assert torch.equal(mixed.parents, straight.parents)


def test_every_size_from_one_node_to_all_there_are():
    """Report B149: a budget above the nodes there are, more ranks than tokens."""
    for budget in range(1, 20):
        assert from_marginals(0, TWO, IDS, budget).budget == min(budget, 3 + 9)
    assert from_marginals(0, TWO[:1], IDS[:1], 64).depths.tolist() == [0, 1, 1, 1]
    assert from_marginals(0, TWO[:, :1], IDS[:, :1], 64).parents.tolist() == [-1, 0, 1]
    for depth, width in ((0, 3), (2, 0)):
        empty = torch.zeros(depth, width)
        assert len(from_marginals(7, empty, empty.long(), 4)) == 1


def test_what_cannot_be_is_left_out_with_what_is_below():
    bad = torch.tensor([[0.0, float("-inf"), float("nan")], [float("nan"), -0.1, float("-inf")]])
    tree = from_marginals(9, bad, IDS, budget=9)
    assert tree.tokens.tolist() == [9, 1, 5]
    never = torch.full((2, 3), float("-inf"))
    assert len(from_marginals(9, never, IDS, budget=9)) == 1


def test_equals_keep_the_shallower_node():
    sure = torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log()
    tree = from_marginals(9, sure, torch.tensor([[1, 2], [3, 4]]), budget=2)
    assert tree.tokens.tolist() == [9, 1, 2]


def test_a_cost_decides_how_many_nodes_stay():
    """Reach .6, .54, .3, .27, .1: a token has to pay for the seconds it adds."""

    def size(slope):
        return from_marginals(9, TWO, IDS, 5, cost=lambda n: 1 + slope * n).budget

    assert size(0.0) == 5
    assert size(0.2) == 3  # 2.44 tokens in 1.8 s against 2.71 in 2.0 s
    assert size(9.0) == 0
    measured = [1.0, 1.0, 1.0]  # passes of up to three tokens were measured
    assert from_marginals(9, TWO, IDS, 5, cost=measured).budget == 2


def test_bad_input_is_refused():
    with pytest.raises(ShapeError, match="from_marginals"):
        from_marginals(0, TWO, IDS[:1], 3)
    with pytest.raises(SettingError, match="budget is 0"):
        from_marginals(0, TWO, IDS, 0)
