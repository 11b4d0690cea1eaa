"""Laws of the trees: the best ones are the best of all there are, and every one is a tree.

Each is checked against a plain twin that enumerates, over inputs that hypothesis makes up, with
ties on purpose: scores are multiples of 1/4, so that equal sums are equal numbers.
"""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.trees import kinds
from slipstream.trees.best_first import from_marginals
from slipstream.trees.choices import EAGLE1
from slipstream.trees.dynamic import DynamicBuilder, rerank
from slipstream.trees.sequoia import best, expected
from slipstream.trees.static import complete
from slipstream.types import DraftTree, Drawn

BOUNDED = settings(max_examples=40, deadline=None)
INF = float("inf")

quarters = st.integers(0, 12).map(lambda n: -n / 4)  # nats
maybe = st.one_of(quarters, st.just(-INF))


def joints(tree: DraftTree) -> list[float]:
    """Joint log-probability of every node."""
    found = [0.0]
    for log_prob, parent in zip(
        tree.log_probs.tolist()[1:], tree.parents.tolist()[1:], strict=True
    ):
        found.append(found[parent] + log_prob)
    return found


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from below the root to every node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        found.append((*found[parent], token))
    return found


# --- best first --------------------------------------------------------------------------------


@BOUNDED
@given(
    table=st.integers(1, 4).flatmap(
        lambda width: st.lists(st.lists(maybe, min_size=width, max_size=width), max_size=4)
    ),
    budget=st.integers(1, 30),
)
def test_best_first_over_marginals_is_the_best_of_all(table: list, budget: int) -> None:
    width = len(table[0]) if table else 1
    log_probs = torch.tensor(table).reshape(len(table), width)
    ids = torch.arange(width).expand(len(table), width)
    tree = from_marginals(9, log_probs, ids, budget)
    every = {
        path: sum(table[depth][token] for depth, token in enumerate(path))
        for length in range(1, len(table) + 1)
        for path in itertools.product(range(width), repeat=length)
    }
    possible = sorted((score for score in every.values() if score > -INF), reverse=True)
    drafted = paths(tree)[1:]
    assert len(set(drafted)) == len(drafted)
    assert joints(tree)[1:] == possible[:budget]  # and in this order
    assert all(every[path] == score for path, score in zip(drafted, joints(tree)[1:], strict=True))


def conditionals(seed: int, path: tuple[int, ...], width: int) -> list[float]:
    """Sorted log-probabilities of a node's children: a function of the whole path."""
    chance = random.Random(repr((seed, path)))
    scores = [-chance.randint(0, 10) / 4 if chance.random() < 0.9 else -INF for _ in range(width)]
    return sorted(scores, reverse=True)


def grown(builder: object, seed: int, width: int) -> DraftTree:
    """A tree over `conditionals`, whose tokens are the ranks."""
    builder.start(0)
    frontier: list[tuple[int, ...]] = [()]
    while builder.num_children:
        rows = torch.tensor([conditionals(seed, path, width) for path in frontier])
        found = builder.grow(rows, torch.arange(width).expand(len(frontier), width))
        if found is not None:
            above = [frontier[parent] for parent in found.parents.tolist()]
            frontier = [(*p, token) for p, token in zip(above, found.tokens.tolist(), strict=True)]
    return builder.finish()


def every_node(seed: int, width: int, depth: int) -> dict[tuple[int, ...], float]:
    """Joint scores of all nodes there are, by depth, then in candidate order."""
    level, found = {(): 0.0}, {}
    for _ in range(depth):
        level = {
            (*path, rank): joint + given
            for path, joint in level.items()
            for rank, given in enumerate(conditionals(seed, path, width))
        }
        found |= level
    return {path: score for path, score in found.items() if score > -INF}


@BOUNDED
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 4),
    depth=st.integers(1, 4),
    budget=st.integers(1, 40),
)
def test_best_first_over_paths_is_the_best_of_all(seed, width, depth, budget) -> None:
    kind = kinds.make("best-first", budget=budget, depth=depth, topk=width)
    tree = grown(kind.build(depth, budget), seed, width)
    every = every_node(seed, width, depth)
    drafted = paths(tree)[1:]
    assert len(set(drafted)) == len(drafted)
    assert all(every[path] == score for path, score in zip(drafted, joints(tree)[1:], strict=True))
    best_of_all = sorted((-score, len(path)) for path, score in every.items())[:budget]
    assert sorted((-every[path], len(path)) for path in drafted) == best_of_all  # shallow first


@BOUNDED
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 30), beam=st.integers(1, 5))
def test_levels_that_cannot_enter_are_saved_and_change_nothing(seed, budget, beam) -> None:
    """EAGLE-2 with its early stop against the same beam run to the end."""
    stopped = grown(DynamicBuilder(budget, 4, 3, beam=beam), seed, 3)
    whole = DynamicBuilder(10**6, 4, 3, beam=beam)  # everything enters, so nothing is left out
    grown(whole, seed, 3)
    whole.budget = budget
    assert set(paths(stopped)) == set(paths(whole.finish()))


# --- reranking ---------------------------------------------------------------------------------


@BOUNDED
@given(
    nodes=st.lists(st.tuples(st.integers(0, 10**6), quarters), max_size=40),
    budget=st.integers(1, 45),
)
def test_the_best_by_value_are_connected_ties_included(nodes: list, budget: int) -> None:
    parents, scores = [-1], [0.0]
    for pick, log_prob in nodes:  # many conditionals are 0: a child as good as its parent
        parents.append(pick % len(parents))
        scores.append(scores[parents[-1]] + log_prob)
    kept = rerank(torch.tensor(scores), torch.tensor(parents), budget=budget).tolist()
    assert kept == sorted(set(kept)) and kept[0] == 0
    assert len(kept) == min(budget, len(nodes)) + 1
    assert all(parents[node] in kept for node in kept[1:])
    left_out = set(range(len(scores))) - set(kept)
    assert all(scores[out] <= min(scores[node] for node in kept) for out in left_out)


# --- Sequoia -----------------------------------------------------------------------------------

acceptances = (
    st.lists(st.integers(0, 6), min_size=1, max_size=3)
    .filter(any)
    .map(lambda counts: tuple(count / (sum(counts) + 1) for count in counts))
)


@cache
def values(acceptance: tuple[float, ...], size: int, depth: int) -> tuple[float, ...]:
    """The value of every tree of `size` nodes, root included, by enumeration."""

    def lists(nodes: int, rank: int) -> list[float]:
        """Gains of every way to hang `nodes` nodes below a node, from this child on."""
        if not nodes:
            return [0.0]
        if rank == len(acceptance) or not depth:
            return []
        return [
            acceptance[rank] * child + rest
            for first in range(1, nodes + 1)
            for child in values(acceptance, first, depth - 1)
            for rest in lists(nodes - first, rank + 1)
        ]

    return tuple(1 + gain for gain in lists(size - 1, 0))


@BOUNDED
@given(acceptance=acceptances, budget=st.integers(1, 6), depth=st.integers(1, 6))
def test_sequoia_is_the_best_of_all_trees(acceptance, budget, depth) -> None:
    shape = best(acceptance, budget, depth)
    assert shape.budget <= budget and shape.depth <= depth and shape.topk <= len(acceptance)
    every = [value for size in range(2, budget + 2) for value in values(acceptance, size, depth)]
    assert expected(shape, acceptance) == pytest.approx(max(every))


@BOUNDED
@given(acceptance=acceptances, topk=st.integers(1, 4), depth=st.integers(1, 5))
def test_sequoia_is_at_least_every_complete_tree_of_its_size(acceptance, topk, depth) -> None:
    other = complete(topk, depth, budget=40)
    found = expected(best(acceptance, other.budget), acceptance)
    assert found >= expected(other, acceptance) - 1e-9


@BOUNDED
@given(acceptance=acceptances)
def test_sequoia_is_at_least_eagles_tree(acceptance) -> None:
    assert expected(best(acceptance, 25), acceptance) >= expected(EAGLE1, acceptance) - 1e-9


# --- every kind --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", kinds.KINDS)
@BOUNDED
@given(
    seed=st.integers(0, 10**6),
    numbers=st.tuples(st.integers(1, 20), st.integers(1, 5), st.integers(1, 4)),
    room=st.tuples(st.integers(1, 6), st.integers(1, 24)),
)
def test_every_kind_grows_a_tree(name, seed, numbers, room) -> None:
    """Parents first, no path twice, siblings in candidate order, within all bounds."""
    budget, depth, topk = numbers
    kind = kinds.make(name, budget=budget, depth=depth, topk=topk)
    tree = grown(kind.build(*room), seed, kind.topk)
    drafted = paths(tree)[1:]
    assert len(set(drafted)) == len(drafted) <= min(budget, room[1])
    assert tree.num_drafted <= min(depth, room[0])
    for parent in range(len(tree)):
        ranks = tree.tokens[tree.parents == parent].tolist()
        assert ranks == sorted(ranks)
    for path, log_prob in zip(drafted, tree.log_probs.tolist()[1:], strict=True):
        assert log_prob == conditionals(seed, path[:-1], kind.topk)[path[-1]] > -INF


FIXED = [name for name in kinds.KINDS if kinds.make(name, budget=9, depth=3, topk=3).shape]


@pytest.mark.parametrize("name", FIXED)
def test_every_fixed_kind_keeps_what_was_drawn(name) -> None:
    """Order, marks and distributions of drawn children reach the tree as they were given."""
    vocab_size, chance = 6, torch.Generator().manual_seed(1)
    builder = kinds.make(name, budget=9, depth=3, topk=3).build(3, 9)
    builder.start(0)
    asked = []
    while builder.num_children:
        size, width = len(builder.num_children), max(builder.num_children)
        probs = torch.rand(size, vocab_size, generator=chance)
        probs = probs / probs.sum(-1, keepdim=True)
        tokens = probs.multinomial(width, replacement=True, generator=chance)
        is_drawn = torch.rand(size, width, generator=chance) < 0.7
        asked.append((builder.num_children, probs, tokens, is_drawn))
        builder.grow(probs.gather(1, tokens).log(), tokens, Drawn(is_drawn, probs))
    tree = builder.finish()
    inner = iter(
        (probs[row], tokens[row, :count], is_drawn[row, :count])
        for counts, probs, tokens, is_drawn in asked
        for row, count in enumerate(counts)
    )
    for node in range(len(tree)):
        below = tree.parents == node
        if not below.any():
            assert not tree.draft_probs[node].any()
            continue
        probs, tokens, is_drawn = next(inner)
        assert torch.equal(tree.draft_probs[node], probs)
        assert torch.equal(tree.tokens[below], tokens)
        assert torch.equal(tree.is_drawn[below], is_drawn)
    assert next(inner, None) is None and not tree.is_drawn[0]
