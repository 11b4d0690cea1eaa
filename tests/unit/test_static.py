"""Fixed shapes: what they hold, how they are cut, and what a small vocabulary leaves of them."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import SettingError, ShapeError
from slipstream.trees.choices import EAGLE1, from_choices
from slipstream.trees.static import Shape, StaticBuilder, chain, complete, expansion
from slipstream.types import Drawn


def fill(shape, vocab_size, *, log_probs=None):
    """Children of every node: ids 0, 1, 2, … from the likeliest down."""
    builder = StaticBuilder(shape)
    builder.start(7)
    row = torch.arange(vocab_size) * -1.0 if log_probs is None else torch.tensor(log_probs)
    size, frontiers = 1, []
    while True:
        frontier = builder.grow(row.expand(size, -1), torch.arange(len(row)).expand(size, -1))
        if frontier is None:
            return builder.finish(), frontiers
        frontiers.append(frontier)
        size = len(frontier.tokens)


def choices_of(tree):
    paths = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def test_chain_and_complete():
    assert chain(1).parents == (-1, 0)
    assert chain(4).depth == 4 and chain(4).topk == 1
    assert complete(3, 3).budget == 3 + 9 + 27
    assert complete(2, 3).depths == (0, 1, 1, 2, 2, 2, 2, *[3] * 8)
    assert complete(2, 3, budget=4).budget == 4 and complete(2, 3, budget=99).budget == 14
    assert complete(1, 5).parents == chain(5).parents
    assert complete(10, 30, budget=1).budget == 1


def test_expansion_configurations():
    """SpecInfer's <k1, k2, ...>: a complete tree is the one with equal counts."""
    shape = expansion((1, 1, 3, 1, 1))
    assert [shape.depths.count(depth) for depth in range(6)] == [1, 1, 1, 3, 3, 3]
    assert shape.topk == 3 and shape.is_gapless
    assert expansion((2, 2, 2)) == complete(2, 3)
    assert expansion((3, 2), budget=4) == expansion((3, 2)).cut(depth=2, budget=4)


@pytest.mark.parametrize("shape", [chain(7), complete(3, 3), EAGLE1])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_a_shape_is_cut_to_a_depth(shape, depth):
    """Report B147: a tree made for five heads, used with fewer."""
    cut = shape.cut(depth=depth, budget=1000)
    assert cut.depth == min(depth, shape.depth)
    tree, _ = fill(cut, 10)
    assert tree.num_drafted == cut.depth
    assert set(choices_of(tree)) == {c for c in choices_of(fill(shape, 10)[0]) if len(c) <= depth}
    for budget in (1, 3, 10):
        assert shape.cut(depth=depth, budget=budget).budget == min(budget, cut.budget)


def test_ranks_beyond_the_vocabulary_are_left_out():
    """Report B149: topk above the draft vocabulary."""
    for vocab_size in range(1, 7):
        for topk in range(1, 9):
            tree, _ = fill(complete(topk, 3, budget=64), vocab_size)
            assert max(max(choice) for choice in choices_of(tree)) < vocab_size
            assert tree.budget <= 64
    assert fill(EAGLE1, 1)[0].tokens.tolist() == [7, 0, 0, 0, 0, 0]
    assert fill(from_choices([(2,), (2, 0)]), 2)[0].tokens.tolist() == [7]


def test_impossible_children_are_left_out_with_what_is_below():
    tree, _ = fill(complete(3, 2), 3, log_probs=[-0.1, float("-inf"), float("nan")])
    assert tree.tokens.tolist() == [7, 0, 0]


def test_log_probs_and_frontier_rows():
    tree, frontiers = fill(from_choices([(0,), (1,), (0, 1), (1, 0)]), 5)
    assert tree.log_probs.tolist() == [0.0, 0.0, -1.0, -1.0, 0.0]
    assert frontiers[0].parents.tolist() == [0, 0] and frontiers[0].depth == 1
    builder = StaticBuilder(from_choices([(0,), (1,), (1, 0), (1, 0, 0)]))
    builder.start(0)
    first = builder.grow(torch.zeros(1, 2), torch.tensor([[3, 4]]))
    assert first.tokens.tolist() == [4] and first.parents.tolist() == [0]
    second = builder.grow(torch.zeros(1, 2), torch.tensor([[5, 6]]))
    assert second.tokens.tolist() == [5] and second.depth == 2
    assert builder.grow(torch.zeros(1, 1), torch.tensor([[8]])) is None
    assert builder.finish().parents.tolist() == [-1, 0, 0, 2, 3]


def test_a_builder_is_used_again_from_start():
    builder = StaticBuilder(chain(2))
    for root in (3, 4):
        builder.start(root)
        builder.grow(torch.zeros(1, 1), torch.tensor([[5]]))
        builder.grow(torch.zeros(1, 1), torch.tensor([[6]]))
        assert builder.finish().tokens.tolist() == [root, 5, 6]
    builder.start(9)
    assert builder.finish().tokens.tolist() == [9]


def test_bad_settings_are_refused():
    for make in (
        lambda: chain(0),
        lambda: complete(0, 1),
        lambda: complete(1, 0),
        lambda: complete(1, 1, budget=0),
        lambda: expansion(()),
        lambda: expansion((2, 0)),
        lambda: expansion((2, 1), budget=0),
        lambda: chain(3).cut(depth=0, budget=1),
        lambda: chain(3).cut(depth=1, budget=0),
        lambda: Shape((-1,), (0,)),
        lambda: Shape((-1, 0, 1, 0), (0, 0, 0, 1)),
    ):
        with pytest.raises(SettingError):
            make()
    builder = StaticBuilder(chain(2))
    with pytest.raises(ShapeError):
        builder.grow(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int64))


def test_children_wanted_of_each_node():
    """What a drafter must offer below the frontier's nodes, in the frontier's order."""
    builder = StaticBuilder(from_choices([(0,), (1,), (0, 2), (1, 0)]))
    assert builder.num_children == (2,)
    row, ids = torch.zeros(1, 3), torch.tensor([[3, 4, 5]])
    builder.grow(row, ids)
    assert builder.num_children == (3, 1)
    builder.grow(row.expand(2, -1), ids.expand(2, -1))
    assert builder.num_children == ()
    builder.start(0)
    assert builder.num_children == (2,)


def drawn(probs, is_drawn):
    """Rows of what children were drawn from, and which of them were."""
    return Drawn(torch.tensor(is_drawn), torch.tensor(probs))


def test_drawn_children_keep_their_order_and_their_distribution():
    builder = StaticBuilder(complete(2, 2))
    builder.start(0)
    first = [[0.1, 0.2, 0.7]]
    builder.grow(
        torch.tensor([[0.1, 0.7]]).log(), torch.tensor([[0, 2]]), drawn(first, [[True] * 2])
    )
    second = [[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]]
    builder.grow(
        torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log(),
        torch.tensor([[0, 1], [2, 1]]),
        drawn(second, [[False, True], [True, True]]),
    )
    tree = builder.finish()
    assert tree.tokens.tolist() == [0, 0, 2, 0, 1, 2, 1]  # the less probable draw stays first
    assert tree.is_drawn.tolist() == [False, True, True, False, True, True, True]
    expected = torch.tensor([*first, *second, *[[0.0] * 3] * 4])
    assert torch.equal(tree.draft_probs, expected)
    builder.start(1)
    assert builder.finish().draft_probs is None  # nothing is left of the tree before


def test_exhausted_draws_are_left_out():
    """Without replacement a small support ends early: -inf from there on."""
    builder = StaticBuilder(complete(3, 1))
    builder.start(0)
    log_probs = torch.tensor([[0.6, 0.4, 0.0]]).log()
    builder.grow(log_probs, torch.tensor([[1, 0, 2]]), drawn([[0.4, 0.6, 0.0]], [[True] * 3]))
    tree = builder.finish()
    assert tree.tokens.tolist() == [0, 1, 0] and tree.is_drawn.tolist() == [False, True, True]


def test_what_does_not_fit_drawn_children_is_refused():
    row, ids = torch.zeros(1, 2), torch.tensor([[0, 1]])
    builder = StaticBuilder(from_choices([(1,)]))  # skips the first draw
    with pytest.raises(SettingError, match="skips ranks"):
        builder.grow(row, ids, drawn([[0.5, 0.5]], [[True, True]]))
    builder = StaticBuilder(complete(2, 1))
    for wrong in (drawn([[0.5, 0.5]], [[True]]), drawn([[0.5, 0.5]] * 2, [[True, True]])):
        with pytest.raises(ShapeError):
            builder.grow(row, ids, wrong)
