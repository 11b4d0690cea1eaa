"""Best-first tree over the marginals of a one-shot drafter: the most probable prefixes, exactly.

A drafter that proposes all positions in one pass (DFlash, Medusa) gives one ranked list per
depth. A node is a list of ranks, its score the sum of their log-probabilities. A heap that pops
the best node and pushes its next sibling and its first child meets the nodes in order of score,
each once, so the first `budget` are the best ones.

Drafters that condition on the path grow the same tree with `--tree best-first`: there a child's
score comes from its own parent's list, level by level (see `kinds`).

Paper: Ringel and Romano 2026, DDTree, arXiv:2604.12989; with `cost`, CaDDTree,
arXiv:2606.01813.
Differs: among equal scores the shallower node comes first.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from slipstream import shapes
from slipstream.errors import SettingError
from slipstream.trees.budget import Cost, best_size
from slipstream.types import DraftTree

IMPOSSIBLE = float("-inf")


def from_marginals(
    root: int,
    log_probs: Tensor,
    tokens: Tensor,
    budget: int,
    *,
    cost: Cost | None = None,
    other_seconds: float = 0.0,
) -> DraftTree:
    """The `budget` most probable nodes when every depth has one list of candidates.

    Args:
        root: token the tree hangs from.
        log_probs: [D, M] nats, of M candidates for each of D depths, in any order; -inf and NaN
            never enter the tree.
        tokens: [D, M] int64, their target vocabulary ids, different within a row.
        budget: drafted nodes, root not counted.
        cost: seconds of a target pass by the tokens in it, root included; given, the tree keeps
            as many of its best nodes as pay for themselves, possibly none.
        other_seconds: of a step besides its pass, see `best_size`.

    Returns:
        A chosen tree of at most `budget` nodes in order of their joint probability.

    Raises:
        ShapeError: log_probs and tokens differ.
        SettingError: budget is below 1.

    Example:
        >>> two = torch.tensor([[0.6, 0.4], [0.9, 0.1]]).log()
        >>> tree = from_marginals(9, two, torch.tensor([[1, 2], [3, 4]]), budget=3)
        >>> tree.tokens, tree.parents
        (tensor([9, 1, 3, 2]), tensor([-1,  0,  1,  0]))
    """
    shapes.check("from_marginals", log_probs=(log_probs, "D M"), tokens=(tokens, "D M"))
    if budget < 1:
        raise SettingError("budget", budget, "1 or more")
    given, ids = _ranked(log_probs, tokens, budget)
    nodes, parents, own, scores = [root], [-1], [0.0], [0.0]
    heap = [(-given[0][0], 1, 0, 0, 0, 0.0)] if given and given[0] else []
    pushed = 0  # among equals: the shallower, then the one met first
    while heap and len(nodes) <= budget:
        minus_score, depth, _, rank, parent, above = heapq.heappop(heap)
        level = given[depth - 1]
        if level[rank] == IMPOSSIBLE:
            continue
        node = len(nodes)
        nodes.append(ids[depth - 1][rank])
        parents.append(parent)
        own.append(level[rank])
        scores.append(-minus_score)
        pushed += 2
        if rank + 1 < len(level):
            sibling = (-(above + level[rank + 1]), depth, pushed, rank + 1, parent, above)
            heapq.heappush(heap, sibling)
        if depth < len(given):
            child = (minus_score - given[depth][0], depth + 1, pushed + 1, 0, node, -minus_score)
            heapq.heappush(heap, child)
    size = len(nodes)
    if cost is not None:
        reach = torch.tensor(scores[1:], dtype=torch.float64).exp()
        size = 1 + best_size(reach, cost, other_seconds=other_seconds)
    return DraftTree(
        torch.tensor(nodes[:size]),
        torch.tensor(parents[:size]),
        log_probs=torch.tensor(own[:size]),
    )


def _ranked(
    log_probs: Tensor, tokens: Tensor, budget: int
) -> tuple[list[list[float]], list[list[int]]]:
    """Each depth's best candidates, likeliest first; no more than could enter the tree."""
    given = log_probs.detach().to("cpu", torch.float64)
    given = given.nan_to_num(nan=IMPOSSIBLE, neginf=IMPOSSIBLE).clamp(max=0)
    best = given.sort(dim=1, descending=True, stable=True)
    ids = tokens.cpu().gather(1, best.indices)
    return best.values[:, :budget].tolist(), ids[:, :budget].tolist()
