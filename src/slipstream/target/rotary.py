"""Rotary angles of every position, computed once by the stock model's own rotary module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 1024  # positions the table grows by


class RotaryTable:
    """Cosines and signed sines by position.

    Args:
        module: the stock model's rotary embedding: (x, positions [1, P]) to cos and sin
            [1, P, C]; its angles may depend on the position alone.
        dtype: of the table.
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype
        self._known = (torch.empty(0), torch.empty(0))  # set at once: threads may share a target

    def at(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, N, 1, C] of [B, N] int64 positions (best on the CPU) on a device.

        The first half of the sines is negated: x turned is x * cos + swapped(x) * sin, where
        `swapped` exchanges the halves of the last axis.
        """
        cos, sin = self.upto(int(positions.max()) + 1)
        positions = positions.to(device)
        return cos[positions][:, :, None], sin[positions][:, :, None]

    def upto(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [P, C] of at least the first `length` positions."""
        known = self._known
        if known[0].shape[0] < length:
            size = -(-length // BLOCK) * BLOCK
            device = self._module.inv_freq.device
            places = torch.arange(size, device=device)[None]
            like = torch.empty(0, dtype=self._dtype, device=device)
            cos, sin = self._module(like, places)
            low, high = sin[0].chunk(2, dim=-1)
            known = self._known = cos[0].contiguous(), torch.cat([-low, high], dim=-1)
        return known
