"""The pieces draft networks are made of: norm, rotary positions, MLP, projections of attention.

Attention itself is not here: a draft network computes queries, keys and values and leaves it to
its caller which keys a query may see, because drafting (a cache and a tree) and training (the
training-time test) differ in exactly that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [B, H, N, C], k [B, Hkv, N, C], v [B, Hkv, N, C]) to [B, H, N, C]."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), as in Llama."""

    def __init__(self, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Projections(nn.Module):
    """What surrounds attention: queries, keys and values of an input, and the way back.

    Args:
        input_size: width of what is read.
        output_size: D, width of what comes out.
        num_heads: H.
        num_kv_heads: key and value heads, a divisor of H.
        head_size: C.
        bias: of queries, keys and values.
        output_bias: of the way back.
        scaling: of RoPE; see `attention_factor`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        *,
        bias: bool = False,
        output_bias: bool = False,
        scaling: dict | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_heads, head_size
        self._factor = attention_factor(scaling)
        self.q_proj = nn.Linear(input_size, num_heads * head_size, bias=bias)
        self.k_proj = nn.Linear(input_size, num_kv_heads * head_size, bias=bias)
        self.v_proj = nn.Linear(input_size, num_kv_heads * head_size, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_size, output_size, bias=output_bias)

    def forward(self, x: Tensor, positions: Tensor, frequencies: Tensor, attend: Attend) -> Tensor:
        """[B, N, D] from [B, N, input_size], its rotary positions [B, N] and frequencies [C/2]."""
        both = torch.cat([self.q_proj(x), self.k_proj(x)], dim=-1)  # rotated in one go
        rotated = rotate(self._heads(both), positions, frequencies, self._factor)
        q, k = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        attended = attend(q, k, self._heads(self.v_proj(x))).transpose(1, 2).flatten(2)
        return self.o_proj(attended)

    def _heads(self, x: Tensor) -> Tensor:
        """[B, N, h*C] to [B, h, N, C]."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


def inverse_frequencies(head_size: int, theta: float, scaling: dict | None) -> Tensor:
    """[C/2] float32 rotary frequencies, with the scalings draft checkpoints use.

    Args:
        head_size: C.
        theta: RoPE base.
        scaling: None, or a config's `rope_scaling`: `linear` (factor), `llama3` (factor,
            low_freq_factor, high_freq_factor, original_max_position_embeddings) or `yarn` (factor,
            original_max_position_embeddings, perhaps beta_fast, beta_slow, truncate).

    Raises:
        ValueError: another scaling type.
    """
    frequencies = theta ** -(torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if scaling is None or kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "llama3":
        length = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = length * frequencies / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * frequencies / scaling["factor"] + smooth * frequencies
    if kind == "yarn":
        return _yarn(head_size, theta, scaling)
    raise ValueError(f"rope scaling '{kind}' is not one of default, linear, llama3, yarn")


def attention_factor(scaling: dict | None) -> float:
    """What cosines and sines are multiplied by: YaRN's temperature, 1 for everything else.

    Args:
        scaling: as in `inverse_frequencies`; yarn may say attention_factor, or mscale and
            mscale_all_dim.
    """
    if scaling is None or scaling.get("rope_type", scaling.get("type")) != "yarn":
        return 1.0
    said, factor = scaling.get("attention_factor"), scaling["factor"]
    if said is not None:
        return float(said)
    once, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if once and all_dim:
        return _temperature(factor, once) / _temperature(factor, all_dim)
    return _temperature(factor)


def _temperature(factor: float, scale: float = 1.0) -> float:
    """0.1 ln(factor) + 1, YaRN's."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn(size: int, theta: float, scaling: dict) -> Tensor:
    """[C/2]: fast frequencies stay, slow ones are stretched, those between are mixed.

    Paper: Peng et al. 2023, YaRN, arXiv:2309.00071, section 3.2.
    """
    length = scaling["original_max_position_embeddings"]

    def place(turns: float) -> float:
        """Index of the frequency that turns so often within the original length."""
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = place(scaling.get("beta_fast") or 32)
    high = place(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    stays = 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = theta ** (torch.arange(0, size, 2).float() / size)
    return 1.0 / (scaling["factor"] * periods) * (1 - stays) + 1.0 / periods * stays


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> Tensor:
    """Rotary positions, half-split layout (Hugging Face Llama).

    Angles are computed from the positions themselves, so there is no table to run out of.

    Args:
        x: [B, H, N, C].
        positions: [B, N] int64.
        frequencies: [C/2].
        factor: see `attention_factor`.
    """
    return turn(x, rotation(positions, frequencies, factor))


def rotation(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, 1, N, C/2] of positions [B, N]; what many layers can share."""
    angles = positions[:, None, :, None].to(torch.float32) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def turn(x: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    """[..., N, C] rotated by cosines and sines [..., N, C/2]."""
    cos, sin = by[0].to(x.dtype), by[1].to(x.dtype)
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
