"""What the nodes of a draft pass see of a cache, and attention by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.cache import SlotCache


@dataclass(frozen=True, slots=True)
class Sight:
    """What the nodes of a pass see of the rows of a cache.

    Args:
        slots: cache row of each row of the pass.
        widths: nodes of each.
        starts: leading slots that all of a row's nodes see.
        visible: per row [n, e] bool over the e slots after those, of which the last n are the
            nodes' own; None for a chain, whose nodes see themselves and the nodes before.
    """

    slots: Sequence[int]
    widths: Sequence[int]
    starts: Sequence[int]
    visible: Sequence[Tensor | None]

    def mask(self, used: int, num_nodes: int, dtype: torch.dtype) -> Tensor | None:
        """[B, N, used] added to scores, or None where every node sees everything.

        Padding nodes see what all nodes see.
        """
        sees = [
            torch.ones(width, width, dtype=torch.bool).tril() if own is None else own
            for width, own in zip(self.widths, self.visible, strict=True)
        ]
        ends = {start + own.shape[1] for start, own in zip(self.starts, sees, strict=True)}
        if ends == {used} and all(bool(own.all()) for own in sees):
            return None
        mask = torch.full((len(sees), num_nodes, used), torch.finfo(dtype).min, dtype=dtype)
        for row, (start, own) in enumerate(zip(self.starts, sees, strict=True)):
            n, e = own.shape
            mask[row, :, :start] = 0
            mask[row, :n, start : start + e].masked_fill_(own, 0)
        return mask


class CachedAttention:
    """Attention of one pass over the slots of a cache; counts the layers as they call.

    Args:
        cache: where the pass writes; its pass is begun here.
        sight: what the nodes see.

    Raises:
        CacheFullError: a row has no room for its nodes.
    """

    def __init__(self, cache: SlotCache, sight: Sight) -> None:
        self.cache, self.sight = cache, sight
        self._used = cache.begin(sight.slots, sight.widths)
        self._mask: Tensor | None = None
        self._layer = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, N, C] queries, [B, Hkv, N, C] keys and values of the new nodes."""
        keys, values = self.cache.update(k, v, self._layer)
        batch, num_heads, num_nodes, size = q.shape
        groups = num_heads // keys.shape[1]
        if self._layer == 0:
            mask = self.sight.mask(self._used, num_nodes, q.dtype)
            if mask is not None:
                self._mask = mask.to(q.device).repeat(1, groups, 1)[:, None]  # [B, 1, G*N, used]
        self._layer += 1
        # The queries that share a key head stand below each other: no key is copied.
        folded = q.reshape(batch, keys.shape[1], groups * num_nodes, size)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=self._mask)
        return out.reshape(batch, num_heads, num_nodes, size)
