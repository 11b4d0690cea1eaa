"""P-EAGLE: EAGLE-3's pairs and masked slots behind them, all depths of a draft in one pass.

Paper: Hui et al. 2026, P-EAGLE, arXiv:2602.01469.
Differs: keys of verified pairs are kept between turns; rows of any length share a pass; any tree
over the marginals (`one_pass`), where the paper drafts a chain.

What the cache holds for a row of n tokens (root x[n-1]); see `models.peagle` for what is read:

    pairs 0..n-2         keys and values of every layer, at their own positions
    slots d = 1, 2, ...  at positions n-2+d, written past the pairs in the same pass and forgotten

One pass a turn reads the pairs that are new and the slots. A slot predicts x[n+d] and so holds
nothing of x[n], x[n+1], ...; no key of one outlives its turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slipstream.cache import SlotCache
from slipstream.drafters.attention import CachedAttention, Sight
from slipstream.drafters.compiled import CompiledNetwork, can_compile
from slipstream.drafters.eagle import PairNetwork
from slipstream.drafters.one_pass import ROOM, OnePassDrafter
from slipstream.drafters.products import narrow
from slipstream.drafters.protocol import Row
from slipstream.drafters.rollout import CHUNK, TOGETHER
from slipstream.formats import layouts
from slipstream.formats.checkpoint import PEagleCheckpoint, facts_of
from slipstream.models.peagle import PEagle
from slipstream.target.protocol import Target
from slipstream.trees.kinds import Growth


class PEagleDrafter(OnePassDrafter):
    """Drafts with a P-EAGLE network; see the module's text.

    Args:
        checkpoint: network and draft vocabulary.
        target: whose text is drafted, and whose embedding is read where the network has none.
        growth: of the trees, see `OnePassDrafter`.
    """

    name = "peagle"

    def __init__(self, checkpoint: PEagleCheckpoint, target: Target, growth: Growth) -> None:
        model, ids = checkpoint.model, checkpoint.vocabulary.target_ids
        config, network = model.config, _network(model, target)
        cache = SlotCache(
            config.num_layers, 1, config.num_kv_heads, config.head_size, ROOM,
            network.dtype, network.device,
        )  # fmt: skip
        super().__init__(
            network,
            cache,
            taps=config.taps,
            vocabulary=checkpoint.vocabulary,
            target=target,
            growth=growth,
            depth=growth.budget,  # a tree is no deeper than it has nodes
        )
        self._mask_token = config.mask_token
        self._never = (ids == config.mask_token).nonzero()[:, 0].to(network.device)  # at most one
        hidden = model.mask_hidden.detach()[0].to(network.device)  # [1, K*D]
        with torch.no_grad():
            self._masked = network.fuse(hidden)  # [1, D], what every slot reads
        self._newest: dict[int, Tensor] = {}  # [D] the state of each row's last pair

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
            SettingError: the tree is unknown.
        """
        checkpoint = layouts.PEAGLE.read(folder, target=facts_of(target))
        narrow(checkpoint.model, target.spec.dtype)
        return cls.from_model(checkpoint, target, growth)

    @classmethod
    def from_model(cls, checkpoint: PEagleCheckpoint, target: Target, growth: Growth) -> Self:
        """Fit a network in memory to a target; see `from_checkpoint`."""
        layouts.PEAGLE.check_target(checkpoint, target)
        return cls(checkpoint, target, growth)

    def close(self, row: Row) -> None:
        """Free the row."""
        super().close(row)
        self._newest.pop(row.key, None)

    def _draft(self, rows: list[Row]) -> Tensor:
        """[B, J, U] logits: of the newest pair, then of the slots in order."""
        depth = min(self._depth, max(row.max_depth for row in rows))
        num_slots = max(1, depth - 1)  # never a pass over nothing, where a row has no new pair
        unread = [self._catch_up(row) for row in rows]
        drafted = []
        for row, states in zip(rows, self._pass(rows, unread, num_slots), strict=True):
            if len(states) > num_slots:
                self._newest[row.key] = states[-num_slots - 1]
            drafted.append(torch.cat([self._newest[row.key][None], states[-num_slots:]]))
        logits = self.network.logits(torch.stack(drafted)).float()
        logits[..., self._never] = float("-inf")
        return logits

    def _catch_up(self, row: Row) -> Tensor:
        """[P, K*D] a row's newest features; what does not fit beside other rows' is read first."""
        features = self._pending.take(row.key)
        old = max(0, len(features) - TOGETHER)
        for start in range(0, old, CHUNK):
            self._pass([row], [features[start : min(start + CHUNK, old)]], 0)
        return features[old:]

    def _pass(self, rows: list[Row], unread: list[Tensor], num_slots: int) -> list[Tensor]:
        """One pass over new pairs, which stay in the cache, and slots, which do not.

        Args:
            rows: of the batch.
            unread: [P, K*D] of each, features of the positions after the cached ones.
            num_slots: masked slots behind the pairs of each row.

        Returns:
            [P + num_slots, D] states of each row.
        """
        slots, counts = [self._slots[row.key] for row in rows], [len(own) for own in unread]
        widths = [count + num_slots for count in counts]
        self._make_room(slots, widths)
        lengths = [self._cache.lengths[slot] for slot in slots]
        masked = self._masked.expand(num_slots, -1)
        fused = self.network.fuse(torch.cat(unread)).split(counts)
        inputs = pad_sequence([torch.cat([own, masked]) for own in fused], batch_first=True)
        tokens = [
            torch.tensor(row.tokens[start + 1 : start + 1 + count] + [self._mask_token] * num_slots)
            for row, start, count in zip(rows, lengths, counts, strict=True)
        ]
        positions = torch.tensor(lengths)[:, None] + torch.arange(max(widths))
        sight, device = Sight(slots, widths, lengths, [None] * len(slots)), self.network.device
        states = self.network.step(
            pad_sequence(tokens, batch_first=True).to(device),
            inputs,
            positions.to(device),
            CachedAttention(self._cache, sight),
        )
        for slot, count in zip(slots, counts, strict=True):
            self._cache.commit(slot, range(count))
        return [own[:width] for own, width in zip(states, widths, strict=True)]


def _network(model: PEagle, target: Target) -> PairNetwork | CompiledNetwork:
    """The network as its target runs: compiled where that is."""
    spec, own = target.spec, model.embed_tokens
    embedding = target.embedding()
    if own is not None:
        embedding = own.weight.detach().to(spec.device, spec.dtype)
    if can_compile(spec, model.config):
        return CompiledNetwork(model, embedding, above=model.layers.values())
    network = PairNetwork(model, embedding, head=None, dtype=spec.dtype, device=spec.device)
    network.num_layers = model.config.num_layers
    return network
