"""The texts of a packed batch, one after the other: what attends to what is decided per text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Spans = tuple[tuple[int, int, int], ...]
"""(row, first position, one past the last) of every text, by row and position."""


def spans(documents: Tensor) -> Spans:
    """Where the texts of a batch lie.

    Args:
        documents: [B, T] int64, number of the text each position belongs to, -1 where padded;
            the positions of a text are next to each other.

    Example:
        >>> spans(torch.tensor([[0, 0, 1, -1]]))
        ((0, 0, 2), (0, 2, 3))
    """
    found = []
    for row, numbers in enumerate(documents.tolist()):
        start = 0
        for position in range(1, len(numbers) + 1):
            if position == len(numbers) or numbers[position] != numbers[start]:
                if numbers[start] >= 0:
                    found.append((row, start, position))
                start = position
    return tuple(found)


def by_text(texts: Spans, like: Tensor, attend: Callable[[int, slice], Tensor]) -> Tensor:
    """[B, H, T, C] of attention that is computed text by text; zero where padded.

    Args:
        texts: where they lie.
        like: [B, H, T, C], gives shape, number type and device.
        attend: (row, positions) to [H, t, C].
    """
    num_rows, _, length, _ = like.shape
    parts: list[list[Tensor]] = [[] for _ in range(num_rows)]
    ends = [0] * num_rows
    for row, start, end in texts:
        if start > ends[row]:
            parts[row].append(like.new_zeros(like.shape[1], start - ends[row], like.shape[3]))
        parts[row].append(attend(row, slice(start, end)))
        ends[row] = end
    for row, end in enumerate(ends):
        if end < length:
            parts[row].append(like.new_zeros(like.shape[1], length - end, like.shape[3]))
    return torch.stack([torch.cat(row, 1) for row in parts])
