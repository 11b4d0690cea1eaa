"""Merging trees: shared prefixes once, the first tree first, the budget kept."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.errors import SettingError, ShapeError
from slipstream.trees.union import union
from slipstream.types import DraftTree


def tree(parents, tokens, log_probs=None):
    given = None if log_probs is None else torch.tensor(log_probs)
    return DraftTree(torch.tensor(tokens), torch.tensor(parents), log_probs=given)


def paths(t):
    found = []
    for token, parent in zip(t.tokens.tolist(), t.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_shared_prefixes_are_shared_nodes():
    a = tree([-1, 0, 0, 1], [5, 1, 2, 3])
    b = tree([-1, 0, 1, 2], [5, 1, 4, 6])
    merged = union([a, b], budget=10)
    assert set(paths(merged)) == set(paths(a)) | set(paths(b))
    assert len(merged) == 6
    assert merged.tokens.tolist()[:4] == a.tokens.tolist()
    assert merged.is_drawn is None and merged.draft_probs is None


def test_random_unions_hold_exactly_both():
    generator = torch.Generator().manual_seed(0)

    def some(size):
        parents, tokens, used = [-1], [0], set()
        for _ in range(size):
            parent = int(torch.randint(len(tokens), (), generator=generator))
            token = int(torch.randint(3, (), generator=generator))
            if (parent, token) not in used:
                used.add((parent, token))
                parents.append(parent)
                tokens.append(token)
        return tree(parents, tokens)

    for _ in range(50):
        a, b = some(12), some(12)
        merged = union([a, b], budget=64)
        found = paths(merged)
        assert len(set(found)) == len(found) and set(found) == set(paths(a)) | set(paths(b))
        small = union([a, b], budget=a.budget + 2)
        assert small.budget == min(a.budget + 2, merged.budget)
        assert torch.equal(small.tokens[: len(a)], a.tokens)


def test_the_budget_drops_the_deepest_then_the_least_probable_of_the_second():
    a = tree([-1, 0], [5, 1], [0.0, -0.1])
    b = tree([-1, 0, 0, 1, 2], [5, 2, 3, 4, 6], [0.0, -2.0, -1.0, -0.1, -0.5])
    assert paths(union([a, b], budget=2))[1:] == [(5, 1), (5, 3)]
    assert paths(union([a, b], budget=4))[1:] == [(5, 1), (5, 3), (5, 2), (5, 3, 6)]
    assert union([a, b], budget=9).budget == 5
    assert paths(union([b, a], budget=2))[1:] == [(5, 2), (5, 3)]  # the first is cut at the budget


def test_a_child_whose_parent_did_not_fit_is_dropped():
    a = tree([-1, 0], [5, 1])
    merged = union([a, DraftTree.chain([5, 2, 3])], budget=1)
    assert paths(merged) == [(5,), (5, 1)]


def test_log_probs_are_kept_where_known():
    a = tree([-1, 0, 1], [5, 1, 2], [0.0, -0.5, -0.25])
    lookup = DraftTree.chain([5, 1, 7])
    merged = union([a, lookup], budget=9).log_probs.tolist()
    assert merged[:3] == [0.0, -0.5, -0.25] and math.isnan(merged[3])
    turned = union([lookup, a], budget=9)
    assert paths(turned)[1:] == [(5, 1), (5, 1, 7), (5, 1, 2)]
    known = turned.log_probs.tolist()
    assert known[1] == -0.5 and math.isnan(known[2]) and known[3] == -0.25
    assert union([lookup, lookup], budget=9).log_probs is None


def test_several_trees_are_merged_in_turn():
    """Three drafters: as if the first two were merged and then the third."""
    a, b, c = (DraftTree.chain([5, *tokens]) for tokens in ([1, 2], [1, 3], [4, 2, 6]))
    for budget in range(1, 9):
        together = union([a, b, c], budget)
        in_turn = union([union([a, b], budget), c], budget)
        assert together.tokens.tolist() == in_turn.tokens.tolist()
        assert together.parents.tolist() == in_turn.parents.tolist()
    assert paths(union([a, b, c], 9))[1:] == [
        (5, 1), (5, 1, 2), (5, 1, 3), (5, 4), (5, 4, 2), (5, 4, 2, 6)
    ]  # fmt: skip
    assert paths(union([a], 9)) == paths(a)


def test_roots_alone():
    root = DraftTree.chain([5])
    assert union([root, root], budget=3).tokens.tolist() == [5]
    assert union([root, DraftTree.chain([5, 6])], budget=3).tokens.tolist() == [5, 6]
    assert union([DraftTree.chain([5, 6]), root], budget=3).tokens.tolist() == [5, 6]


def test_bad_unions_are_refused():
    with pytest.raises(ShapeError, match="tokens 5 and 6"):
        union([DraftTree.chain([5]), DraftTree.chain([6])], budget=3)
    with pytest.raises(ShapeError, match="missing"):
        union([], budget=3)
    with pytest.raises(SettingError, match="budget is 0"):
        union([DraftTree.chain([5]), DraftTree.chain([5])], budget=0)
    with pytest.raises(ShapeError, match="union: log_probs"):
        union([DraftTree.chain([5]), tree([-1, 0], [5, 1], [0.0])], budget=3)
