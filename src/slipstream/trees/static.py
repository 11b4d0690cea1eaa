"""Fixed shapes: which ranks of which node are drafted, decided before anything is seen.

A shape says "the r-th likeliest child of that node"; the drafter fills in the tokens. A choice
list is Medusa's and EAGLE-1's notation: `(0, 2)` is the third likeliest child of the likeliest
child of the root.

Paper: Cai et al. 2024, Medusa, arXiv:2401.10774, section 2.3.3; Li et al. 2024, EAGLE,
arXiv:2401.15077, section 4.1.
Differs: ranks that a small draft vocabulary does not have are left out, with what is below them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream import shapes
from slipstream.errors import SettingError
from slipstream.trees.protocol import Frontier
from slipstream.types import DraftTree


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree of ranks, level by level; node 0 is the root.

    Args:
        parents: parents[0] == -1; nodes are ordered by depth, siblings by rank.
        ranks: which child of its parent each node is, likeliest first; 0 for the root.

    Raises:
        SettingError: no drafted node, or nodes out of order.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        depths = [0]
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node or depths[parent] + 1 < depths[-1]:
                raise SettingError("tree shape", f"node {node} below {parent}", "level order")
            depths.append(depths[parent] + 1)
        if len(depths) < 2 or len(self.ranks) != len(depths):
            raise SettingError("tree shape", f"{len(depths) - 1} drafted nodes", "1 or more")
        object.__setattr__(self, "depths", tuple(depths))

    @property
    def budget(self) -> int:
        """Drafted nodes."""
        return len(self.parents) - 1

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return self.depths[-1]

    @property
    def topk(self) -> int:
        """Children a drafter must be able to rank below one node."""
        return max(self.ranks) + 1

    def cut(self, *, depth: int, budget: int) -> Shape:
        """The part of the shape within a depth and a budget, the shallowest nodes first.

        Raises:
            SettingError: depth or budget is below 1.
        """
        _at_least_one(depth=depth, budget=budget)
        size = 1 + min(budget, sum(1 for d in self.depths[1:] if d <= depth))
        return Shape(self.parents[:size], self.ranks[:size])


def chain(depth: int) -> Shape:
    """The likeliest token, `depth` times.

    Raises:
        SettingError: depth is below 1.

    Example:
        >>> chain(3).parents
        (-1, 0, 1, 2)
    """
    _at_least_one(depth=depth)
    return Shape(tuple(range(-1, depth)), (0,) * (depth + 1))


def complete(topk: int, depth: int, budget: int | None = None) -> Shape:
    """Every node has `topk` children down to `depth`, cut to the budget's shallowest nodes.

    Raises:
        SettingError: topk, depth or budget is below 1.

    Example:
        >>> complete(2, 2).parents
        (-1, 0, 0, 1, 1, 2, 2)
        >>> complete(2, 9, budget=3).parents
        (-1, 0, 0, 1)
    """
    _at_least_one(topk=topk, depth=depth, budget=1 if budget is None else budget)
    parents, ranks, level = [-1], [0], [0]
    for _ in range(depth):
        below: list[int] = []
        for node in level:
            for rank in range(topk):
                if budget is not None and len(parents) > budget:
                    return Shape(tuple(parents), tuple(ranks))
                below.append(len(parents))
                parents.append(node)
                ranks.append(rank)
        level = below
    return Shape(tuple(parents), tuple(ranks))


def from_choices(choices: Iterable[Sequence[int]]) -> Shape:
    """A shape from a choice list: one tuple of ranks per node.

    Raises:
        SettingError: the list is empty, holds a negative rank, or a node without its parent.

    Example:
        >>> from_choices([(0,), (1,), (0, 0), (1, 0)]).parents
        (-1, 0, 0, 1, 2)
    """
    nodes = sorted({tuple(choice) for choice in choices} - {()}, key=lambda node: (len(node), node))
    index = {(): 0}
    for node in nodes:
        if node[:-1] not in index or min(node) < 0:
            raise SettingError(
                "tree choice", list(node), "ranks of 0 or more below a node that is listed too"
            )
        index[node] = len(index)
    parents = (-1, *(index[node[:-1]] for node in nodes))
    return Shape(parents, (0, *(node[-1] for node in nodes)))


# fmt: off
EAGLE1_CHOICES: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)
# fmt: on
"""EAGLE-1's sparse tree: 25 drafted nodes, depth 5."""


class StaticBuilder:
    """Fills a fixed shape with a drafter's likeliest tokens.

    The nodes are *chosen*, by rank, and are verified by `walk`.

    Args:
        shape: which ranks to draft.

    Example:
        >>> builder = StaticBuilder(chain(1))
        >>> builder.start(9)
        >>> builder.grow(torch.tensor([[-0.1, -2.5]]), torch.tensor([[4, 5]]))
        >>> builder.finish().tokens
        tensor([9, 4])
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.budget, self.depth, self.topk = shape.budget, shape.depth, shape.topk
        self._children: list[list[int]] = [[] for _ in shape.parents]
        for node, parent in enumerate(shape.parents[1:], start=1):
            self._children[parent].append(node)
        self.start(0)

    def start(self, root: int) -> None:
        """Begin a tree at this root token."""
        self._tokens, self._parents, self._given = [root], [-1], [0.0]
        self._frontier = [(0, 0)]  # of each expanded node: index in the tree, index in the shape
        self._level = 0

    def grow(self, log_probs: Tensor, tokens: Tensor) -> Frontier | None:
        """Take the scores of the frontier's children; see `TreeBuilder.grow`.

        Children of probability zero (-inf or NaN) are left out.

        Raises:
            ShapeError: log_probs and tokens differ, or their rows are not the frontier's.
        """
        fits = f"{len(self._frontier)} M"
        shapes.check("grow", log_probs=(log_probs, fits), tokens=(tokens, fits))
        given = log_probs[:, : self.topk].detach().float().cpu().tolist()
        ids = tokens[:, : self.topk].cpu().tolist()
        self._level += 1
        frontier, rows = [], []
        for row, (parent, shape_node) in enumerate(self._frontier):
            for child in self._children[shape_node]:
                rank = self.shape.ranks[child]
                if rank >= len(given[row]) or not given[row][rank] > float("-inf"):
                    continue
                if self._children[child]:
                    frontier.append((len(self._tokens), child))
                    rows.append(row)
                self._tokens.append(ids[row][rank])
                self._parents.append(parent)
                self._given.append(given[row][rank])
        self._frontier = frontier
        if not frontier:
            return None
        newest = torch.tensor([self._tokens[node] for node, _ in frontier])
        return Frontier(newest.to(tokens.device), torch.tensor(rows).to(tokens.device), self._level)

    def finish(self) -> DraftTree:
        """The tree, root first, level by level."""
        return DraftTree(
            torch.tensor(self._tokens),
            torch.tensor(self._parents),
            log_probs=torch.tensor(self._given),
        )


def _at_least_one(**settings: int) -> None:
    for name, value in settings.items():
        if value < 1:
            raise SettingError(name, value, "1 or more")
