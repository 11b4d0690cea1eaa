"""EAGLE-2's tree against a plain twin that keeps everything, and every size that must not crash."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import SettingError, ShapeError
from slipstream.trees.dynamic import DynamicBuilder, rerank
from slipstream.types import Drawn

INF = float("inf")


class TableDrafter:
    """Conditionals over U ids that depend on the whole prefix; sorted children."""

    def __init__(self, vocab_size, seed, *, coarse=False, zeros=0.0):
        self.vocab_size, self.seed, self.coarse, self.zeros = vocab_size, seed, coarse, zeros

    def children(self, prefix):
        key = hash((self.seed, *prefix)) % (2**31)
        generator = torch.Generator().manual_seed(key)
        logits = torch.randn(self.vocab_size, generator=generator, dtype=torch.float64) * 2
        log_probs = logits.log_softmax(-1)
        if self.coarse:  # many equal scores, exact in any order of addition
            log_probs = (log_probs * 2).floor() / 2
        if self.zeros:
            gone = torch.rand(self.vocab_size, generator=generator) < self.zeros
            log_probs[gone] = -INF
        return log_probs.sort(descending=True, stable=True)


def build(builder, drafter, root=9, seen=None):
    builder.start(root)
    prefixes = [(root,)]
    while True:
        levels = [drafter.children(prefix) for prefix in prefixes]
        frontier = builder.grow(
            torch.stack([level.values for level in levels]),
            torch.stack([level.indices for level in levels]),
        )
        if frontier is None:
            return builder.finish()
        if seen is not None:
            seen.append(frontier)
        prefixes = [
            (*prefixes[parent], token)
            for parent, token in zip(
                frontier.parents.tolist(), frontier.tokens.tolist(), strict=True
            )
        ]


def twin(drafter, budget, depth, topk, root=9, beam_size=None):
    """The paper in lists: no early stop, nothing left out of the frontier."""
    nodes = [(0.0, (root,))]
    beam = [(0.0, (root,))]
    for _ in range(depth):
        level = []
        for joint, prefix in beam:
            values, ids = drafter.children(prefix)
            for log_prob, token in list(zip(values.tolist(), ids.tolist(), strict=True))[:topk]:
                level.append((joint + log_prob, (*prefix, token)))
        nodes += level
        best = sorted(level, key=lambda node: -node[0])  # stable: earlier first
        beam = best[: beam_size or topk]
    drafted = [node for node in nodes[1:] if node[0] > -INF]
    return {prefix for _, prefix in sorted(drafted, key=lambda node: -node[0])[:budget]}


def prefixes_of(tree):
    paths = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_the_tree_is_the_twins(coarse, zeros):
    for seed in range(12):
        drafter = TableDrafter(7, seed, coarse=coarse, zeros=zeros)
        for budget, depth, topk in ((1, 1, 1), (4, 3, 2), (10, 5, 3), (25, 4, 7), (200, 3, 5)):
            tree = build(DynamicBuilder(budget, depth, topk), drafter)
            paths = prefixes_of(tree)
            assert len(set(paths)) == len(paths)
            assert set(paths[1:]) == twin(drafter, budget, depth, topk)


@pytest.mark.parametrize("beam", [1, 2, 5, 40])
def test_the_beam_may_differ_from_the_children(beam):
    for seed in range(6):
        drafter = TableDrafter(7, seed)
        for budget, depth, topk in ((4, 3, 2), (25, 4, 3), (60, 3, 7)):
            tree = build(DynamicBuilder(budget, depth, topk, beam=beam), drafter)
            expected = twin(drafter, budget, depth, topk, beam_size=beam)
            assert set(prefixes_of(tree)[1:]) == expected


def test_a_cost_keeps_the_best_that_pay():
    """The first nodes of the same tree in order of their probability; none if none pays."""
    drafter = TableDrafter(7, 2)
    whole = build(DynamicBuilder(30, 4, 4), drafter)
    joint = dict.fromkeys(prefixes_of(whole), 0.0)
    for path, log_prob in zip(prefixes_of(whole)[1:], whole.log_probs.tolist()[1:], strict=True):
        joint[path] = joint[path[:-1]] + log_prob
    ranked = sorted(prefixes_of(whole)[1:], key=lambda path: -joint[path])
    sizes = []
    for slope in (0.0, 0.02, 0.1, 0.5, 9.0):
        builder = DynamicBuilder(30, 4, 4, cost=lambda n, slope=slope: 1 + slope * n)
        tree = build(builder, drafter)
        assert set(prefixes_of(tree)[1:]) == set(ranked[: tree.budget])
        sizes.append(tree.budget)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 30 and sizes[-1] == 0
    assert len(set(sizes)) > 3


def test_children_wanted_of_each_node():
    builder = DynamicBuilder(budget=9, depth=2, topk=3, beam=2)
    assert builder.num_children == (3,)
    builder.grow(torch.tensor([[-0.1, -2.0, -3.0]]), torch.tensor([[1, 2, 3]]))
    assert builder.num_children == (3, 3)
    builder.grow(torch.full((2, 3), -1.0), torch.zeros(2, 3, dtype=torch.int64))
    assert builder.num_children == ()


def test_drawn_children_are_refused():
    drawn = Drawn(torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1))
    with pytest.raises(SettingError, match="fixed before anything is drawn"):
        DynamicBuilder(2, 2, 2).grow(torch.zeros(1, 1), torch.zeros(1, 1).long(), drawn)


def test_log_probs_are_the_drafters_conditionals():
    drafter = TableDrafter(7, 1)
    tree = build(DynamicBuilder(15, 4, 3), drafter)
    for path, log_prob in zip(prefixes_of(tree)[1:], tree.log_probs.tolist()[1:], strict=True):
        values, ids = drafter.children(path[:-1])
        assert log_prob == pytest.approx(float(values[ids.tolist().index(path[-1])]), abs=1e-6)
    assert tree.log_probs[0] == 0 and tree.is_drawn is None and tree.draft_probs is None


def test_siblings_are_in_candidate_order_and_levels_in_order():
    tree = build(DynamicBuilder(20, 4, 4), TableDrafter(7, 3))
    assert tree.depths.tolist() == sorted(tree.depths.tolist())
    for node in range(len(tree)):
        mine = tree.log_probs[tree.parents == node].tolist()
        assert mine == sorted(mine, reverse=True)


@pytest.mark.parametrize("draft_vocab", [4, 6])
def test_no_combination_of_sizes_crashes(draft_vocab):
    """Report B149: depth 1..3, topk 1..8, budget 1..64, vocabulary 6, draft vocabulary 4."""
    ids = torch.tensor([5, 0, 3, 1, 2, 4])[:draft_vocab]
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(4, 64, draft_vocab, generator=generator).log_softmax(-1)
    table = table.sort(dim=-1, descending=True).values
    for depth in (1, 2, 3):
        for topk in range(1, 9):
            width = min(topk, draft_vocab)
            sizes = [width]  # nodes of each level: the beam times its children
            for _ in range(depth - 1):
                sizes.append(min(topk, sizes[-1]) * width)
            for budget in range(1, 65):
                builder = DynamicBuilder(budget, depth, topk)
                builder.start(2)
                frontier_size, level = 1, 0
                while frontier_size:
                    frontier = builder.grow(
                        table[level, :frontier_size], ids.expand(frontier_size, -1)
                    )
                    frontier_size = 0 if frontier is None else len(frontier.tokens)
                    level += 1
                tree = builder.finish()
                assert tree.budget == min(budget, sum(sizes))
                assert tree.num_drafted <= depth and int(tree.tokens.max()) < 6


def test_levels_that_cannot_enter_are_not_asked_for():
    """Budget 2, and both are better than the best child: one level although depth is 5."""
    builder = DynamicBuilder(budget=2, depth=5, topk=2)
    builder.start(0)
    assert builder.grow(torch.tensor([[-0.7, -0.7]]), torch.tensor([[1, 2]])) is None
    assert builder.finish().tokens.tolist() == [0, 1, 2]


def test_hopeless_nodes_are_not_expanded():
    builder = DynamicBuilder(budget=3, depth=3, topk=3)
    builder.start(0)
    first = builder.grow(torch.tensor([[-0.1, -3.0, -4.0]]), torch.tensor([[1, 2, 3]]))
    assert first.tokens.tolist() == [1, 2] and first.depth == 1  # node 3 is the third best itself
    second = builder.grow(
        torch.tensor([[-0.1, -3.0, -5.0], [-1.0, -1.0, -2.0]]), torch.tensor([[4, 5, 6]] * 2)
    )
    assert second.tokens.tolist() == [4] and second.parents.tolist() == [0] and second.depth == 2


def test_equal_scores_keep_the_shallower_node():
    builder = DynamicBuilder(budget=3, depth=2, topk=2)
    builder.start(0)
    builder.grow(torch.tensor([[-1.0, -2.0]]), torch.tensor([[1, 2]]))
    builder.grow(torch.tensor([[-1.0, -1.0], [0.0, -9.0]]), torch.tensor([[3, 4], [5, 6]]))
    assert builder.finish().tokens.tolist() == [0, 1, 2, 3]  # 2, 3, 4 and 5 all score -2


def test_a_certain_child_keeps_its_parent():
    """Scores do not fall along a certain path, nor with a log q above 0 by rounding."""
    for given in (0.0, 1e-6):
        builder = DynamicBuilder(budget=3, depth=5, topk=1)
        builder.start(0)
        row = torch.tensor([[given]])
        while builder.grow(row, torch.tensor([[1]])) is not None:
            pass
        assert builder.finish().parents.tolist() == [-1, 0, 1, 2]


def test_impossible_and_nan_children_never_enter():
    builder = DynamicBuilder(budget=9, depth=2, topk=3)
    builder.start(0)
    frontier = builder.grow(torch.tensor([[-0.1, float("nan"), -INF]]), torch.tensor([[1, 2, 3]]))
    assert frontier.tokens.tolist() == [1]
    builder.grow(torch.tensor([[-INF] * 3]), torch.tensor([[1, 2, 3]]))
    assert builder.finish().tokens.tolist() == [0, 1]
    builder.start(7)
    assert builder.grow(torch.tensor([[-INF]]), torch.tensor([[1]])) is None
    assert builder.finish().tokens.tolist() == [7]
    builder.start(8)
    assert builder.finish().tokens.tolist() == [8]


def test_frontier_parents_index_the_frontier_before():
    seen = []
    drafter = TableDrafter(7, 5)
    build(DynamicBuilder(60, 4, 3), drafter, seen=seen)
    sizes = [1] + [len(frontier.tokens) for frontier in seen]
    assert [frontier.depth for frontier in seen] == [1, 2, 3]
    assert seen[0].parents.tolist() == [0] * sizes[1]
    for size, frontier in zip(sizes, seen, strict=False):
        assert int(frontier.parents.min()) >= 0 and int(frontier.parents.max()) < size


def test_a_builder_is_used_again_from_start():
    builder = DynamicBuilder(10, 3, 3)
    first = build(builder, TableDrafter(7, 0))
    build(builder, TableDrafter(7, 1))
    again = build(builder, TableDrafter(7, 0))
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.parents, again.parents)


@pytest.mark.parametrize("name", ["budget", "depth", "topk"])
@pytest.mark.parametrize("value", [0, -3])
def test_settings_below_one_are_refused(name, value):
    settings = {"budget": 8, "depth": 3, "topk": 2} | {name: value}
    with pytest.raises(SettingError, match=f"{name} is {value}, expected 1 or more"):
        DynamicBuilder(**settings)


def test_rows_must_be_the_frontiers():
    builder = DynamicBuilder(8, 3, 2)
    builder.start(0)
    with pytest.raises(ShapeError, match="grow: log_probs"):
        builder.grow(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ShapeError, match="grow: tokens"):
        builder.grow(torch.zeros(1, 2), torch.zeros(1, 3, dtype=torch.int64))


def test_rerank():
    parents = torch.tensor([-1, 0, 0, 1, 2])
    scores = torch.tensor([0.0, -1.0, -2.0, -1.5, -INF])
    assert rerank(scores, parents, budget=2).tolist() == [0, 1, 3]
    assert rerank(scores, parents, budget=99).tolist() == [0, 1, 2, 3]
    with pytest.raises(SettingError):
        rerank(scores, parents, budget=0)
    with pytest.raises(ShapeError):
        rerank(scores, parents[:3], budget=1)
