"""Grow draft trees level by level through a network that drafts one token after another.

The network may be recurrent in features (EAGLE) or read tokens alone (a draft language model).
It has one cache of keys and values, a row of it per request:

    committed entries 0..m-1    what is known of the text; entry i has rotary position i
    level d of the tree         the drafted nodes of depth d that are expanded, position m-1+d

The newest entries enter the cache and give the first level in one pass; every further level is
one pass over the nodes its builder wants expanded, all rows of the batch together. At the end of
the turn the keys of drafted nodes are dropped, so that no key ever stems from a token that was
not verified.

Paper: Li et al. 2024, EAGLE, arXiv:2401.15077, section 4.1.
Differs: the tree is any builder's; rows of different lengths and trees go through together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.cache import SlotCache
from slipstream.drafters.attention import CachedAttention, Sight
from slipstream.drafters.candidates import pick
from slipstream.drafters.protocol import Row
from slipstream.trees.kinds import MakeBuilder
from slipstream.trees.protocol import Frontier, TreeBuilder
from slipstream.types import DraftTree

CHUNK = 256  # entries of a prompt taken at once
TOGETHER = 32  # new entries of a row that are taken along with those of other rows
BLOCK = 256  # slots the cache grows by


class DraftNetwork(Protocol):
    """What a rollout needs of a network.

    Attributes:
        num_layers: layers that keep keys.
        num_kv_heads: key and value heads of each.
        head_size: C.
        dtype: of keys, values and masks.
        device: where it runs.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    def step(
        self, tokens: Tensor, inputs: Tensor | None, positions: Tensor, attend: CachedAttention
    ) -> Tensor:
        """One pass over new entries or drafted nodes.

        Args:
            tokens: [B, N] int64, the token of each.
            inputs: [B, N, D] what is read beside tokens: what `Entries` hold of committed entries,
                the parents' states for drafted nodes. A network that reads tokens alone ignores
                it.
            positions: [B, N] int64, rotary positions.
            attend: takes queries, keys and values; call it once a layer, from the first to the
                last.

        Returns:
            [B, N, D] states: read by `logits`, and by the step that expands the node's children.
        """

    def logits(self, states: Tensor) -> Tensor:
        """[..., U] logits of the next token of [..., D] states."""


@dataclass(frozen=True, slots=True)
class Entries:
    """New committed entries of a row.

    Args:
        tokens: P target ids.
        inputs: [P, D], or None for a network that reads tokens alone.
    """

    tokens: Sequence[int]
    inputs: Tensor | None = None


class Rollout:
    """Drafts trees with a network; one cache row per request between `open` and `close`.

    Args:
        network: what drafts.
        build: (deepest node, most nodes) to a fresh builder of one tree.
        target_ids: [U] int64, the target id of each draft id; None when they are the same.
        vocab_size: V; draft ids beyond it are never proposed.
        children: how a node's children come about, see `drafters.candidates`.
    """

    def __init__(
        self,
        network: DraftNetwork,
        build: MakeBuilder,
        *,
        target_ids: Tensor | None,
        vocab_size: int,
        children: str = "chosen",
    ) -> None:
        self.rests_threads: bool = getattr(network, "rests_threads", False)
        self._network = network
        self._build = build
        self._target_ids = None if target_ids is None else target_ids.to(network.device)
        self._vocab_size = vocab_size
        self._children = children
        self._stems: dict[int, _Stem] = {}
        self._cache = self._new_cache(1, BLOCK)
        self._free = [0]

    def open(self, key: int) -> None:
        """Begin a row without entries."""
        if not self._free:
            self._enlarge(self._cache.num_rows * 2, self._cache.max_length)
        self._stems[key] = _Stem(self._free.pop())
        self._cache.reset(self._stems[key].slot)

    def close(self, key: int) -> None:
        """Free a row; also one that was never opened."""
        stem = self._stems.pop(key, None)
        if stem is not None:
            self._free.append(stem.slot)

    def length(self, key: int) -> int:
        """Committed entries of a row."""
        return self._cache.lengths[self._stems[key].slot]

    @torch.no_grad()
    def commit(self, key: int, entries: Entries) -> None:
        """Take many entries of a row into its cache, a prompt's for instance."""
        for start in range(0, len(entries.tokens), CHUNK):
            here = slice(start, start + CHUNK)
            inputs = None if entries.inputs is None else entries.inputs[here]
            self._take([self._stems[key]], [Entries(entries.tokens[here], inputs)])

    @torch.no_grad()
    def draft(self, rows: Sequence[Row], entries: Sequence[Entries]) -> list[DraftTree]:
        """One tree per row, each rooted at the row's last token.

        Args:
            rows: opened rows with room to draft; each has at least one entry, old or new.
            entries: what is new of each row since it last drafted, possibly nothing.
        """
        stems = [self._stems[row.key] for row in rows]
        recent = [self._catch_up(row, its) for row, its in zip(rows, entries, strict=True)]
        new = [(stem, its) for stem, its in zip(stems, recent, strict=True) if its.tokens]
        if new:
            self._take([stem for stem, _ in new], [its for _, its in new])
        growths = [
            _Growth(row, self._build(row.max_depth, row.max_nodes), stem.slot, self.length(row.key))
            for row, stem in zip(rows, stems, strict=True)
        ]
        active, level = growths, torch.stack([stem.state for stem in stems])[:, None]  # [B, 1, D]
        while active:
            logits = self._network.logits(level)  # [B, F, U]
            active = [
                growth
                for growth, own, states in zip(active, logits, level, strict=True)
                if self._grow(growth, own, states)
            ]
            if active:
                level = self._expand(active)
        for growth in growths:
            self._cache.truncate(growth.slot, growth.base)
        return [growth.builder.finish() for growth in growths]

    def _catch_up(self, row: Row, entries: Entries) -> Entries:
        """Commit what a row that has not drafted for long lacks, up to what fits into one pass.

        The new entries of all rows go through together, padded to the longest.
        """
        old = len(entries.tokens) - TOGETHER
        if old <= 0:
            return entries
        inputs = entries.inputs
        early, late = (None, None) if inputs is None else (inputs[:old], inputs[old:])
        self.commit(row.key, Entries(entries.tokens[:old], early))
        return Entries(entries.tokens[old:], late)

    def _grow(self, growth: _Growth, logits: Tensor, states: Tensor) -> bool:
        """Offer the frontier's children to the builder; True when it wants some expanded.

        Args:
            growth: the tree.
            logits: [F, U] of its frontier, padded below.
            states: [F, D] of its frontier, padded below.
        """
        row, width = growth.row, growth.width
        offered = pick(
            logits[:width],
            children=self._children,
            counts=growth.builder.num_children,
            sampler=row.sampler,
            position=len(row.tokens) + growth.depth,
            target_ids=self._target_ids,
            vocab_size=self._vocab_size,
        )
        frontier = growth.builder.grow(offered.log_probs, offered.tokens, offered.drawn)
        if frontier is None:
            return False
        growth.advance(frontier, states)
        return True

    def _take(self, stems: list[_Stem], entries: list[Entries]) -> None:
        """Commit new entries of several rows and keep the state of each row's last."""
        widths = [len(its.tokens) for its in entries]
        longest = max(widths)
        tokens = torch.tensor(
            [[*its.tokens, *[0] * (longest - len(its.tokens))] for its in entries]
        )
        inputs = None
        if entries[0].inputs is not None:
            inputs = torch.stack([_pad(its.inputs, longest) for its in entries])
        lengths = [self._cache.lengths[stem.slot] for stem in stems]
        positions = torch.tensor(lengths)[:, None] + torch.arange(longest)
        sight = Sight([stem.slot for stem in stems], widths, lengths, [None] * len(stems))
        states = self._pass(sight, tokens, inputs, positions)
        for row, (stem, width) in enumerate(zip(stems, widths, strict=True)):
            self._cache.commit(stem.slot, range(width))
            stem.state = states[row, width - 1]

    def _expand(self, growths: list[_Growth]) -> Tensor:
        """[B, F, D] states of the frontiers; their keys stay until the tree is finished."""
        widths = [growth.width for growth in growths]
        longest = max(widths)
        positions = torch.tensor([[growth.base + growth.depth - 1] for growth in growths])
        states = self._pass(
            Sight(
                [growth.slot for growth in growths],
                widths,
                [growth.base for growth in growths],
                [growth.visible for growth in growths],
            ),
            torch.stack([_pad(growth.tokens, longest) for growth in growths]),
            torch.stack([_pad(growth.inputs, longest) for growth in growths]),
            positions.expand(-1, longest),
        )
        for growth in growths:
            self._cache.commit(growth.slot, range(growth.width))
        return states

    def _pass(
        self, sight: Sight, tokens: Tensor, inputs: Tensor | None, positions: Tensor
    ) -> Tensor:
        """[B, N, D] states of one pass of the network.

        Args:
            sight: where the nodes go and what they see.
            tokens: [B, N] int64.
            inputs: [B, N, D] or None.
            positions: [B, N] int64.
        """
        needed = max(
            self._cache.lengths[slot] + width
            for slot, width in zip(sight.slots, sight.widths, strict=True)
        )
        if needed > self._cache.max_length:
            self._enlarge(self._cache.num_rows, needed + BLOCK)
        device, attend = self._network.device, CachedAttention(self._cache, sight)
        return self._network.step(tokens.to(device), inputs, positions.to(device), attend)

    def _new_cache(self, num_rows: int, max_length: int) -> SlotCache:
        network = self._network
        return SlotCache(
            network.num_layers, num_rows, network.num_kv_heads, network.head_size, max_length,
            network.dtype, network.device,
        )  # fmt: skip

    def _enlarge(self, num_rows: int, max_length: int) -> None:
        """A larger cache with the same contents."""
        self._free.extend(range(self._cache.num_rows, num_rows))
        self._cache = self._cache.enlarged(num_rows, max_length)


@dataclass(slots=True)
class _Stem:
    """What is kept of a row between turns."""

    slot: int
    state: Tensor | None = None  # [D] of the newest committed entry


class _Growth:
    """A tree that is being grown: which nodes are to be expanded and what each of them sees."""

    def __init__(self, row: Row, builder: TreeBuilder, slot: int, base: int) -> None:
        self.row, self.builder, self.slot, self.base = row, builder, slot, base
        self.depth, self.width = 0, 1  # of the frontier: the root
        self.tokens: Tensor  # [F] int64
        self.inputs: Tensor  # [F, D], the parents' states
        self.visible: Tensor | None = None  # [F, e] bool, of the e drafted slots
        builder.start(row.tokens[-1])

    def advance(self, frontier: Frontier, states: Tensor) -> None:
        """Move to the next level; `states` [F, D] are those of the one before."""
        parents = frontier.parents
        self.depth, self.width = frontier.depth, len(parents)
        self.tokens = frontier.tokens
        self.inputs = states.index_select(0, parents)
        own = torch.eye(self.width, dtype=torch.bool)
        if self.visible is not None:
            own = torch.cat([self.visible.index_select(0, parents.cpu()), own], dim=1)
        self.visible = own


def _pad(rows: Tensor, length: int) -> Tensor:
    """[n, ...] to [length, ...], zeros below."""
    if rows.shape[0] == length:
        return rows
    return torch.cat([rows, rows.new_zeros(length - rows.shape[0], *rows.shape[1:])])
