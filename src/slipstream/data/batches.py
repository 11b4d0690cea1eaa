"""Pack texts into rows so that they do not see each other: samples in, `Batch` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.data.store import Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed texts. Position t of a row belongs to document `documents[t]`.

    Args:
        tokens: [B, T] int64.
        loss_mask: [B, T] bool, True where the token itself is to be predicted.
        best: [B, T] int64, the target's most likely token after each position.
        features: [B, T, K*D].
        last_hidden: [B, T, D].
        documents: [B, T] int64, number of the text within its row, -1 where padded.
        positions: [B, T] int64, position within the text.
        number: of the batch within its run; what an objective draws at random is keyed by it, so
            that a resumed run draws the same.
    """

    tokens: Tensor
    loss_mask: Tensor
    best: Tensor
    features: Tensor
    last_hidden: Tensor
    documents: Tensor
    positions: Tensor
    number: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.documents >= 0).sum())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        tensors = {
            name: value.to(device)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **tensors)


def plan(
    lengths: Sequence[int], *, max_length: int, rows: int, seed: int, epoch: int
) -> list[list[list[int]]]:
    """Which samples go into which row of which batch, for one epoch.

    First fit in shuffled order into the rows of the batch being filled. Depends on nothing but
    its arguments, so a resumed run continues exactly where it stopped.

    Args:
        lengths: tokens of each sample; longer ones than `max_length` count as cut to it.
        max_length: T, tokens of a row.
        rows: B, rows of a batch.
        seed: of the shuffle.
        epoch: number of the pass over the data.

    Returns:
        Batches of rows of sample numbers; each sample once.

    Example:
        >>> plan([3, 3, 3], max_length=6, rows=1, seed=0, epoch=0)[0][0].__len__()
        2
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    batches: list[list[list[int]]] = []
    current: list[list[int]] = [[] for _ in range(rows)]
    room = [max_length] * rows
    for item in torch.randperm(len(lengths), generator=generator).tolist():
        length = min(lengths[item], max_length)
        row = next((r for r in range(rows) if room[r] >= length), None)
        if row is None:
            batches.append([r for r in current if r])
            current, room, row = [[] for _ in range(rows)], [max_length] * rows, 0
        current[row].append(item)
        room[row] -= length
    if any(current):
        batches.append([r for r in current if r])
    return batches


def collate(
    rows: Sequence[Sequence[Sample]], *, max_length: int, dtype: torch.dtype, number: int = 0
) -> Batch:
    """Lay samples end to end in rows, padded to the longest row.

    Args:
        rows: samples of each row.
        max_length: longer samples are cut to it.
        dtype: of features and last hidden.
        number: of the batch within its run.
    """
    cut = [[min(len(s), max_length) for s in row] for row in rows]
    width = max(sum(lengths) for lengths in cut)
    first = rows[0][0]
    size = (len(rows), width)
    tokens = torch.zeros(size, dtype=torch.int64)
    best = torch.zeros(size, dtype=torch.int64)
    loss_mask = torch.zeros(size, dtype=torch.bool)
    documents = torch.full(size, -1, dtype=torch.int64)
    positions = torch.zeros(size, dtype=torch.int64)
    features = torch.zeros(*size, first.features.shape[-1], dtype=dtype)
    last_hidden = torch.zeros(*size, first.last_hidden.shape[-1], dtype=dtype)
    for r, row in enumerate(rows):
        start = 0
        for document, (sample, length) in enumerate(zip(row, cut[r], strict=True)):
            here = slice(start, start + length)
            tokens[r, here] = sample.tokens[:length]
            best[r, here] = sample.best[:length]
            loss_mask[r, here] = sample.loss_mask[:length]
            documents[r, here] = document
            positions[r, here] = torch.arange(length)
            features[r, here] = sample.features[:length].to(dtype)
            last_hidden[r, here] = sample.last_hidden[:length].to(dtype)
            start += length
    return Batch(tokens, loss_mask, best, features, last_hidden, documents, positions, number)
