"""How many nodes are worth verifying, when a pass over more tokens takes longer.

A step emits one token plus, for every drafted node, the chance that it is reached. Ordered from
the likeliest down, the first n nodes give 1 + sum of their chances, and the pass over them and
the root takes cost(n + 1) seconds. The best n has the most tokens per second.

Paper: CaDDTree 2026, arXiv:2606.01813 (stop at the throughput optimum of the step).
Differs: every n is looked at, zero included, so a cost that rises in steps needs no convex fit;
n counts the pass's tokens, root included, both where a cost is measured and where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from slipstream import shapes
from slipstream.errors import SettingError

Cost: TypeAlias = Callable[[int], float] | Sequence[float]
"""Seconds of a pass over n tokens, root included: cost(n), or cost[n - 1] of a measured list."""


def best_size(reach: Tensor, cost: Cost, *, other_seconds: float = 0.0) -> int:
    """The number of nodes with the most tokens per second; 0 when none pays for itself.

    Args:
        reach: [N] probability that each node is accepted with all above it, the likeliest first.
            What a drafter believes is a guess of it; a calibrated guess chooses better.
        cost: seconds of a target pass; a list that ends early ends the choice with it.
        other_seconds: of a step besides its pass, drafting above all; the more, the larger n.

    Returns:
        n in 0..N; the fewest among equals.

    Raises:
        ShapeError: reach is not [N].
        SettingError: reach is not sorted or outside 0..1, or a cost is not above 0.

    Example:
        >>> reach = torch.tensor([0.9, 0.5, 0.1])
        >>> best_size(reach, lambda n: 1.0 + 0.2 * n)
        2
    """
    return int(rates(reach, cost, other_seconds=other_seconds).argmax())


def rates(reach: Tensor, cost: Cost, *, other_seconds: float = 0.0) -> Tensor:
    """[N + 1] tokens per second with the first 0, 1, ... N nodes; see `best_size`."""
    shapes.check("best_size", reach=(reach, "N"))
    reach = reach.detach().to("cpu", torch.float64)
    if bool((reach.diff() > 0).any()) or not bool(((reach >= 0) & (reach <= 1)).all()):
        raise SettingError("reach", "unsorted or outside 0..1", "probabilities, the largest first")
    seconds = curve(cost, len(reach)) + other_seconds
    tokens = torch.cat([torch.ones(1, dtype=torch.float64), 1 + reach.cumsum(0)])
    return tokens[: len(seconds)] / seconds


def curve(cost: Cost, num_nodes: int) -> Tensor:
    """[M] seconds of passes over 1, 2, ... tokens: the root with up to `num_nodes` drafted nodes.

    Raises:
        SettingError: nothing is known, or a cost is not above 0.

    Example:
        >>> curve([0.5, 0.75], num_nodes=8)
        tensor([0.5000, 0.7500], dtype=torch.float64)
    """
    if callable(cost):
        seconds = [cost(n) for n in range(1, num_nodes + 2)]
    else:
        seconds = list(cost[: num_nodes + 1])
    if not seconds or not min(seconds) > 0:
        raise SettingError("cost", seconds and min(seconds), "seconds above 0 for every n")
    return torch.tensor(seconds, dtype=torch.float64)
