"""The EAGLE family's bookkeeping: features of verified positions in, trees out.

Paper: Li et al. 2024, EAGLE, arXiv:2401.15077, section 4.1; EAGLE-2, arXiv:2406.16858; 2025,
EAGLE-3, arXiv:2503.01840, section 3.1; Zhang et al. 2024, HASS, arXiv:2408.15766.
Differs: keys of verified pairs are kept between turns; any tree, any children.

An entry of the rollout is a pair: pair i joins the features of position i with the *next* token
x[i+1] and predicts x[i+2]. A row of n tokens (root x[n-1]) so has n-1 pairs:

    pairs 0..n-2         (features of position i, token x[i+1]), rotary position i
    level d of the tree  (state of the node's parent, the node's token), position n-2+d

A pair needs the features of its position, which exist only once the target has passed over it.
How a tree grows from there is `drafters.rollout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.drafters.attention import CachedAttention
from slipstream.drafters.compiled import CompiledNetwork, can_compile
from slipstream.drafters.pending import Pending
from slipstream.drafters.products import frozen_copy, narrow
from slipstream.drafters.protocol import Row
from slipstream.drafters.rollout import Entries, Rollout
from slipstream.formats import layouts
from slipstream.formats.checkpoint import Eagle3Checkpoint, EagleCheckpoint, facts_of
from slipstream.formats.layouts import Layout
from slipstream.target.packed import PackedLinear, can_pack, pack_linears
from slipstream.target.protocol import Target
from slipstream.trees.kinds import Growth
from slipstream.types import DraftTree, Verdict


class EagleDrafter:
    """Drafts with an EAGLE-3 network; see the module's text.

    Args:
        network: the draft network with what it borrows from its target.
        rollout: grows the trees.
        taps: indices into the target's hidden states that the network reads.
    """

    name = "eagle3"
    layout: ClassVar[Layout[Any]] = layouts.EAGLE3

    def __init__(
        self, network: PairNetwork | CompiledNetwork, rollout: Rollout, taps: tuple[int, ...]
    ) -> None:
        self.taps = taps
        self._network = network
        self._rollout = rollout
        self.rests_threads = rollout.rests_threads
        self._pending = Pending()

    @classmethod
    def from_checkpoint(cls, folder: Path | str, target: Target, growth: Growth) -> Self:
        """Read a checkpoint and fit it to a target.

        Args:
            folder: of the checkpoint.
            target: whose text is drafted.
            growth: of the trees.

        Raises:
            CheckpointError: the folder cannot be read.
            DrafterMismatchError: it was made for another target.
            SettingError: topk is larger than the draft vocabulary, or the tree is unknown.
        """
        checkpoint = cls.layout.read(folder, target=facts_of(target))
        narrow(checkpoint.model, target.spec.dtype)
        return cls.from_model(checkpoint, target, growth)

    @classmethod
    def from_model(
        cls, checkpoint: Eagle3Checkpoint | EagleCheckpoint, target: Target, growth: Growth
    ) -> Self:
        """Fit a network in memory to a target; see `from_checkpoint`."""
        embedding, spec = target.embedding(), target.spec
        own = getattr(checkpoint.model, "embed_tokens", None)
        cls.layout.check_target(checkpoint, target)
        if own is not None:
            embedding = own.weight.detach().to(spec.device, spec.dtype)
        kind = growth.kind(vocab_size=len(checkpoint.vocabulary))
        head = cls._borrowed_head(checkpoint, target)
        network: PairNetwork | CompiledNetwork
        if can_compile(spec, checkpoint.model.config):
            network = CompiledNetwork(checkpoint.model, embedding, head)
        else:
            network = PairNetwork(
                checkpoint.model, embedding, head=head, dtype=spec.dtype, device=spec.device
            )
        rollout = Rollout(
            network,
            kind.build,
            target_ids=checkpoint.vocabulary.target_ids,
            vocab_size=spec.vocab_size,
            children=growth.children,
        )
        return cls(network, rollout, cls._taps(checkpoint, target))

    def open(self, row: Row, features: Tensor | None) -> None:
        """Remember the prompt's features; they enter the cache with the first proposal."""
        assert features is not None, "the engine gives features for our taps"
        self._rollout.open(row.key)
        self._pending.add(row.key, features)

    def observe(self, row: Row, verdict: Verdict, features: Tensor | None) -> None:
        """Remember the verified features; they enter the cache with the next proposal."""
        assert features is not None, "the engine gives features for our taps"
        self._pending.add(row.key, features)

    def close(self, row: Row) -> None:
        """Free the row."""
        self._rollout.close(row.key)
        self._pending.close(row.key)

    @torch.no_grad()
    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        """One tree per row, all rows level by level together."""
        drafting = [row for row in rows if row.max_depth >= 1 and row.max_nodes >= 1]
        trees = {row.key: DraftTree.chain([row.tokens[-1]]) for row in rows}
        if drafting:
            unread = [self._pending.take(row.key) for row in drafting]
            counts = [len(features) for features in unread]
            fused = self._network.fuse(torch.cat(unread)).split(counts)
            entries = [
                Entries(row.tokens[len(row.tokens) - count :], inputs)
                for row, count, inputs in zip(drafting, counts, fused, strict=True)
            ]
            for row, tree in zip(drafting, self._rollout.draft(drafting, entries), strict=True):
                trees[row.key] = tree
        return [trees[row.key] for row in rows]

    @staticmethod
    def _borrowed_head(_checkpoint: Any, _target: Target) -> Tensor | None:
        """[U, D] of the target's head where the network has none of its own."""
        return None

    @staticmethod
    def _taps(checkpoint: Any, _target: Target) -> tuple[int, ...]:
        """Indices into the target's hidden states that the network reads."""
        return checkpoint.model.config.taps


class FeatureEagleDrafter(EagleDrafter):
    """Drafts with EAGLE-1's network, whose states are features and read by the target's head.

    Over a reduced draft vocabulary only some rows of the head are read: q is the softmax of these
    logits, and ids outside have q = 0.
    """

    name = "eagle"
    layout = layouts.EAGLE

    @staticmethod
    def _borrowed_head(checkpoint: Any, target: Target) -> Tensor:
        head, vocabulary = target.head(), checkpoint.vocabulary
        return head if vocabulary.is_full else head[vocabulary.target_ids.to(head.device)]

    @staticmethod
    def _taps(_checkpoint: Any, target: Target) -> tuple[int, ...]:
        return (target.spec.num_layers,)


class PairNetwork:
    """A draft network of pairs for a rollout: frozen, with the target's embedding.

    Args:
        model: has `fuse`, `step` and, without `head`, `logits`; it is copied.
        embedding: [V', D], the target's or the network's own.
        head: [U, D] the target's head over the draft vocabulary, or None.
        dtype: the network runs in.
        device: where it runs.
    """

    num_layers = 1

    def __init__(
        self,
        model: nn.Module,
        embedding: Tensor,
        *,
        head: Tensor | None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.dtype, self.device = dtype, torch.device(device)
        self.num_kv_heads = model.config.num_kv_heads
        self.head_size = model.config.head_size
        self._model = frozen_copy(model, dtype, self.device)
        self._model.embed_tokens = None  # one of its own comes as `embedding`, not twice
        self._embedding = embedding
        packs = can_pack(dtype, self.device)
        if packs:
            pack_linears(self._model)
        if head is None:
            self.logits = self._model.logits
        else:
            weight = head.to(self.device, dtype)
            self.logits = PackedLinear(weight) if packs else partial(F.linear, weight=weight)

    def fuse(self, features: Tensor) -> Tensor:
        """[P, D] what a pair reads, of [P, K*D] features of the target."""
        return self._model.fuse(features.to(self.dtype))

    def step(
        self, tokens: Tensor, inputs: Tensor | None, positions: Tensor, attend: CachedAttention
    ) -> Tensor:
        """[B, N, D] states; see `DraftNetwork.step`."""
        embedded = F.embedding(tokens, self._embedding).to(self.dtype)
        return self._model.step(inputs, embedded, positions, attend)
