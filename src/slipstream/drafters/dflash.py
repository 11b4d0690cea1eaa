"""DFlash: one denoised block a turn, as a chain or as a tree over its marginals.

Paper: Chen et al. 2026, DFlash, arXiv:2602.06036, section 4; Ringel and Romano 2026, DDTree,
arXiv:2604.12989 (the best-first tree over the same block); DeepSeek 2026, DSpark,
arXiv:2607.05147 (the head that knows the token before).
Differs: rows of any length share a pass; above temperature 0 children are chosen with the
target's noise or drawn from the slots' own distributions, never argmax drafts under a p/q test.

What the cache holds for a row of n tokens (root x[n-1], the block's anchor):

    context 0..n-2       keys and values of every layer, made once of the features of verified
                         positions, at their own positions
    the block            slots at positions n-1, n, ..., written past the context and forgotten

A position's features exist only once the target has passed over it, so no key ever stems from an
unverified token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from slipstream.drafters.attention import CachedAttention, Sight
from slipstream.drafters.block_network import BlockNetwork, block_network
from slipstream.drafters.candidates import Candidates, pick
from slipstream.drafters.pending import Pending
from slipstream.drafters.protocol import Row
from slipstream.errors import CheckpointError, SettingError
from slipstream.formats import dflash
from slipstream.formats.checkpoint import facts_of
from slipstream.formats.dflash import DFlashCheckpoint
from slipstream.target.protocol import Target
from slipstream.trees.best_first import from_marginals
from slipstream.trees.kinds import Growth
from slipstream.types import DraftTree, Verdict

CHUNK = 512  # positions of a prompt taken at once
ROOM = 256  # slots the cache grows by


class DFlashDrafter:
    """Drafts with a DFlash network; see the module's text.

    Args:
        checkpoint: network and draft vocabulary.
        target: whose embedding and head are borrowed; over a reduced draft vocabulary some rows
            of the head are read, q is their softmax, and ids outside have q = 0.
        growth: of the trees; best-first ones of chosen children grow by the heap over marginals,
            as DDTree does.
        width: slots of a block, at most what the network was trained on.
    """

    name = "dflash"
    reads_path: ClassVar[bool] = False

    def __init__(
        self,
        checkpoint: DFlashCheckpoint,
        target: Target,
        growth: Growth,
        *,
        width: int,
    ) -> None:
        config, spec = checkpoint.model.config, target.spec
        self.taps = config.taps
        self.width = width
        self.network: BlockNetwork = block_network(checkpoint, target)
        self.rests_threads = self.network.rests_threads
        size = len(checkpoint.vocabulary)
        self._kind = replace(growth, topk=min(growth.topk, size)).kind()
        self._children, self._is_marginal = growth.children, growth.tree == "best-first"
        shape = self._kind.shape
        self._is_chain = shape is not None and shape.depth == shape.budget
        self._depth, self._budget = min(growth.depth, config.num_drafts(width)), growth.budget
        self._target_ids = checkpoint.vocabulary.target_ids.to(spec.device)
        self._vocab_size, self._cost = spec.vocab_size, growth.cost
        self._slots: dict[int, int] = {}
        self._pending = Pending()
        self._cache = self.network.new_cache(1, ROOM)
        self._free = [0]

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
        checkpoint = dflash.read(Path(folder), target=facts_of(target))
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
        config, spec = checkpoint.model.config, target.spec
        dflash.check_target(
            config,
            vocab_size=target.embedding().shape[0],
            hidden_size=spec.hidden_size,
            num_layers=spec.num_layers,
            name=spec.name,
        )
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

    def open(self, row: Row, features: Tensor | None) -> None:
        """Remember the prompt's features; they enter the cache with the first proposal."""
        assert features is not None, "the engine gives features for our taps"
        if not self._free:
            self._enlarge(self._cache.num_rows * 2, self._cache.max_length)
        slot = self._slots[row.key] = self._free.pop()
        self._cache.reset(slot)
        self._pending.add(row.key, features)

    def observe(self, row: Row, verdict: Verdict, features: Tensor | None) -> None:
        """Remember the verified features; they enter the cache with the next proposal."""
        assert features is not None, "the engine gives features for our taps"
        self._pending.add(row.key, features)

    def close(self, row: Row) -> None:
        """Free the row."""
        slot = self._slots.pop(row.key, None)
        self._pending.close(row.key)
        if slot is not None:
            self._free.append(slot)

    @torch.no_grad()
    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        """One tree per row, of one pass over all rows' blocks."""
        drafting = [row for row in rows if row.max_depth >= 1 and row.max_nodes >= 1]
        trees = {row.key: DraftTree.chain([row.tokens[-1]]) for row in rows}
        if drafting:
            self._read([row for row in drafting if self._pending.count(row.key)])
            for row, logits in zip(drafting, self._denoise(drafting), strict=True):
                trees[row.key] = self._tree(row, logits)
        return [trees[row.key] for row in rows]

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

    def _tree(self, row: Row, logits: Tensor) -> DraftTree:
        """The tree of one row's block [J, U]."""
        depth, root = min(self._depth, row.max_depth), row.tokens[-1]
        budget = min(self._budget, row.max_nodes)
        same = None  # candidates of each level, where all of its nodes have the same
        if self._children == "chosen" and not self.reads_path:
            same = self._rank(row, logits[:depth], budget if self._is_marginal else self._kind.topk)
        if self._is_marginal and same is not None:
            return from_marginals(root, same.log_probs, same.tokens, budget, cost=self._cost)
        if self._is_chain and same is not None:
            return _chain(root, same, budget)
        builder = self._kind.build(depth, row.max_nodes)
        builder.start(root)
        newest = torch.tensor([root])  # [F] int64, the frontier's tokens
        for level in range(depth):
            counts = builder.num_children
            if same is not None:
                shape = (len(counts), -1)
                offered = Candidates(
                    same.log_probs[level].expand(shape), same.tokens[level].expand(shape)
                )
            elif self.reads_path:
                after = self.network.after(logits[level], newest)
                offered = self._pick(row, after, level, counts)
            else:
                offered = self._pick(row, logits[level].expand(len(counts), -1), level, counts)
            frontier = builder.grow(offered.log_probs, offered.tokens, offered.drawn)
            if frontier is None:
                break
            newest = frontier.tokens
        return builder.finish()

    def _rank(self, row: Row, logits: Tensor, count: int) -> Candidates:
        """[J, count] candidates of every level by the slots' own logits [J, U]."""
        if row.sampler.is_greedy:  # no noise, so that positions do not matter
            return self._pick(row, logits, 0, (count,) * len(logits))
        levels = [self._pick(row, own[None], level, (count,)) for level, own in enumerate(logits)]
        return Candidates(
            torch.cat([level.log_probs for level in levels]),
            torch.cat([level.tokens for level in levels]),
        )

    def _pick(self, row: Row, logits: Tensor, level: int, counts: tuple[int, ...]) -> Candidates:
        """Children of nodes at this depth by their logits [F, U]."""
        return pick(
            logits,
            children=self._children,
            counts=counts,
            sampler=row.sampler,
            position=len(row.tokens) + level,
            target_ids=self._target_ids,
            vocab_size=self._vocab_size,
        )

    def _make_room(self, slots: list[int], widths: list[int]) -> None:
        needed = max(self._cache.lengths[s] + w for s, w in zip(slots, widths, strict=True))
        if needed > self._cache.max_length:
            self._enlarge(self._cache.num_rows, needed + ROOM)

    def _enlarge(self, num_rows: int, max_length: int) -> None:
        """A larger cache with the same contents."""
        self._free.extend(range(self._cache.num_rows, num_rows))
        self._cache = self._cache.enlarged(num_rows, max_length)


def _chain(root: int, levels: Candidates, budget: int) -> DraftTree:
    """The likeliest of every level, up to one that has none."""
    given = levels.log_probs[:budget, 0].float().cpu()
    known = int((given > float("-inf")).long().cumprod(0).sum())
    tokens = levels.tokens[:known, 0].tolist()
    return DraftTree.chain([root, *tokens], log_probs=torch.cat([torch.zeros(1), given[:known]]))


class PathDrafter(DFlashDrafter):
    """Drafts with DFlash and a head that scores a token by the one before it.

    A child's score depends on its parent, so trees grow level by level; one pass of the network
    serves all of them.
    """

    name = "dspark"
    reads_path = True
