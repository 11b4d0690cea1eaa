"""Shapes by choice: Medusa's and EAGLE-1's lists of nodes, and how such lists are found.

A choice list holds one tuple of ranks per node: `(0, 2)` is the third likeliest child of the
likeliest child of the root. Where no rank is skipped, it is enough to count each node's children.

Paper: Cai et al. 2024, Medusa, arXiv:2401.10774, section 2.3.3; Li et al. 2024, EAGLE,
arXiv:2401.15077, section 4.1.
Also: FasterDecoding/Medusa `medusa_choices.py` and SafeAILab/EAGLE `choices.py` hold the lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from slipstream.errors import SettingError
from slipstream.trees.best_first import from_marginals
from slipstream.trees.static import Shape

Node = tuple[int, ...]
"""The ranks from the root down to a node; () is the root."""


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


def from_counts(counts: Mapping[Node, int]) -> Shape:
    """A shape from how many children each node has; nodes that are not named have none.

    Raises:
        SettingError: nothing is counted, a count is below 1, or a node lacks its parent.

    Example:
        >>> from_counts({(): 2, (0,): 1}).parents
        (-1, 0, 0, 1)
    """
    for node, count in counts.items():
        if count < 1:
            raise SettingError("children", count, "1 or more", f"leave {list(node)} out")
    return from_choices((*node, rank) for node, count in counts.items() for rank in range(count))


def by_accuracy(accuracy: Sequence[Sequence[float]], budget: int) -> Shape:
    """The shape that catches most, when a rank's accuracy depends on its depth alone.

    Adds, one after the other, the node with the largest product of accuracies along its path:
    how Medusa's lists were found.

    Args:
        accuracy: accuracy[d][r] is the share of times that the r-th likeliest candidate of depth
            d + 1 was the target's token, given that the path above it was.
        budget: drafted nodes.

    Raises:
        SettingError: budget is below 1, rows differ in length, or nothing is accurate.

    Example:
        >>> by_accuracy([[0.6, 0.3], [0.5, 0.1]], budget=3).parents
        (-1, 0, 0, 1)
    """
    if not accuracy or len({len(row) for row in accuracy}) != 1:
        raise SettingError("accuracy", f"{len(accuracy)} uneven rows", "one equal row per depth")
    table = torch.tensor(accuracy, dtype=torch.float64)  # [D, M]
    ranks = torch.arange(table.shape[1]).expand_as(table)
    tree = from_marginals(0, table.log(), ranks, budget)
    nodes: list[Node] = [()]
    for rank, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        nodes.append((*nodes[parent], rank))
    return from_choices(nodes)


# fmt: off
EAGLE1 = from_counts({
    (): 4, (0,): 3, (1,): 2, (2,): 2, (3,): 1,
    (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1,
    (0, 0, 0): 3, (0, 0, 0, 0): 2,
})
"""EAGLE-1's sparse tree: 25 drafted nodes, 4, 8, 8, 3 and 2 by depth."""

MEDUSA = from_counts({
    (): 10,
    (0,): 10, (1,): 7, (2,): 3, (3,): 2, **{(rank,): 1 for rank in range(4, 10)},
    (0, 0): 10, (0, 1): 3, (0, 2): 2, **{(0, rank): 1 for rank in range(3, 8)},
    (1, 0): 2, (2, 0): 1,
    (0, 0, 0): 2,
})
"""Medusa's sparse tree `mc_sim_7b_63`: 63 drafted nodes, 10, 28, 23 and 2 by depth."""
# fmt: on
