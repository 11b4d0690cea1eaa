"""DFlash's network for drafting: with what it borrows from its target, on the fastest products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.cache import SlotCache
from slipstream.drafters.attention import CachedAttention
from slipstream.drafters.compiled import angles_of, can_compile, rows_of, sizes_of, stack_layer
from slipstream.drafters.products import frozen_copy, product, replace_linears
from slipstream.formats.checkpoint import DFlashCheckpoint
from slipstream.models.blocks import turn
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.target.protocol import Target, TargetSpec
from slipstream.target.stack import Stack
from slipstream.target.tiles import TileProduct


class BlockNetwork:
    """A DFlash network for drafting: frozen, with what it borrows from its target.

    Args:
        checkpoint: network and draft vocabulary; the network is copied.
        target: gives embedding, head, number type and device.
    """

    rests_threads = False

    def __init__(self, checkpoint: DFlashCheckpoint, target: Target) -> None:
        model, vocabulary = checkpoint.model, checkpoint.vocabulary
        self.dtype, self.device = target.spec.dtype, target.spec.device
        self._model = frozen_copy(model, self.dtype, self.device)
        self._embedding = target.embedding()
        head = head_of(target, vocabulary).to(self.device, self.dtype)
        mask_token = model.config.mask_token
        ids = vocabulary.target_ids
        self._never = (ids == mask_token).nonzero()[:, 0].to(self.device)  # draft ids, at most one
        if model.path is not None:
            self._codes = self._model.path.codes(self._embedding.to(self.dtype))  # [V', rank]
            rows = self._model.path.rows(head)  # [U, rank]
            self._turn = product(rows, None, target.spec, is_head=True)
        attentions = [layer.self_attn for layer in self._model.layers]
        weights = [part.weight for a in attentions for part in (a.k_proj, a.v_proj)]
        stacked = torch.cat(weights)  # [layers * 2 * Hkv*C, D]
        self._keep = product(stacked, None, target.spec)
        self._key_norms = torch.stack([a.k_norm.weight for a in attentions])  # [layers, C]
        self._lay_out(head, target.spec)

    def _lay_out(self, head: Tensor, spec: TargetSpec) -> None:
        """Put the layers and the head [U, D] into the form that runs."""
        self._head = product(head, None, spec, is_head=True)
        replace_linears(self._model, spec)

    def new_cache(self, num_rows: int, max_length: int) -> SlotCache:
        """An empty cache for the keys and values of all layers."""
        config = self._model.config
        return SlotCache(
            config.num_layers, num_rows, config.num_kv_heads, config.head_size, max_length,
            self.dtype, self.device,
        )  # fmt: skip

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, Hkv, P, C] of each layer, of features [B, P, K*D].

        What `DFlash.context` computes layer by layer, for all layers at once.
        """
        config = self._model.config
        fused = self._model.fuse(features.to(self.device, self.dtype))
        kept = self._keep(fused).unflatten(
            -1, (config.num_layers, 2, config.num_kv_heads, config.head_size)
        )
        keys, values = kept.permute(2, 3, 0, 4, 1, 5).unbind(1)  # [layers, B, Hkv, P, C]
        keys = F.rms_norm(keys, keys.shape[-1:], eps=config.rms_norm_eps)
        keys = keys * self._key_norms[:, None, None, None]
        by = self._model.rotation(positions.to(self.device))
        return list(zip(turn(keys, by), values, strict=True))

    def __call__(
        self, anchors: Tensor, positions: Tensor, width: int, attend: CachedAttention
    ) -> Tensor:
        """[B, J, U] float logits of the blocks that start at anchors [B]; never the mask token."""
        tokens = self._model.block(anchors.to(self.device), width)
        embedded = F.embedding(tokens, self._embedding).to(self.dtype)
        states = self._model.denoise(embedded, positions.to(self.device), attend)
        logits = self._head(self._model.read_out(states)).float()
        logits[..., self._never] = float("-inf")
        return logits

    def after(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[F, U] logits of a slot [U] after each of these tokens [F]."""
        return logits + self._turn(self._codes[tokens.to(self.device)]).float()


class CompiledBlocks(BlockNetwork):
    """The same, its layers and its head run by the compiled code of the target."""

    rests_threads = True

    def _lay_out(self, head: Tensor, spec: TargetSpec) -> None:
        model = self._model
        self._stack = Stack(
            [stack_layer(layer, layer.input_layernorm) for layer in model.layers],
            sizes_of(model.config),
            angles_of(model),
            head=TileProduct(head),
            vocab_size=len(head),
            final_norm=model.norm.weight,
        )
        del model.layers  # laid out in tiles above
        replace_linears(model, spec)

    def __call__(
        self, anchors: Tensor, positions: Tensor, width: int, attend: CachedAttention
    ) -> Tensor:
        """[B, J, U] float logits of the blocks that start at anchors [B]; never the mask token."""
        tokens = self._model.block(anchors, width)
        slots = torch.arange(tokens.numel(), dtype=torch.int32).view(tokens.shape)
        wanted = self._model.read_out(slots)  # [B, J]
        logits = self._stack.run(
            F.embedding(tokens.flatten(), self._embedding),
            positions.flatten(),
            rows_of(attend),
            attend.cache.keys,
            attend.cache.values,
            wanted=wanted.flatten().contiguous(),
        ).logits
        logits[:, self._never] = float("-inf")
        return logits.view(*wanted.shape, -1)


def block_network(checkpoint: DFlashCheckpoint, target: Target) -> BlockNetwork:
    """The network as its target runs: compiled where that is."""
    compiles = can_compile(target.spec, checkpoint.model.config)
    return (CompiledBlocks if compiles else BlockNetwork)(checkpoint, target)


def head_of(target: Target, vocabulary: DraftVocabulary) -> Tensor:
    """[U, D] of the target's head."""
    head = target.head()
    return head if vocabulary.is_full else head[vocabulary.target_ids.to(head.device)]
