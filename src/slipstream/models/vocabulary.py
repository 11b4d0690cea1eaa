"""Draft vocabulary: the target ids a drafter with a reduced head can say.

In memory a map holds absolute target ids, ascending; EAGLE-3 files hold *offsets* (`d2t`,
target = draft + d2t[draft]) and a mask over the target vocabulary (`t2d`). Li et al. 2025,
EAGLE-3, arXiv:2503.01840.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import CheckpointError, SettingError


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """A one-to-one map from U draft ids to target ids.

    Args:
        target_ids: [U] int64, strictly ascending target ids.
        target_size: V, size of the target vocabulary.

    Raises:
        CheckpointError: ids repeat, are out of order or out of range.
    """

    target_ids: Tensor
    target_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        ordered = ids.numel() > 0 and bool((ids[1:] > ids[:-1]).all())
        if not ordered or int(ids[0]) < 0 or int(ids[-1]) >= self.target_size:
            raise CheckpointError(
                f"draft vocabulary of {ids.numel()} ids is not strictly ascending within "
                f"0..{self.target_size - 1} (an absolute d2t looks like this)",
                hint="d2t holds offsets: target id = draft id + d2t[draft id]",
            )

    def __len__(self) -> int:
        return self.target_ids.numel()

    @property
    def is_full(self) -> bool:
        """True when every target id has a draft id."""
        return len(self) == self.target_size

    def offsets(self) -> Tensor:
        """[U] int64, `d2t` as files store it."""
        return self.target_ids - torch.arange(len(self))

    def mask(self) -> Tensor:
        """[V] bool, `t2d` as files store it."""
        mask = torch.zeros(self.target_size, dtype=torch.bool)
        mask[self.target_ids] = True
        return mask

    def draft_ids(self) -> Tensor:
        """[V] int64, the draft id of each target id, -1 where it has none."""
        inverse = torch.full((self.target_size,), -1, dtype=torch.int64)
        inverse[self.target_ids] = torch.arange(len(self))
        return inverse

    @classmethod
    def from_files(cls, d2t: Tensor, t2d: Tensor | None, target_size: int) -> DraftVocabulary:
        """Read the two tensors of an EAGLE-3 checkpoint.

        Raises:
            CheckpointError: the offsets do not give a one-to-one map, t2d contradicts them, or all
                are zero though the draft vocabulary is a part: a map that was never filled, unless
                t2d says that the part is the first ids (targets have rows beyond their ids).
        """
        is_first = t2d is not None and bool(t2d[: d2t.numel()].all())
        if d2t.numel() < target_size and not d2t.any() and not is_first:
            raise CheckpointError(
                f"d2t is all zero for {d2t.numel()} of {target_size} ids: the map was never filled",
                hint="the map is part of the training; take it from where the weights come from",
            )
        vocabulary = cls(d2t.to(torch.int64) + torch.arange(d2t.numel()), target_size)
        if t2d is not None:
            stored = torch.zeros(target_size, dtype=torch.bool)
            stored[: min(t2d.numel(), target_size)] = t2d[:target_size].to(torch.bool)
            if not torch.equal(stored, vocabulary.mask()):
                raise CheckpointError(
                    f"t2d marks {int(stored.sum())} ids, d2t maps to {len(vocabulary)} others",
                    hint="the two maps come from different trainings; take both from one file",
                )
        return vocabulary

    @classmethod
    def full(cls, target_size: int) -> DraftVocabulary:
        """The identity map."""
        return cls(torch.arange(target_size), target_size)

    @classmethod
    def from_counts(
        cls, counts: Tensor, size: int, *, always: Iterable[int] = ()
    ) -> DraftVocabulary:
        """The most frequent ids, plus some that must be in (special and byte tokens, EOS).

        Args:
            counts: [V] int64, how often each id was supervised in the training data.
            size: U wanted; ids that never occurred fill up.
            always: ids included whatever their count.

        Raises:
            SettingError: size is below 1, above V, or too small for `always`.
        """
        target_size = counts.numel()
        forced = sorted({i for i in always if 0 <= i < target_size})
        if not max(1, len(forced)) <= size <= target_size:
            raise SettingError(
                "draft vocabulary size",
                size,
                f"{max(1, len(forced))}..{target_size}",
                f"{len(forced)} special and byte tokens are always included",
            )
        priority = counts.to(torch.float64)
        priority[forced] = float("inf")
        order = torch.argsort(priority, descending=True, stable=True)
        return cls(order[:size].sort().values, target_size)
