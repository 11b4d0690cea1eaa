"""Attention of many draft blocks over packed texts, without a mask over all of them.

A mask of [A*W, P + A*W] is almost empty. Blocks are taken in groups of neighbours of one text: a
group reads the text up to its last anchor and its own slots, and two small masks cut that down to
what each block may see.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 8  # blocks attended together


@dataclass(frozen=True, slots=True)
class _Group:
    num_blocks: int
    start: int  # flat position of the text's first token
    stop: int  # flat position of the last anchor, one past the last context position read
    mask: Tensor  # [G*W, (stop - start) + G*W] bool


class BlockAttention:
    """What the slots of blocks see: their text strictly before the anchor, and their own block.

    An object serves one pass of a network: it counts the layers as they call.

    Args:
        context: per layer, keys and values [1, Hkv, P, C] of the texts laid end to end.
        number: [P] int64, which text each position belongs to.
        anchors: [A] int64, ascending flat positions.
        width: W, slots of a block.
        group: blocks attended together; changes nothing but speed.
    """

    def __init__(
        self,
        context: list[tuple[Tensor, Tensor]],
        number: Tensor,
        anchors: Tensor,
        width: int,
        *,
        group: int = GROUP,
    ) -> None:
        self._context = iter(context)
        self.groups = _groups(number, anchors, width, group)
        self.sizes = [g.num_blocks * width for g in self.groups]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[1, H, A*W, C] queries, [1, Hkv, A*W, C] keys and values of the slots."""
        text_keys, text_values = next(self._context)
        num_kv_heads, size = k.shape[1], k.shape[3]
        folds = q.shape[1] // num_kv_heads  # query heads that share a key head
        parts = []
        split = zip(
            self.groups, q.split(self.sizes, 2), k.split(self.sizes, 2), v.split(self.sizes, 2),
            strict=True,
        )  # fmt: skip
        for group, queries, own_keys, own_values in split:
            seen = slice(group.start, group.stop)
            out = F.scaled_dot_product_attention(
                queries.reshape(1, num_kv_heads, -1, size),
                torch.cat([text_keys[:, :, seen], own_keys], 2),
                torch.cat([text_values[:, :, seen], own_values], 2),
                attn_mask=group.mask.repeat(folds, 1),
            )
            parts.append(out.reshape(1, q.shape[1], -1, size))
        return torch.cat(parts, 2)


def _groups(number: Tensor, anchors: Tensor, width: int, most: int) -> list[_Group]:
    """Neighbouring anchors of one text, at most so many together."""
    texts = number[anchors].tolist()
    starts = _starts(number)
    bounds = [0]
    for i in range(1, len(texts) + 1):
        if i == len(texts) or texts[i] != texts[i - 1] or i - bounds[-1] == most:
            bounds.append(i)
    groups = []
    for first, end in pairwise(bounds):
        here = anchors[first:end]
        start, stop = starts[texts[first]], int(here[-1])
        before = torch.arange(start, stop, device=here.device) < here[:, None]  # [G, stop - start]
        own = torch.eye(end - first, dtype=torch.bool, device=here.device)  # [G, G]
        mask = torch.cat([before, own.repeat_interleave(width, 1)], 1)
        groups.append(_Group(end - first, start, stop, mask.repeat_interleave(width, 0)))
    return groups


def _starts(number: Tensor) -> dict[int, int]:
    """Flat position of every text's first token."""
    first = torch.ones_like(number, dtype=torch.bool)
    first[1:] = number[1:] != number[:-1]
    places = first.nonzero()[:, 0]
    return {int(number[place]): int(place) for place in places}
