"""Draft networks run by the compiled code that runs their target (`target.stack`).

A level of a tree is a few milliseconds of small products, most of which PyTorch spends on starting
its operations; here it is one call. Networks run compiled where their target does: in bfloat16 on
a CPU, over layers whose sizes fit. Numbers differ from the plain network's by rounding only, and
what is drafted decides nothing but speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.drafters.attention import CachedAttention
from slipstream.drafters.products import CompiledLinear, frozen_copy, on_rows
from slipstream.models.blocks import attention_factor
from slipstream.models.eagle import Eagle
from slipstream.models.eagle3 import Eagle3
from slipstream.models.language import Language, LanguageLayer
from slipstream.target.protocol import TargetSpec
from slipstream.target.stack import Rows, Sizes, Stack, StackLayer
from slipstream.target.tiles import TileProduct


def can_compile(spec: TargetSpec, config: Any) -> bool:
    """True where a draft network of this shape runs as its target does: compiled.

    Args:
        spec: the target's.
        config: has the sizes of `EagleConfig`.
    """
    return spec.decoder == "compiled" and sizes_of(config).why_not() is None


class CompiledNetwork:
    """A network for a rollout, run by compiled code; see `rollout.DraftNetwork`.

    Args:
        model: EAGLE-3's, EAGLE-1's or a language model's network.
        embedding: [V', D] bfloat16, the target's.
        head: [U, D] the target's head over the draft vocabulary, for a network without one.
        above: ordinary decoder layers after the network's own.
    """

    dtype = torch.bfloat16
    device = torch.device("cpu")
    rests_threads = True

    def __init__(
        self,
        model: Eagle3 | Eagle | Language,
        embedding: Tensor,
        head: Tensor | None = None,
        *,
        above: Iterable[LanguageLayer] = (),
    ) -> None:
        config = model.config
        self.num_kv_heads, self.head_size = config.num_kv_heads, config.head_size
        self._embedding = embedding
        # Where states leave normed, what is read of them must not be normed again.
        self._gives_normed = isinstance(model, Eagle3) and config.norm_output
        shape: dict[str, Any] = {}
        if isinstance(model, Eagle3):
            middle = model.midlayer
            layers = [stack_layer(middle, None)]
            shape["token_norm"] = middle.input_layernorm.weight
            shape["state_norm"] = middle.hidden_norm.weight
            shape["keeps_normed"] = config.norm_before_residual
        elif isinstance(model, Eagle):
            layers = [stack_layer(layer, None) for layer in model.layers]
            shape["join"] = TileProduct(model.fc.weight.detach(), model.fc.bias)
        else:
            layers = [stack_layer(layer, layer.input_layernorm) for layer in model.layers]
        layers += [stack_layer(layer, layer.input_layernorm) for layer in above]
        if not isinstance(model, Eagle):
            head, shape["final_norm"] = model.lm_head.weight, model.norm.weight
        assert head is not None, "the target's head is borrowed"
        self.num_layers = len(layers)
        angles, product = angles_of(model), TileProduct(head.detach())
        count = len(head)
        self._stack = self._reader = Stack(
            layers, sizes_of(config), angles, head=product, vocab_size=count, **shape
        )
        if self._gives_normed:
            self._reader = Stack([], sizes_of(config), angles, head=product, vocab_size=count)
        self._fuse, self._normed = None, None
        if isinstance(model, Eagle3):
            self._fuse = CompiledLinear(model.fc.weight.detach(), model.fc.bias)
            if config.norm_features or config.norm_each_tap:
                frozen = frozen_copy(model, self.dtype, self.device)
                self._normed = frozen.normed

    def fuse(self, features: Tensor) -> Tensor:
        """[P, D] what a pair reads, of [P, K*D] features of the target."""
        features = features.to(self.dtype)
        if self._fuse is None:
            return features
        return self._fuse(features if self._normed is None else self._normed(features))

    def step(
        self, tokens: Tensor, inputs: Tensor | None, positions: Tensor, attend: CachedAttention
    ) -> Tensor:
        """[B, N, D] states; see `rollout.DraftNetwork.step`."""
        sight, cache = attend.sight, attend.cache
        shape = _Padded(sight.widths)
        found = self._stack.run(
            F.embedding(shape.flat(tokens), self._embedding),
            shape.flat(positions),
            rows_of(attend),
            cache.keys,
            cache.values,
            states=None if inputs is None else shape.flat(inputs),
            with_streams=not self._gives_normed,
        )
        states = found.last_hidden if found.streams is None else found.streams
        return shape.padded(states)

    def logits(self, states: Tensor) -> Tensor:
        """[..., U] float32 logits of [..., D] states."""
        return on_rows(self._reader.read, states)


def stack_layer(layer: Any, attention_norm: nn.Module | None) -> StackLayer:
    """A decoder layer of a draft network in tiles.

    Args:
        layer: has `self_attn`, `mlp` and `post_attention_layernorm`, and possibly norms of heads.
        attention_norm: the norm before attention, where the stream alone is read.
    """
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    bias = None
    if projections[0].bias is not None:
        bias = torch.cat([one.bias.detach() for one in projections])
    query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return StackLayer(
        qkv=TileProduct(torch.cat([one.weight.detach() for one in projections]), bias),
        output=TileProduct(attention.o_proj.weight.detach(), attention.o_proj.bias),
        gate_up=TileProduct(
            torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]), is_gated=True
        ),
        down=TileProduct(mlp.down_proj.weight.detach()),
        mlp_norm=layer.post_attention_layernorm.weight,
        attention_norm=None if attention_norm is None else attention_norm.weight,
        query_norm=None if query_norm is None else query_norm.weight,
        key_norm=None if key_norm is None else key_norm.weight,
    )


def rows_of(attend: CachedAttention) -> Rows:
    """What the compiled code is told of where nodes go and what they see."""
    sight = attend.sight
    earlier = [
        0 if own is None else own.shape[1] - width
        for own, width in zip(sight.visible, sight.widths, strict=True)
    ]
    visible = [None if own is None else own.contiguous() for own in sight.visible]
    return Rows(sight.slots, sight.starts, sight.widths, visible, earlier)


def angles_of(model: Any) -> Any:
    """A function from a number of positions to cosines and signed sines [P, C] of a network."""
    frequencies = model.frequencies.float()
    factor = attention_factor(model.config.rope_scaling)

    def angles(length: int) -> tuple[Tensor, Tensor]:
        turns = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
        cos, sin = turns.cos() * factor, turns.sin() * factor
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    return angles


def sizes_of(config: Any) -> Sizes:
    """Of the layers of a draft network."""
    return Sizes(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        eps=config.rms_norm_eps,
    )


class _Padded:
    """Between rows padded to the widest and nodes side by side."""

    def __init__(self, widths: Any) -> None:
        self._sizes = (len(widths), max(widths))
        self._index: Tensor | None = None
        if len(set(widths)) > 1:
            places = torch.arange(self._sizes[1]) < torch.tensor(widths)[:, None]
            self._index = places.flatten().nonzero()[:, 0]

    def flat(self, rows: Tensor) -> Tensor:
        """[M, ...] of [B, N, ...]."""
        flat = rows.flatten(0, 1)
        return flat.contiguous() if self._index is None else flat[self._index]

    def padded(self, flat: Tensor) -> Tensor:
        """[B, N, ...] of [M, ...], zeros below."""
        if self._index is None:
            return flat.view(*self._sizes, -1)
        rows = flat.new_zeros(self._sizes[0] * self._sizes[1], flat.shape[-1])
        rows[self._index] = flat
        return rows.view(*self._sizes, -1)
