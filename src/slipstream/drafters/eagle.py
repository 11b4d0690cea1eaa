"""Feature rollout under any tree: EAGLE-3's network drafts level by level.

Paper: Li et al. 2025, EAGLE-3, arXiv:2503.01840, section 3.1; the trees are EAGLE-2's,
arXiv:2406.16858, section 4, or any fixed shape.
Differs: levels of all rows of a batch go through the network together; keys of committed pairs
are kept, those of drafted nodes are dropped at the end of the turn.

What the cache holds for a row of n tokens (root x[n-1]):

    committed pairs 0..n-2   pair i = (features of position i, token x[i+1]), rotary position i
    level d of the tree      (state of the node's parent, the node's token), position n-2+d

A pair needs the features of its position, which exist only once the target has passed over it,
so no key ever stems from an unverified token or from the drafter's own states.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.cache import SlotCache
from slipstream.drafters.protocol import Row
from slipstream.errors import SettingError
from slipstream.formats import eagle3
from slipstream.formats.eagle3 import Eagle3Checkpoint
from slipstream.models.eagle3 import Eagle3
from slipstream.target.packed import can_pack, pack_linears
from slipstream.target.protocol import Target
from slipstream.trees import kinds
from slipstream.trees.kinds import MakeBuilder
from slipstream.trees.protocol import Frontier, TreeBuilder
from slipstream.types import DraftTree, Verdict

CHUNK = 256  # pairs of a prompt taken at once
BLOCK = 256  # slots the cache grows by


@dataclass(slots=True)
class _RowState:
    """What is kept of a row between turns."""

    slot: int
    pending: Tensor  # [P, K*D] features of the newest positions, not yet in the cache
    state: Tensor | None = None  # [D] output of the newest committed pair


class EagleDrafter:
    """Drafts with an EAGLE-3 network; see the module's text.

    Args:
        checkpoint: network and draft vocabulary.
        embedding: [V', D], the target's.
        make_builder: gives a tree builder for a depth and a number of nodes.
        topk: children ranked per node; must serve the builder.
        vocab_size: V; draft ids beyond it are never proposed.
        dtype: the network runs in.
        device: where it runs.
    """

    name = "eagle3"

    def __init__(
        self,
        checkpoint: Eagle3Checkpoint,
        embedding: Tensor,
        make_builder: MakeBuilder,
        *,
        topk: int,
        vocab_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        config = checkpoint.model.config
        self.taps = config.taps
        self.model: Eagle3 = copy.deepcopy(checkpoint.model).to(device, dtype).eval()
        self.model.frequencies = checkpoint.model.frequencies.to(device)
        self.model.requires_grad_(False)
        if can_pack(dtype, torch.device(device)):
            pack_linears(self.model)
        self._embedding = embedding
        self._make_builder = make_builder
        self._target_ids = checkpoint.vocabulary.target_ids.to(device)
        self._topk = min(topk, len(checkpoint.vocabulary))
        beyond = self._target_ids >= vocab_size
        self._never = beyond if bool(beyond.any()) else None  # [U] bool
        self._dtype, self._device = dtype, torch.device(device)
        self._rows: dict[int, _RowState] = {}
        self._free: list[int] = []
        self._cache = self._new_cache(1, BLOCK)
        self._free.append(0)

    @classmethod
    def from_checkpoint(
        cls,
        folder: Path | str,
        target: Target,
        *,
        tree: str = "dynamic",
        budget: int = 8,
        depth: int = 4,
        topk: int = 4,
    ) -> EagleDrafter:
        """Read a checkpoint and fit it to a target.

        Raises:
            CheckpointError: the folder cannot be read.
            DrafterMismatchError: it was made for another target.
            SettingError: topk is larger than the draft vocabulary, or the tree is unknown.
        """
        checkpoint = eagle3.read(Path(folder), target_layers=target.spec.num_layers)
        return cls.from_model(checkpoint, target, tree=tree, budget=budget, depth=depth, topk=topk)

    @classmethod
    def from_model(
        cls,
        checkpoint: Eagle3Checkpoint,
        target: Target,
        *,
        tree: str = "dynamic",
        budget: int = 8,
        depth: int = 4,
        topk: int = 4,
    ) -> EagleDrafter:
        """Fit a network in memory to a target; see `from_checkpoint`."""
        embedding, spec = target.embedding(), target.spec
        eagle3.check_target(
            checkpoint.model.config,
            vocab_size=embedding.shape[0],
            hidden_size=spec.hidden_size,
            num_layers=spec.num_layers,
            name=spec.name,
        )
        size = len(checkpoint.vocabulary)
        if tree == "dynamic" and topk > size:
            raise SettingError(
                "topk", topk, f"at most the draft vocabulary, {size}", "choose a smaller topk"
            )
        kind = kinds.make(tree, budget=budget, depth=depth, topk=topk)
        return cls(
            checkpoint,
            embedding,
            kind.build,
            topk=kind.topk,
            vocab_size=spec.vocab_size,
            dtype=spec.dtype,
            device=spec.device,
        )

    def open(self, row: Row, features: Tensor | None) -> None:
        """Take the prompt's pairs into the cache."""
        assert features is not None, "the engine gives features for our taps"
        if not self._free:
            self._grow(self._cache.num_rows * 2, self._cache.max_length)
        state = _RowState(self._free.pop(), features[:0])
        self._rows[row.key] = state
        self._cache.reset(state.slot)
        for start in range(0, features.shape[0], CHUNK):
            state.pending = features[start : start + CHUNK]
            first = self._cache.lengths[state.slot]
            self._take([state], [row.tokens[first + 1 : first + 1 + len(state.pending)]])

    def observe(self, row: Row, verdict: Verdict, features: Tensor | None) -> None:
        """Remember the verified features; they enter the cache with the next proposal."""
        assert features is not None, "the engine gives features for our taps"
        state = self._rows[row.key]
        state.pending = torch.cat([state.pending, features])

    def close(self, row: Row) -> None:
        """Free the row's slot."""
        state = self._rows.pop(row.key, None)
        if state is not None:
            self._free.append(state.slot)

    @torch.no_grad()
    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        """One tree per row, all rows level by level together."""
        drafting = [row for row in rows if row.max_depth >= 1 and row.max_nodes >= 1]
        trees = {row.key: DraftTree.chain([row.tokens[-1]]) for row in rows}
        if drafting:
            states = [self._rows[row.key] for row in drafting]
            behind = [(s, row) for s, row in zip(states, drafting, strict=True) if len(s.pending)]
            if behind:
                self._take(
                    [state for state, _ in behind],
                    [row.tokens[-len(state.pending) :] for state, row in behind],
                )
            for row, tree in zip(drafting, self._roll_out(drafting, states), strict=True):
                trees[row.key] = tree
        return [trees[row.key] for row in rows]

    @torch.no_grad()
    def _take(self, states: list[_RowState], next_tokens: list[list[int]]) -> None:
        """Commit each row's pending pairs (features, next token) and keep the last state."""
        widths = [len(state.pending) for state in states]
        lengths = [self._cache.lengths[state.slot] for state in states]
        longest = max(widths)
        features = torch.stack([_pad(state.pending, longest) for state in states])
        tokens = torch.zeros(len(states), longest, dtype=torch.int64)
        for row, ids in enumerate(next_tokens):
            tokens[row, : widths[row]] = torch.tensor(ids)
        positions = torch.tensor(lengths)[:, None] + torch.arange(longest)
        visible = torch.ones(longest, longest, dtype=torch.bool).tril()
        outputs = self._pass(
            states,
            widths,
            self.model.fuse(features.to(self._dtype)),
            tokens,
            positions,
            [(length, visible) for length in lengths],
        )
        for row, state in enumerate(states):
            self._cache.commit(state.slot, range(widths[row]))
            state.state = outputs[row, widths[row] - 1]
            state.pending = state.pending[:0]

    def _roll_out(self, rows: list[Row], states: list[_RowState]) -> list[DraftTree]:
        """Grow a tree per row from the rows' last states."""
        growths = []
        for row, state in zip(rows, states, strict=True):
            builder = self._make_builder(row.max_depth, row.max_nodes)
            builder.start(row.tokens[-1])
            growths.append(_Growth(builder, state, self._cache.lengths[state.slot]))
        active = growths
        level = torch.stack([state.state for state in states])[:, None]  # [B, 1, D]
        for growth in growths:
            growth.width = 1
        while True:
            log_probs, tokens = self._rank(level)
            grown = []
            for index, growth in enumerate(active):
                here = slice(0, growth.width)
                frontier = growth.builder.grow(log_probs[index, here], tokens[index, here])
                if frontier is not None:
                    growth.advance(frontier, level[index])
                    grown.append(growth)
            active = grown
            if not active:
                break
            level = self._expand(active)
        for growth in growths:
            self._cache.truncate(growth.state.slot, growth.base)
        return [growth.builder.finish() for growth in growths]

    def _rank(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """[B, F, M] nats and [B, F, M] int64 target ids of the likeliest next tokens."""
        log_probs = self.model.logits(states).float().log_softmax(-1)  # [B, F, U]
        if self._never is not None:
            log_probs = log_probs.masked_fill(self._never, float("-inf"))
        best = log_probs.topk(self._topk, dim=-1)
        return best.values, self._target_ids[best.indices]

    def _expand(self, growths: list[_Growth]) -> Tensor:
        """[B, F, D] states of the frontiers; their keys stay until the tree is finished."""
        widths = [growth.width for growth in growths]
        longest = max(widths)
        inputs = torch.stack([_pad(growth.inputs, longest) for growth in growths])
        tokens = torch.stack([_pad(growth.tokens, longest) for growth in growths])
        positions = torch.tensor([growth.base + growth.depth - 1 for growth in growths])
        outputs = self._pass(
            [growth.state for growth in growths],
            widths,
            inputs,
            tokens,
            positions[:, None].expand(-1, longest),
            [(growth.base, growth.visible) for growth in growths],
        )
        for growth in growths:
            self._cache.commit(growth.state.slot, range(growth.width))
        return outputs

    def _pass(
        self,
        states: list[_RowState],
        widths: list[int],
        inputs: Tensor,
        tokens: Tensor,
        positions: Tensor,
        sees: list[tuple[int, Tensor]],
    ) -> Tensor:
        """One pass of the network's layer over new nodes of several rows.

        Args:
            states: the rows.
            widths: new nodes of each row.
            inputs: [B, F, D] fused features or parents' states.
            tokens: [B, F] int64.
            positions: [B, F] int64.
            sees: per row, how many leading slots every node sees, and [f, e] bool for the e
                slots after them (earlier nodes of the tree, then the new ones).
        """
        slots = [state.slot for state in states]
        needed = max(self._cache.lengths[s] + w for s, w in zip(slots, widths, strict=True))
        if needed > self._cache.max_length:
            self._grow(self._cache.num_rows, needed + BLOCK)
        used = self._cache.begin(slots, widths)
        lowest = torch.finfo(self._dtype).min
        mask = torch.full((len(slots), inputs.shape[1], used), lowest, dtype=self._dtype)
        for row, (base, visible) in enumerate(sees):
            mask[row, :, :base] = 0
            f, e = visible.shape
            mask[row, :f, base : base + e].masked_fill_(visible[:, : used - base], 0)
        mask = mask.to(self._device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.update(k, v, 0)
            batch, num_heads, n, size = q.shape
            groups = num_heads // keys.shape[1]
            folded = q.reshape(batch, keys.shape[1], groups * n, size)
            every = mask[:, None].expand(batch, groups, n, used).reshape(batch, 1, groups * n, used)
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=every)
            return out.reshape(batch, num_heads, n, size)

        embedded = F.embedding(tokens.to(self._device), self._embedding).to(self._dtype)
        return self.model.step(inputs, embedded, positions.to(self._device), attend)

    def _new_cache(self, num_rows: int, max_length: int) -> SlotCache:
        config = self.model.config
        return SlotCache(
            1, num_rows, config.num_kv_heads, config.head_size, max_length,
            self._dtype, self._device,
        )  # fmt: skip

    def _grow(self, num_rows: int, max_length: int) -> None:
        """A larger cache with the same contents."""
        old, new = self._cache, self._new_cache(num_rows, max(max_length, self._cache.max_length))
        new.keys[:, : old.num_rows, :, : old.max_length] = old.keys
        new.values[:, : old.num_rows, :, : old.max_length] = old.values
        for slot, length in enumerate(old.lengths):
            new.begin([slot], [length])
            new.commit(slot, range(length))
        self._free.extend(range(old.num_rows, num_rows))
        self._cache = new


@dataclass(slots=True)
class _Growth:
    """A tree that is being grown: which nodes were expanded and what each of them sees."""

    builder: TreeBuilder
    state: _RowState
    base: int  # committed pairs
    depth: int = 0
    width: int = 0
    tokens: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    inputs: Tensor = field(default_factory=lambda: torch.zeros(0))
    visible: Tensor = field(default_factory=lambda: torch.zeros(1, 0, dtype=torch.bool))

    def advance(self, frontier: Frontier, level: Tensor) -> None:
        """Move to the next level; `level` [F, D] holds the states of the one before."""
        parents = frontier.parents
        self.depth, self.width = frontier.depth, len(parents)
        self.tokens = frontier.tokens
        self.inputs = level[parents]
        own = torch.eye(self.width, dtype=torch.bool)
        self.visible = torch.cat([self.visible[parents.cpu()], own], dim=1)


def _pad(rows: Tensor, length: int) -> Tensor:
    """[n, ...] to [length, ...], zeros below."""
    if rows.shape[0] == length:
        return rows
    return torch.cat([rows, rows.new_zeros(length - rows.shape[0], *rows.shape[1:])])
