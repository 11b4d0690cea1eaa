"""Features in eight bits: one scale for each group of neighbouring channels of a token.

Hidden states have a few channels that are a hundred times larger than the rest; with a scale a
token they would leave the others no resolution, with one a group of 64 they only spoil their own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GROUP = 64  # channels that share a scale, or the largest common divisor with the hidden size


def group_size(hidden_size: int) -> int:
    """Channels that share a scale.

    Example:
        >>> group_size(576), group_size(48)
        (64, 16)
    """
    return math.gcd(hidden_size, GROUP)


def quantise(values: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """[T, n*D] to [T, n*D] int8 and [T, n*D/group] bfloat16 scales."""
    groups = values.float().unflatten(-1, (-1, group_size(hidden_size)))
    scales = (groups.abs().amax(-1) / 127).to(torch.bfloat16)
    safe = scales.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return (groups / safe).round().clamp(-127, 127).to(torch.int8).flatten(-2), scales


def restore(values: Tensor, scales: Tensor) -> Tensor:
    """[T, n*D] int8 and its scales to [T, n*D] bfloat16."""
    if values.shape[-1] == 0:
        return values.to(torch.bfloat16)
    size = values.shape[-1] // scales.shape[-1]
    groups = values.float().unflatten(-1, (-1, size))
    return (groups * scales.float()[..., None]).flatten(-2).to(torch.bfloat16)
