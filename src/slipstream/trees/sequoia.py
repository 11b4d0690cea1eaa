"""Sequoia's tree: the fixed shape that is accepted furthest, found by a dynamic program.

It rests on one vector: acceptance[k] is the chance that the k-th child tried at a node is the one
that is accepted (so the sum is at most 1), whatever the context and the depth. A tree then emits
1 + sum over its nodes of the product of acceptances along the node's path, and

    value(m, l, b) = max over y of value(y, l, b - 1) + acceptance[b] * best(m - y, l - 1)

is the most that m nodes, root included, can emit in l levels when the root has b children; best
is the maximum over b. Without a limit on levels the recursion closes on itself: levels are added
until nothing changes.

Paper: Chen et al. 2024, Sequoia, arXiv:2402.12374 (tree construction and hardware-aware optimizer).
Differs: a tree of depth l is charged l draft passes, not l + 1; plain decoding is a candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.errors import SettingError
from slipstream.trees.budget import Cost, curve
from slipstream.trees.static import Shape
from slipstream.types import DraftTree, Verdict

DEFAULT_ACCEPTANCE = (0.4, 0.08, 0.07, 0.04, 0.04, 0.02, 0.01, 0.01)
"""Stands in until a drafter's own is measured: about what a small EAGLE-3 drafter reached on the
default model, greedy (docs/trees.md)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The tree to draft on some hardware.

    Args:
        shape: None when plain decoding is faster than every tree.
        tokens: expected per step, the target's own included.
        seconds: per step.
    """

    shape: Shape | None
    tokens: float
    seconds: float


def best(acceptance: Sequence[float], budget: int, depth: int | None = None) -> Shape:
    """The shape of at most `budget` nodes and `depth` levels that emits most per step.

    Args:
        acceptance: per rank, see the module's text; its length bounds a node's children.
        budget: drafted nodes, root not counted.
        depth: of the deepest node; None for no limit.

    Returns:
        Fewer nodes than the budget only where no more fit, or more would add nothing.

    Raises:
        SettingError: budget or depth is below 1, or acceptance is no acceptance.

    Example:
        >>> best((0.6, 0.3), budget=4).parents
        (-1, 0, 0, 1, 3)
    """
    table = _Table(_checked(acceptance, budget, depth), budget, budget if depth is None else depth)
    return table.shape(len(table.values) - 1, 2 + int(table.values[-1][2:].argmax()))


def choose(
    acceptance: Sequence[float],
    cost: Cost,
    *,
    draft_seconds: float,
    other_seconds: float = 0.0,
    budget: int = 64,
    depth: int = 16,
) -> Choice:
    """Size and depth for measured hardware: the least time per emitted token.

    Args:
        acceptance: per rank, see the module's text.
        cost: seconds of a target pass by its tokens, root included.
        draft_seconds: of one draft pass; a tree takes as many as it is deep.
        other_seconds: of a step besides drafting and the pass.
        budget: drafted nodes at most.
        depth: levels at most.

    Raises:
        SettingError: a number is outside its range, or acceptance is no acceptance.

    Example:
        >>> flat = choose((0.6, 0.3), lambda n: 1.0, draft_seconds=0.1, budget=8, depth=3)
        >>> flat.shape.budget, flat.shape.depth
        (8, 3)
        >>> choose((0.6, 0.3), lambda n: n, draft_seconds=0.1, budget=8, depth=3).shape is None
        True
    """
    if draft_seconds < 0 or other_seconds < 0:
        raise SettingError("seconds", min(draft_seconds, other_seconds), "0 or more")
    table = _Table(_checked(acceptance, budget, depth), budget, depth)
    passes = curve(cost, budget).numpy() + other_seconds  # [m]: 1, 2, ... tokens
    levels = np.arange(len(table.values))[:, None]
    seconds = levels * draft_seconds + passes  # [l, m]
    tokens = np.stack(table.values)[:, 1 : 1 + len(passes)]
    level, size = np.unravel_index(int((tokens / seconds).argmax()), tokens.shape)
    shape = table.shape(int(level), int(size) + 1) if level else None
    return Choice(shape, float(tokens[level, size]), float(seconds[level, size]))


def expected(shape: Shape, acceptance: Sequence[float]) -> float:
    """Tokens per step of any shape, the target's own included; ranks beyond the vector never hit.

    Example:
        >>> round(expected(Shape((-1, 0, 0, 1), (0, 0, 1, 0)), (0.6, 0.3)), 2)
        2.26
    """
    reach = [1.0]
    for rank, parent in zip(shape.ranks[1:], shape.parents[1:], strict=True):
        reach.append(reach[parent] * (acceptance[rank] if rank < len(acceptance) else 0.0))
    return sum(reach)


def acceptance_by_rank(judged: Iterable[tuple[DraftTree, Verdict]], topk: int) -> tuple[float, ...]:
    """How often the k-th child tried was the one accepted, at the nodes that were reached.

    Measure it with the rule, the temperature and children of the kind it will be used with, over
    trees whose shape is fixed (`kary`): where scores decide, only unsure nodes have many children.

    Args:
        judged: trees and what was kept of them.
        topk: ranks to count.

    Raises:
        SettingError: topk is below 1, or no node that was reached had a child.

    Example:
        >>> tree = DraftTree.chain([5, 6, 7])
        >>> acceptance_by_rank([(tree, Verdict((0, 1), next_token=9))], topk=1)
        (0.5,)
    """
    if topk < 1:
        raise SettingError("topk", topk, "1 or more")
    offered, accepted = [0] * topk, [0] * topk
    for tree, verdict in judged:
        tried = dict.fromkeys(verdict.path, 0)
        for node, parent in enumerate(tree.parents.tolist()):
            rank = tried.get(parent, topk)
            if rank < topk:
                tried[parent] += 1
                offered[rank] += 1
                accepted[rank] += node in verdict.path
    if not offered[0]:
        raise SettingError("acceptance", "no drafted node", "trees with drafted nodes")
    return tuple(hit / max(tried, 1) for hit, tried in zip(accepted, offered, strict=True))


class _Table:
    """Values for every number of levels and nodes, with what leads back to the shapes.

    `values[l][m]`: most tokens of a tree of m nodes, root included, in at most l levels; -inf
    where no such tree exists. Index 0 of m is never a tree.
    """

    def __init__(self, acceptance: Sequence[float], budget: int, depth: int) -> None:
        size = budget + 2
        lone = np.full(size, -np.inf)
        lone[1] = 1.0  # the root by itself
        rest = np.arange(size)[:, None] - np.arange(size)  # [m, y]: nodes of the newest child
        self.values = [lone]
        self.num_children = [np.zeros(size, dtype=np.int64)]  # per level: of the root, by m
        self.splits: list[list[np.ndarray]] = [[]]  # per level and child: y, by m
        for _ in range(depth):
            below = np.where(rest > 0, self.values[-1][rest], -np.inf)  # [m, y]
            exists = np.isfinite(below)
            below[~exists] = 0
            with_children, splits = [lone], []
            for chance in acceptance:
                total = with_children[-1] + np.where(exists, chance * below, -np.inf)
                splits.append(total.argmax(axis=1))
                with_children.append(total.max(axis=1))
            values = np.stack(with_children)  # [b, m]
            if np.array_equal(values.max(axis=0), self.values[-1]):
                break  # deeper trees are no better
            self.values.append(values.max(axis=0))
            self.num_children.append(values.argmax(axis=0))
            self.splits.append(splits)

    def shape(self, level: int, size: int) -> Shape:
        """The best tree of `size` nodes, root included, in `level` levels."""
        parents, ranks = [-1], [0]
        queue = [(level, size)]
        for node, (left, nodes) in enumerate(queue):  # the queue grows while it is read
            sizes = []
            for child in range(int(self.num_children[left][nodes]), 0, -1):
                kept = int(self.splits[left][child - 1][nodes])
                sizes.append(nodes - kept)
                nodes = kept
            for rank, below in enumerate(reversed(sizes)):
                queue.append((left - 1, below))
                parents.append(node)
                ranks.append(rank)
        return Shape(tuple(parents), tuple(ranks))


def _checked(acceptance: Sequence[float], budget: int, depth: int | None) -> Sequence[float]:
    for name, value in (("budget", budget), ("depth", 1 if depth is None else depth)):
        if value < 1:
            raise SettingError(name, value, "1 or more")
    fits = len(acceptance) > 0 and min(acceptance) >= 0 and 0 < sum(acceptance) <= 1 + 1e-6
    if not fits:
        raise SettingError(
            "acceptance",
            list(acceptance),
            "one chance per rank, 0 or more, with a sum above 0 and at most 1",
            "siblings exclude each other: the second child catches what the first one missed",
        )
    return acceptance
