"""DFlash: one denoised block a turn, as a chain or as a tree over its marginals (`one_pass`).

Paper: Chen et al. 2026, DFlash, arXiv:2602.06036, section 4; DeepSeek 2026, DSpark,
arXiv:2607.05147 (the head that knows the token before).
Differs: rows of any length share a pass.

What the cache holds for a row of n tokens (root x[n-1], the block's anchor):

    context 0..n-2       keys and values of every layer, made once of the features of verified
                         positions, at their own positions
    the block            slots at positions n-1, n, ..., written past the context and forgotten

A position's features exist only once the target has passed over it, so no key ever stems from an
unverified token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from slipstream.drafters.attention import CachedAttention, Sight
from slipstream.drafters.block_network import block_network
from slipstream.drafters.one_pass import ROOM, OnePassDrafter
from slipstream.drafters.products import narrow
from slipstream.drafters.protocol import Row
from slipstream.errors import CheckpointError, SettingError
from slipstream.formats import layouts
from slipstream.formats.checkpoint import DFlashCheckpoint, facts_of
from slipstream.target.protocol import Target
from slipstream.trees.kinds import Growth

CHUNK = 512  # positions of a prompt taken at once


class DFlashDrafter(OnePassDrafter):
    """Drafts with a DFlash network; see the module's text.

    Args:
        checkpoint: network and draft vocabulary.
        target: whose embedding and head are borrowed; over a reduced draft vocabulary some rows
            of the head are read, q is their softmax, and ids outside have q = 0.
        growth: of the trees, see `OnePassDrafter`.
        width: slots of a block, at most what the network was trained on.
    """

    name = "dflash"

    def __init__(
        self,
        checkpoint: DFlashCheckpoint,
        target: Target,
        growth: Growth,
        *,
        width: int,
    ) -> None:
        config, network = checkpoint.model.config, block_network(checkpoint, target)
        super().__init__(
            network,
            network.new_cache(1, ROOM),
            taps=config.taps,
            vocabulary=checkpoint.vocabulary,
            target=target,
            growth=growth,
            depth=config.num_drafts(width),
        )
        self.width = width

    @classmethod
    def from_checkpoint(
        cls, folder: Path | str, target: Target, growth: Growth, *, width: int | None = None
    ) -> Self:
        """Read a checkpoint and fit it to a target.

        Args:
            folder: of the checkpoint.
            target: whose text is drafted.
            growth: of the trees; the block's drafts cap their depth.
            width: slots of a block; None takes what the network was trained on.

        Raises:
            CheckpointError: the folder cannot be read, or lacks the head that is asked for.
            DrafterMismatchError: it was made for another target.
            SettingError: a block wider than the trained one, or the tree is unknown.
        """
        checkpoint = layouts.DFLASH.read(folder, target=facts_of(target))
        narrow(checkpoint.model, target.spec.dtype)
        return cls.from_model(checkpoint, target, growth, width=width)

    @classmethod
    def from_model(
        cls,
        checkpoint: DFlashCheckpoint,
        target: Target,
        growth: Growth,
        *,
        width: int | None = None,
    ) -> Self:
        """Fit a network in memory to a target; see `from_checkpoint`."""
        config = checkpoint.model.config
        layouts.DFLASH.check_target(checkpoint, target)
        least = config.width_for(1)
        width = config.width if width is None else width
        if not least <= width <= config.width:
            raise SettingError(
                "width",
                width,
                f"{least}..{config.width}, the blocks it was trained on",
                "leave width out for the widest",
            )
        if cls.reads_path and checkpoint.model.path is None:
            raise CheckpointError(
                f"the drafter has no path head, which {cls.name} needs",
                hint="train one on it with `slipstream train --method dspark --drafter FOLDER ...`",
            )
        return cls(checkpoint, target, growth, width=width)

    def _draft(self, rows: list[Row]) -> Tensor:
        """Read what is new of the text, then denoise the blocks behind it."""
        self._read([row for row in rows if self._pending.count(row.key)])
        return self._denoise(rows)

    def _read(self, rows: list[Row]) -> None:
        """Commit what rows have not read; recent features together, a prompt's in parts."""
        late_slots, late = [], []
        for row in rows:
            slot, features = self._slots[row.key], self._pending.take(row.key)
            *early, last = features.split(CHUNK)
            for part in early:
                self._take([slot], [part])
            late_slots.append(slot)
            late.append(last)
        if late:
            self._take(late_slots, late)

    def _take(self, slots: list[int], features: list[Tensor]) -> None:
        """Keys and values of newly verified positions, committed at once."""
        counts = [len(part) for part in features]
        lengths = [self._cache.lengths[slot] for slot in slots]
        self._make_room(slots, counts)
        self._cache.begin(slots, counts)
        positions = torch.tensor(lengths)[:, None] + torch.arange(max(counts))
        padded = torch.nn.utils.rnn.pad_sequence(features, batch_first=True)  # [B, P, K*D]
        for layer, (keys, values) in enumerate(self.network.context(padded, positions)):
            self._cache.update(keys, values, layer)
        for slot, count in zip(slots, counts, strict=True):
            self._cache.commit(slot, range(count))

    def _denoise(self, rows: list[Row]) -> Tensor:
        """[B, J, U] logits of every drafted token of the rows' blocks."""
        slots, width = [self._slots[row.key] for row in rows], self.width
        self._make_room(slots, [width] * len(slots))
        lengths = [self._cache.lengths[slot] for slot in slots]
        whole = torch.ones(width, width, dtype=torch.bool)  # every slot sees the whole block
        sight = Sight(slots, [width] * len(slots), lengths, [whole] * len(slots))
        anchors = torch.tensor([row.tokens[-1] for row in rows])
        positions = torch.tensor(lengths)[:, None] + torch.arange(width)
        logits = self.network(anchors, positions, width, CachedAttention(self._cache, sight))
        for slot in slots:
            self._cache.rollback(slot)
        return logits


class PathDrafter(DFlashDrafter):
    """Drafts with DFlash and a head that scores a token by the one before it.

    A child's score depends on its parent, so trees grow level by level; one pass of the network
    serves all of them.
    """

    name = "dspark"
    reads_path = True
