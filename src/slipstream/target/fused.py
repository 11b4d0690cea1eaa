"""The fast twin of a stock decoder: fused projections, no module calls, the cache written in place.

It serves dense Llama, Mistral, Qwen2 and Qwen3 shapes and takes the weights over layer by layer,
so that they never exist twice. The equations are the stock model's; results differ from it by
rounding only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.cache import SlotCache
from slipstream.target.attention import attend
from slipstream.target.hardware import return_memory
from slipstream.target.products import Product
from slipstream.target.rotary import RotaryTable
from slipstream.target.storage import Storage
from slipstream.target.support import layer_kinds, text_config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on the position alone


def why_not(model: Any) -> str | None:
    """Why a loaded model cannot be fused; None where it can.

    Args:
        model: a transformers causal model.
    """
    config = model.config
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is not one of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPES:
        return f"its rotary scaling is {rope}, not one of {', '.join(ROPES)}"
    linears = (m for n, m in model.named_modules() if n.endswith(("_proj", "lm_head")))
    odd = next((m for m in linears if type(m) is not nn.Linear), None)
    return None if odd is None else f"it has a {type(odd).__name__} layer"


@dataclass(slots=True)
class FusedLayer:
    """One decoder layer's weights; q, k, v are one product, as are gate and up."""

    attention_norm: Tensor
    qkv: Product
    query_norm: Tensor | None  # [C]
    key_norm: Tensor | None  # [C]
    output: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product
    kind: str  # of `support.KINDS`


class KeyStore(Protocol):
    """Where a pass puts its keys and values."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write [B, H, N, C] of a layer; what attention reads, [B, H, used, C]."""


class FusedDecoder:
    """The decoder of a dense model without its modules.

    Args:
        model: a transformers causal model that `why_not` has nothing against; its layers' linear
            weights are moved out of it.
        storage: lays weights out for products.
    """

    def __init__(self, model: Any, storage: Storage) -> None:
        config, base = text_config(model.config), model.get_decoder()
        kinds = layer_kinds(model.config)
        self._size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._eps = float(config.rms_norm_eps)
        self._embedding = base.embed_tokens.weight.detach()
        self._rotary = RotaryTable(base.rotary_emb, self._embedding.dtype)
        self.layers: list[FusedLayer] = []
        for index, (layer, kind) in enumerate(zip(base.layers, kinds, strict=True)):
            self.layers.append(take_layer(f"layers.{index}", layer, kind, storage))
            return_memory()  # the stock layer's weights, before the next one is laid out
        self.final_norm = base.norm.weight.detach()

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Mapping[str, Tensor | None],
        cache: SlotCache | None,
        taps: tuple[int, ...],
    ) -> tuple[Tensor | None, Tensor]:
        """Pass over a batch of nodes.

        Args:
            tokens: [B, N] int64, on any device, as are the positions.
            positions: [B, N] int64.
            masks: additive attention mask of each kind of layer; see `attention.attend`.
            cache: takes the nodes' keys (its pass has begun); None attends within the nodes.
            taps: indices into the hidden states.

        Returns:
            Features [B, N, K*D] or None, and the last hidden state [B, N, D].
        """
        device = self._embedding.device
        angles = self._rotary.at(positions, device)
        return self.through(tokens.to(device), angles, masks, cache, taps)

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [P, C] of at least the first `length` positions."""
        return self._rotary.upto(length)

    def through(
        self,
        tokens: Tensor,
        angles: tuple[Tensor, Tensor],
        masks: Mapping[str, Tensor | None],
        cache: KeyStore | None,
        taps: tuple[int, ...],
    ) -> tuple[Tensor | None, Tensor]:
        """`run` with everything on the device: nothing in it waits for the CPU.

        Args:
            tokens: [B, N] int64.
            angles: cosines and signed sines [B, N, 1, C] of the nodes' positions.
            masks: as for `run`.
            cache: as for `run`.
            taps: as for `run`.
        """
        x = F.embedding(tokens, self._embedding)
        tapped = {}
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped[index] = x
            x = self._attend(layer, index, x, angles, masks[layer.kind], cache)
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = layer.down(F.silu(gate).mul_(up), x)
        last_hidden = tapped[len(self.layers)] = self._norm(x, self.final_norm)
        features = torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else None
        return features, last_hidden

    def weights(self, index: int) -> dict[str, Tensor]:
        """A layer's weights by their Hugging Face names, split again."""
        layer, head = self.layers[index], self._size
        q, k, v = layer.qkv.weight.split(
            [self._num_heads * head, self._num_kv_heads * head, self._num_kv_heads * head]
        )
        gate, up = layer.gate_up.weight.chunk(2)
        found = {
            "input_layernorm": layer.attention_norm,
            "post_attention_layernorm": layer.mlp_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.output.weight,
            "self_attn.q_norm": layer.query_norm,
            "self_attn.k_norm": layer.key_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight,
        }
        return {f"{name}.weight": w for name, w in found.items() if w is not None}

    def _attend(
        self,
        layer: FusedLayer,
        index: int,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: KeyStore | None,
    ) -> Tensor:
        """[B, N, D] the stream after one layer's attention."""
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qkv = layer.qkv(self._norm(x, layer.attention_norm))
        qkv = qkv.unflatten(-1, (heads + 2 * kv_heads, self._size))  # [B, N, H, C]
        turned, values = qkv[:, :, : heads + kv_heads], qkv[:, :, heads + kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            q = self._norm(turned[:, :, :heads], layer.query_norm)
            turned = torch.cat([q, self._norm(turned[:, :, heads:], layer.key_norm)], dim=2)
        turned = _turn(turned, *angles).transpose(1, 2)  # [B, H, N, C]
        keys, values = turned[:, heads:], values.transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(keys, values, index)
        out, _ = attend(None, turned[:, :heads], keys, values, mask)
        return layer.output(out.flatten(2), x)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm in float32, as the stock models have it whatever their number type."""
        if x.dtype == torch.float64:
            return weight * F.rms_norm(x.float(), weight.shape, eps=self._eps).double()
        return F.rms_norm(x, weight.shape, weight, self._eps)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: [B, N, H, C] by cos and signed sin [B, N, 1, C]."""
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)  # halves exchanged
    return torch.addcmul(x * cos, swapped, sin)


def take_layer(name: str, layer: Any, kind: str, storage: Storage) -> FusedLayer:
    """Move one stock layer's weights into a fused one."""

    def take(*linears: str, is_gated: bool = False) -> Product:
        named = {f"{name}.{linear}": layer.get_submodule(linear) for linear in linears}
        return _take(named, storage, is_gated=is_gated)

    query_norm = getattr(layer.self_attn, "q_norm", None)
    key_norm = getattr(layer.self_attn, "k_norm", None)
    return FusedLayer(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=take("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        query_norm=None if query_norm is None else query_norm.weight.detach(),
        key_norm=None if key_norm is None else key_norm.weight.detach(),
        output=take("self_attn.o_proj"),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=take("mlp.gate_proj", "mlp.up_proj", is_gated=True),
        down=take("mlp.down_proj"),
        kind=kind,
    )


def _take(linears: dict[str, nn.Linear], storage: Storage, *, is_gated: bool) -> Product:
    """One product of several linear layers side by side, whose weights are freed."""
    weights = {name: linear.weight.detach() for name, linear in linears.items()}
    bias = None
    if any(linear.bias is not None for linear in linears.values()):
        bias = torch.cat(
            [
                linear.weight.new_zeros(linear.out_features)
                if linear.bias is None
                else linear.bias.detach()
                for linear in linears.values()
            ]
        )
    product = storage(weights, bias, is_gated=is_gated)
    for linear in linears.values():
        linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
    return product
