"""Trees with one root become one: shared prefixes are shared nodes.

Several drafters, or a drafter and prompt lookup, propose together this way. A union holds nodes
that were chosen (at least the choice of what to merge), so it is a chosen tree and is verified by
`walk`.

Paper: Miao et al. 2023, SpecInfer, arXiv:2305.09781, section 3 (merge-based trees).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream import shapes
from slipstream.errors import SettingError, ShapeError
from slipstream.types import DraftTree


def union(trees: Sequence[DraftTree], budget: int) -> DraftTree:
    """The nodes of the first tree, then of each later one those that are lacking, in a budget.

    When not all fit, the nodes of a later tree are left out from the deepest up, the less
    probable of a level first; a node without a known probability counts as certain.

    Args:
        trees: one or more; the first is kept in its own order (cut at the budget), the others
            fill in turn what is left.
        budget: drafted nodes of the result, root not counted.

    Returns:
        A chosen tree; `log_probs` are kept where known, NaN where not, None if none are.

    Raises:
        ShapeError: no tree, the roots differ, or log_probs are not [N].
        SettingError: budget is below 1.

    Example:
        >>> merged = union([DraftTree.chain([5, 6, 7]), DraftTree.chain([5, 6, 8])], budget=9)
        >>> merged.tokens, merged.parents
        (tensor([5, 6, 7, 8]), tensor([-1,  0,  1,  1]))
    """
    if budget < 1:
        raise SettingError("budget", budget, "1 or more")
    roots = [int(tree.tokens[0]) for tree in trees]
    if len(set(roots)) != 1:
        found = " and ".join(str(root) for root in roots) or "missing"
        raise ShapeError(f"union: roots are tokens {found}, expected one root")
    merged = _Merge(roots[0], budget)
    for place, tree in enumerate(trees):
        own_order = list(range(1, len(tree)))
        merged.add(tree, order=_shallow_and_likely_first(tree) if place else own_order)
    return merged.tree()


class _Merge:
    """Nodes by (parent, token)."""

    def __init__(self, root: int, budget: int) -> None:
        self.budget = budget
        self.tokens, self.parents, self.log_probs = [root], [-1], [0.0]
        self.index: dict[tuple[int, int], int] = {}

    def add(self, tree: DraftTree, order: list[int]) -> None:
        """Add the tree's nodes in an order that has parents before children."""
        tokens, parents, given = tree.tokens.tolist(), tree.parents.tolist(), _given(tree)
        place = {0: 0}
        for node in order:
            parent = place.get(parents[node])
            if parent is None:  # its parent did not fit
                continue
            at = self.index.get((parent, tokens[node]))
            if at is None:
                if len(self.tokens) > self.budget:
                    continue
                at = self.index[parent, tokens[node]] = len(self.tokens)
                self.tokens.append(tokens[node])
                self.parents.append(parent)
                self.log_probs.append(given[node])
            elif self.log_probs[at] != self.log_probs[at]:  # NaN: the other tree may know
                self.log_probs[at] = given[node]
            place[node] = at

    def tree(self) -> DraftTree:
        known = len(self.tokens) == 1 or any(x == x for x in self.log_probs[1:])
        return DraftTree(
            torch.tensor(self.tokens),
            torch.tensor(self.parents),
            log_probs=torch.tensor(self.log_probs) if known else None,
        )


def _given(tree: DraftTree) -> list[float]:
    if tree.log_probs is None:
        return [0.0] + [float("nan")] * tree.budget
    shapes.check("union", tokens=(tree.tokens, "N"), log_probs=(tree.log_probs, "N"))
    return tree.log_probs.tolist()


def _shallow_and_likely_first(tree: DraftTree) -> list[int]:
    parents, depths, joint = tree.parents.tolist(), tree.depths.tolist(), _given(tree)
    for node in range(1, len(joint)):
        own = joint[node] if joint[node] == joint[node] else 0.0
        joint[node] = joint[parents[node]] + own
    return sorted(range(1, len(joint)), key=lambda node: (depths[node], -joint[node], node))
