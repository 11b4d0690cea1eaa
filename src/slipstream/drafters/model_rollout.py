"""Grow draft trees through a whole second model, seen as the target is: trees in, logits out.

A `drafters.rollout` drives a network layer by layer; a whole model is asked through the same
`forward` that verifies with the target. Its cache holds a row's tokens but the root, and every
level is one pass over the root and the nodes expanded so far.

Paper: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.
Differs: nodes of earlier levels are read again with each level, which costs width but no pass;
in return any model that can be a target can draft any tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.drafters.candidates import pick
from slipstream.drafters.protocol import Row
from slipstream.drafters.rollout import BLOCK, CHUNK, TOGETHER, Entries
from slipstream.target.protocol import Target
from slipstream.trees.kinds import MakeBuilder
from slipstream.trees.protocol import Frontier, TreeBuilder
from slipstream.types import DraftTree


class ModelRollout:
    """Drafts trees with a second model; one cache row per request between `open` and `close`.

    Args:
        model: reads the same token ids as the target.
        build: (deepest node, most nodes) to a fresh builder of one tree.
        vocab_size: V of the target; ids beyond it are never proposed.
        children: how a node's children come about, see `drafters.candidates`.
    """

    def __init__(
        self, model: Target, build: MakeBuilder, *, vocab_size: int, children: str = "chosen"
    ) -> None:
        self._model, self._build = model, build
        self._vocab_size, self._children = vocab_size, children
        self._slots: dict[int, int] = {}
        self._cache = model.new_cache(1, BLOCK)
        self._free = [0]

    def open(self, key: int) -> None:
        """Begin a row without entries."""
        if not self._free:
            self._enlarge(self._cache.num_rows * 2, self._cache.max_length)
        self._slots[key] = self._free.pop()
        self._cache.reset(self._slots[key])

    def close(self, key: int) -> None:
        """Free a row; also one that was never opened."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)

    def length(self, key: int) -> int:
        """Committed entries of a row."""
        return self._cache.lengths[self._slots[key]]

    def commit(self, key: int, entries: Entries) -> None:
        """Read many tokens of a row, a prompt's for instance."""
        slot = self._slots[key]
        for start in range(0, len(entries.tokens), CHUNK):
            tree = DraftTree.chain(entries.tokens[start : start + CHUNK])
            self._pass([tree], [slot], last_only=True)
            self._cache.commit(slot, range(len(tree)))

    def draft(self, rows: Sequence[Row], entries: Sequence[Entries]) -> list[DraftTree]:
        """One tree per row, each rooted at the row's last token.

        Args:
            rows: opened rows with room to draft.
            entries: the tokens of each row that were not read yet, the root last.
        """
        slots, unread = [self._slots[row.key] for row in rows], []
        for row, its in zip(rows, entries, strict=True):
            old = max(0, len(its.tokens) - TOGETHER)
            self.commit(row.key, Entries(its.tokens[:old]))
            unread.append(DraftTree.chain(its.tokens[old:]))
        level = self._pass(unread, slots, last_only=True)  # [B, 1, V]
        for slot, tree in zip(slots, unread, strict=True):
            self._cache.commit(slot, range(len(tree) - 1))  # the root is read with each level
        growths = active = [
            _Growth(row, self._build(row.max_depth, row.max_nodes), slot)
            for row, slot in zip(rows, slots, strict=True)
        ]
        while active:
            active = [
                growth
                for growth, logits in zip(active, level, strict=True)
                if self._grow(growth, logits)
            ]
            if active:
                level = self._expand(active)
        return [growth.builder.finish() for growth in growths]

    def _grow(self, growth: _Growth, logits: Tensor) -> bool:
        """Offer the children of the frontier [F, V]; True when some are to be expanded."""
        offered = pick(
            logits[: len(growth.frontier)],
            children=self._children,
            counts=growth.builder.num_children,
            sampler=growth.row.sampler,
            position=len(growth.row.tokens) + growth.depth,
            target_ids=None,
            vocab_size=self._vocab_size,
        )
        frontier = growth.builder.grow(offered.log_probs, offered.tokens, offered.drawn)
        if frontier is not None:
            growth.advance(frontier)
        return frontier is not None

    def _expand(self, growths: list[_Growth]) -> Tensor:
        """[B, F, V] logits of the frontiers, padded below."""
        slots = [growth.slot for growth in growths]
        logits = self._pass([growth.tree() for growth in growths], slots)
        for slot in slots:
            self._cache.rollback(slot)
        frontiers = [
            own[growth.frontier] for growth, own in zip(growths, logits, strict=True)
        ]  # [F, V] each
        return torch.nn.utils.rnn.pad_sequence(frontiers, batch_first=True)

    def _pass(
        self, trees: Sequence[DraftTree], slots: Sequence[int], *, last_only: bool = False
    ) -> Tensor:
        """[B, N, V] logits of the model, or [B, 1, V]."""
        needed = max(self._cache.lengths[s] + len(t) for s, t in zip(slots, trees, strict=True))
        if needed > self._cache.max_length:
            self._enlarge(self._cache.num_rows, needed + BLOCK)
        return self._model.forward(trees, self._cache, slots, last_only=last_only).logits

    def _enlarge(self, num_rows: int, max_length: int) -> None:
        self._free.extend(range(self._cache.num_rows, num_rows))
        self._cache = self._cache.enlarged(num_rows, max_length)


class _Growth:
    """A tree that is being grown: the root and the nodes that were expanded, in order."""

    def __init__(self, row: Row, builder: TreeBuilder, slot: int) -> None:
        self.row, self.builder, self.slot, self.depth = row, builder, slot, 0
        self.tokens, self.parents, self.frontier = [row.tokens[-1]], [-1], [0]
        builder.start(row.tokens[-1])

    def advance(self, frontier: Frontier) -> None:
        """Add the next level's nodes."""
        self.depth = frontier.depth
        self.parents += [self.frontier[parent] for parent in frontier.parents.tolist()]
        self.frontier = list(range(len(self.tokens), len(self.parents)))
        self.tokens += frontier.tokens.tolist()

    def tree(self) -> DraftTree:
        """What the next pass reads."""
        return DraftTree(torch.tensor(self.tokens), torch.tensor(self.parents))
