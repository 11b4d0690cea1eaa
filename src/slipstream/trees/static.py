"""Fixed shapes: which ranks of which node are drafted, decided before anything is seen.

A shape says "the r-th likeliest child of that node", or "its r-th draw" where children are drawn;
the drafter fills in the tokens. Shapes with a history are in `choices`, the best shape for a
measured acceptance in `sequoia`.

Paper: Miao et al. 2023, SpecInfer, arXiv:2305.09781, section 3 (expansion-based trees).
Differs: ranks that a small draft vocabulary does not have are left out, with what is below them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slipstream import shapes
from slipstream.errors import SettingError
from slipstream.trees.protocol import Frontier
from slipstream.types import DraftTree, Drawn


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
    children: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        depths = [0]
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node or depths[parent] + 1 < depths[-1]:
                raise SettingError("tree shape", f"node {node} below {parent}", "level order")
            depths.append(depths[parent] + 1)
            children[parent].append(node)
        if len(depths) < 2 or len(self.ranks) != len(depths):
            raise SettingError("tree shape", f"{len(depths) - 1} drafted nodes", "1 or more")
        object.__setattr__(self, "depths", tuple(depths))
        object.__setattr__(self, "children", tuple(map(tuple, children)))

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

    @property
    def is_gapless(self) -> bool:
        """True when the children of every node have the ranks 0, 1, 2 and so on."""
        return all(
            self.ranks[child] == place
            for below in self.children
            for place, child in enumerate(below)
        )

    def wanted(self, node: int) -> int:
        """Candidates a drafter has to offer below a node; 0 for a leaf."""
        return max((self.ranks[child] + 1 for child in self.children[node]), default=0)

    def cut(self, *, depth: int, budget: int) -> Shape:
        """The part of the shape within a depth and a budget, the shallowest nodes first.

        Raises:
            SettingError: depth or budget is below 1.
        """
        _at_least_one(depth=depth, budget=budget)
        size = 1 + min(budget, sum(1 for d in self.depths[1:] if d <= depth))
        if size == len(self.parents):
            return self
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


def expansion(counts: Sequence[int], budget: int | None = None) -> Shape:
    """Every node of depth d has `counts[d]` children: SpecInfer's configuration <k1, k2, ...>.

    Args:
        counts: children per node, the root's first.
        budget: drafted nodes at most, the shallowest ones; None for all.

    Raises:
        SettingError: no count, a count below 1, or budget below 1.

    Example:
        >>> expansion((1, 3, 1)).parents
        (-1, 0, 1, 1, 1, 2, 3, 4)
    """
    _at_least_one(depth=len(counts), budget=1 if budget is None else budget)
    for count in counts:
        _at_least_one(topk=count)
    parents, ranks, level = [-1], [0], [0]
    for count in counts:
        below: list[int] = []
        for node in level:
            for rank in range(count):
                if budget is not None and len(parents) > budget:
                    return Shape(tuple(parents), tuple(ranks))
                below.append(len(parents))
                parents.append(node)
                ranks.append(rank)
        level = below
    return Shape(tuple(parents), tuple(ranks))


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
    _at_least_one(topk=topk, depth=depth)
    return expansion((topk,) * depth, budget)


class StaticBuilder:
    """Fills a fixed shape with a drafter's candidates, by rank or in the order they were drawn.

    Chosen nodes are verified by `walk`; drawn ones by the rule that fits how they were drawn.

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
        self.start(0)

    def start(self, root: int) -> None:
        """Begin a tree at this root token."""
        self._tokens, self._parents, self._given = [root], [-1], [0.0]
        self._is_drawn = [False]
        self._draft_probs: list[tuple[list[int], Tensor]] = []  # nodes, and their rows [F, V]
        self._frontier = [(0, 0)]  # of each expanded node: index in the tree, index in the shape
        self._level = 0
        self.num_children = (self.shape.wanted(0),)

    def grow(
        self, log_probs: Tensor, tokens: Tensor, drawn: Drawn | None = None
    ) -> Frontier | None:
        """Take the scores of the frontier's children; see `TreeBuilder.grow`.

        Children of probability zero (-inf or NaN) are left out.

        Raises:
            ShapeError: log_probs, tokens and drawn differ, or their rows are not the frontier's.
            SettingError: the children were drawn, and the shape skips ranks: a rule for drawn
                children must see every draw.
        """
        fits = f"{len(self._frontier)} M"
        shapes.check("grow", log_probs=(log_probs, fits), tokens=(tokens, fits))
        if drawn is not None:
            self._check_drawn(drawn, fits, log_probs.shape[1])
            self._draft_probs.append(([node for node, _ in self._frontier], drawn.draft_probs))
        given = log_probs[:, : self.topk].detach().float().cpu().tolist()
        ids = tokens[:, : self.topk].cpu().tolist()
        is_drawn = None if drawn is None else drawn.is_drawn[:, : self.topk].cpu().tolist()
        self._level += 1
        frontier, rows = [], []
        for row, (parent, shape_node) in enumerate(self._frontier):
            for child in self.shape.children[shape_node]:
                rank = self.shape.ranks[child]
                if rank >= len(given[row]) or not given[row][rank] > float("-inf"):
                    continue
                if self.shape.children[child]:
                    frontier.append((len(self._tokens), child))
                    rows.append(row)
                self._tokens.append(ids[row][rank])
                self._parents.append(parent)
                self._given.append(given[row][rank])
                self._is_drawn.append(is_drawn is not None and is_drawn[row][rank])
        self._frontier = frontier
        self.num_children = tuple(self.shape.wanted(shape_node) for _, shape_node in frontier)
        if not frontier:
            return None
        newest = torch.tensor([self._tokens[node] for node, _ in frontier])
        return Frontier(newest.to(tokens.device), torch.tensor(rows).to(tokens.device), self._level)

    def finish(self) -> DraftTree:
        """The tree, root first, level by level."""
        tree = DraftTree(
            torch.tensor(self._tokens),
            torch.tensor(self._parents),
            log_probs=torch.tensor(self._given),
        )
        if not self._draft_probs:
            return tree
        vocab_size = self._draft_probs[0][1].shape[1]
        draft_probs = torch.zeros(len(tree), vocab_size)  # leaves have no children: zeros
        for nodes, rows in self._draft_probs:
            draft_probs[nodes] = rows.detach().float().cpu()
        return replace(tree, is_drawn=torch.tensor(self._is_drawn), draft_probs=draft_probs)

    def _check_drawn(self, drawn: Drawn, fits: str, num_candidates: int) -> None:
        fits_drawn = fits.replace("M", str(num_candidates))
        shapes.check("grow", is_drawn=(drawn.is_drawn, fits_drawn))
        shapes.check("grow", draft_probs=(drawn.draft_probs, fits.replace("M", "V")))
        if not self.shape.is_gapless:
            raise SettingError(
                "tree shape",
                "one that skips ranks",
                "ranks 0, 1, 2 and so on below every node when children are drawn",
                "list every rank up to the last, or use --verifier walk",
            )


def _at_least_one(**settings: int) -> None:
    for name, value in settings.items():
        if value < 1:
            raise SettingError(name, value, "1 or more")
