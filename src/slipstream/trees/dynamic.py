"""EAGLE-2's dynamic draft tree: expand by joint probability, then keep the best nodes.

Paper: Li et al. 2024, EAGLE-2, arXiv:2406.16858, sections 4.1 (expand) and 4.2 (rerank).
Differs: the root does not count towards the budget; `depth` counts every drafted level; ties
keep the shallower node; nodes whose children could no longer enter the tree are not expanded,
which changes no tree and saves levels.
Also: SafeAILab/EAGLE `cnets.topK_genrate` is the authors' version, read for behaviour only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream import shapes
from slipstream.errors import SettingError
from slipstream.trees.budget import Cost, best_size
from slipstream.trees.protocol import Frontier, refuse_drawn
from slipstream.types import DraftTree, Drawn


class DynamicBuilder:
    """Grows one tree: every level expands the `beam` best nodes of the level before.

    The tree depends on the drafter's probabilities only through which nodes are best, so its
    nodes are *chosen* and are verified by `walk`.

    Args:
        budget: drafted nodes to keep, root not counted.
        depth: levels to draft; the deepest node's depth.
        topk: children considered per node; fewer where the draft vocabulary is smaller.
        beam: nodes expanded per level; None takes `topk`, as the paper does.
        cost: seconds of a step by the tokens in its pass, root included; given, the tree keeps
            as many of its best nodes as pay for themselves, possibly none.

    Raises:
        SettingError: a number is below 1.

    Example:
        >>> builder = DynamicBuilder(budget=2, depth=2, topk=2)
        >>> builder.start(9)
        >>> builder.grow(torch.tensor([[-0.1, -2.5]]), torch.tensor([[4, 5]])).tokens
        tensor([4])
        >>> builder.grow(torch.tensor([[-0.2, -3.0]]), torch.tensor([[6, 7]]))
        >>> builder.finish().tokens
        tensor([9, 4, 6])
    """

    def __init__(
        self,
        budget: int,
        depth: int,
        topk: int,
        *,
        beam: int | None = None,
        cost: Cost | None = None,
    ) -> None:
        beam = topk if beam is None else beam
        for name, value in (("budget", budget), ("depth", depth), ("topk", topk), ("beam", beam)):
            if value < 1:
                raise SettingError(name, value, "1 or more", f"use {name} 1 for the least")
        self.budget = budget
        self.depth = depth
        self.topk = topk
        self.beam = beam
        self.cost = cost
        self.start(0)

    def start(self, root: int) -> None:
        """Begin a tree at this root token."""
        self._root = root
        self._level = 0
        self._nodes = np.zeros(1, dtype=np.int64)  # [F] ids of the frontier's nodes
        self._joint = np.zeros(1)  # [F] nats
        self._tokens = [np.array([root])]
        self._parents = [np.array([-1])]
        self._given = [np.zeros(1)]  # log q given the parent
        self._scores = [np.zeros(1)]  # joint log q
        self._best = np.zeros(0)  # scores of the best nodes so far, at most budget of them
        self._num_nodes = 1
        self.num_children = (self.topk,)

    def grow(
        self, log_probs: Tensor, tokens: Tensor, drawn: Drawn | None = None
    ) -> Frontier | None:
        """Take the scores of the frontier's children; see `TreeBuilder.grow`.

        NaN counts as impossible, and impossible children (-inf) never enter the tree.

        Raises:
            ShapeError: log_probs and tokens differ, or their rows are not the frontier's.
            SettingError: the children were drawn.
        """
        refuse_drawn(drawn)
        fits = f"{len(self._nodes)} M"
        shapes.check("grow", log_probs=(log_probs, fits), tokens=(tokens, fits))
        given = log_probs[:, : self.topk].detach().to("cpu", torch.float64).numpy()
        given = np.minimum(np.where(np.isnan(given), -np.inf, given), 0.0)
        num_children = given.shape[1]
        scores = (self._joint[:, None] + given).ravel()
        level_tokens = tokens[:, : self.topk].to("cpu", torch.int64).numpy().ravel()
        self._tokens.append(level_tokens)
        self._parents.append(self._nodes.repeat(num_children))
        self._given.append(given.ravel())
        self._scores.append(scores)
        first = self._num_nodes
        self._num_nodes += scores.size
        self._level += 1
        self.num_children = ()
        if self._level == self.depth or not scores.size:
            return None
        best = np.argsort(-scores, kind="stable")[: self.beam]
        joint = scores[best]
        worth = int((joint > self._least(scores)).sum())  # sorted: those worth it come first
        if not worth:
            return None
        best, self._joint = best[:worth], joint[:worth]
        self._nodes = best + first
        self.num_children = (self.topk,) * worth
        newest = torch.from_numpy(level_tokens[best])
        parents = torch.from_numpy(best // num_children)
        return Frontier(newest.to(tokens.device), parents.to(tokens.device), self._level)

    def finish(self) -> DraftTree:
        """The tree of the best nodes, root first, in the order they were drafted."""
        scores = torch.from_numpy(np.concatenate(self._scores))
        parents = torch.from_numpy(np.concatenate(self._parents))
        kept = rerank(scores, parents, budget=self.budget)
        if self.cost is not None:
            reach = scores[kept[1:]].exp().sort(descending=True).values
            size = best_size(reach, self.cost)
            kept = rerank(scores, parents, budget=size) if size else kept[:1]
        new_parents = torch.searchsorted(kept, parents[kept])  # a kept node's parent is kept
        new_parents[0] = -1
        return DraftTree(
            torch.from_numpy(np.concatenate(self._tokens))[kept],
            new_parents,
            log_probs=torch.from_numpy(np.concatenate(self._given))[kept].float(),
        )

    def _least(self, scores: np.ndarray) -> float:
        """The score of the budget-th best node so far: a child must beat it to enter."""
        self._best = np.concatenate([self._best, scores])
        if self._best.size < self.budget:
            return -np.inf
        self._best = np.partition(self._best, -self.budget)[-self.budget :]
        return float(self._best[0])


def rerank(scores: Tensor, parents: Tensor, *, budget: int) -> Tensor:
    """Keep the `budget` most probable nodes; a kept node's parent is always kept.

    A parent is never less probable than its child and comes before it, so sorting by score
    alone, earlier nodes first among equals, keeps the tree connected (section 4.2).

    Args:
        scores: [N] nats, joint log-probability of each node under the drafter; -inf never stays.
        parents: [N] int64, with parents[0] == -1 and parents[i] < i.
        budget: drafted nodes to keep, root not counted.

    Returns:
        [M] int64, kept nodes in order, root first, M <= min(budget, N - 1) + 1.

    Raises:
        ShapeError: scores and parents differ in length.
        SettingError: budget is below 1.

    Example:
        >>> scores = torch.tensor([0.0, -1.0, -3.0, -2.0])
        >>> rerank(scores, torch.tensor([-1, 0, 0, 1]), budget=2)
        tensor([0, 1, 3])
    """
    shapes.check("rerank", scores=(scores, "N"), parents=(parents, "N"))
    if budget < 1:
        raise SettingError("budget", budget, "1 or more")
    best, order = scores[1:].sort(descending=True, stable=True)
    order = order[:budget][best[:budget] > float("-inf")]
    return torch.cat([torch.zeros(1, dtype=torch.int64), order.sort().values + 1])
