"""EAGLE-3's draft network: fused target features in, logits of a reduced vocabulary out.

Paper: Li et al. 2025, EAGLE-3, arXiv:2503.01840, sections 3.1 and 3.2.
Differs: attention is the caller's (`attend`), so one network serves drafting and the
training-time test; the number of taps is free (the paper has three).
Also: SafeAILab/EAGLE `cnets.py` fixes the parameter names used here.

Pair i joins the features of position i with the *next* token x[i+1] and predicts x[i+2]; its
rotary position is i. A recurrent step feeds the state of the step before instead of fused
features, at the next position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.errors import CheckpointError
from slipstream.models.blocks import Attend, GatedMLP, Projections, RMSNorm, inverse_frequencies


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Shape of the network.

    Args:
        hidden_size: D of the draft network; without an embedding of its own, the target's.
        intermediate_size: width of the MLP.
        num_heads: H.
        num_kv_heads: key and value heads, a divisor of H.
        head_size: C; not derived, because targets exist where it is not D/H.
        vocab_size: V of the target.
        draft_vocab_size: U.
        taps: indices into the target's hidden states, low to high.
        target_hidden_size: D of the target.
        rms_norm_eps: epsilon of all norms.
        rope_theta: RoPE base the network was trained with.
        rope_scaling: None, or as in Hugging Face configs.
        max_length: positions seen in training; informative, nothing is clamped to it.
        fusion_bias: of the layer that fuses the taps.
        attention_bias: of queries, keys and values.
        output_bias: of the way back from attention.
        norm_features: one norm over all taps before they are fused (`norm_before_fc`).
        norm_each_tap: a norm for each tap before they are fused (EAGLE-3.1's `fc_norm`).
        norm_before_residual: what attention is added to has passed its norm already.
        norm_output: states are handed on after the final norm (EAGLE-3.1).
        has_embedding: it has an embedding of its own, as drafters narrower than their target do.

    Raises:
        CheckpointError: sizes that cannot belong together.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    target_hidden_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    max_length: int = 2048
    fusion_bias: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    norm_features: bool = False
    norm_each_tap: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    has_embedding: bool = False

    def __post_init__(self) -> None:
        if self.norm_features and self.norm_each_tap:
            raise CheckpointError("taps are normed one by one or all together, not both")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} heads do not divide into {self.num_kv_heads} key-value heads"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise CheckpointError(
                f"draft vocabulary {self.draft_vocab_size} is larger than the target's "
                f"{self.vocab_size}"
            )


class _Layer(nn.Module):
    """The single decoder layer ("midlayer")."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Projections(
            2 * d,
            d,
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            bias=config.attention_bias,
            output_bias=config.output_bias,
            scaling=config.rope_scaling,
        )
        self.mlp = GatedMLP(d, config.intermediate_size)
        self.hidden_norm = RMSNorm(d, eps)
        self.input_layernorm = RMSNorm(d, eps)
        self.post_attention_layernorm = RMSNorm(d, eps)


class Eagle3(nn.Module):
    """The network. `fuse`, then `step` any number of times, then `logits`."""

    frequencies: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        width, eps = len(config.taps) * config.target_hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(width, eps) if config.norm_features else None
        self.fc_norm: nn.ModuleList | None = None
        if config.norm_each_tap:
            size = config.target_hidden_size
            self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in config.taps)
        self.fc = nn.Linear(width, config.hidden_size, bias=config.fusion_bias)
        self.midlayer = _Layer(config)
        self.norm = RMSNorm(config.hidden_size, eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.embed_tokens: nn.Embedding | None = None
        if config.has_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        frequencies = inverse_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """[..., K*D] features of the target to [..., D]; never applied to recurrent states."""
        return self.fc(self.normed(features))

    def normed(self, features: Tensor) -> Tensor:
        """[..., K*D] what the fusion reads of the features."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            each = features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(x) for norm, x in zip(self.fc_norm, each, strict=True)]
            features = torch.cat(normed, dim=-1)
        return features

    def step(self, states: Tensor, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass of the layer.

        Args:
            states: [B, N, D], fused features or the states of the step before.
            embedded: [B, N, D], embeddings of the next tokens.
            positions: [B, N] int64, rotary positions.
            attend: which keys each query sees.

        Returns:
            [B, N, D], the new states: input of `logits` and of the next step.
        """
        states = self.through(states, embedded, positions, attend)
        return self.norm(states) if self.config.norm_output else states

    def through(
        self, states: Tensor, embedded: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """[B, N, D] what leaves the layer, before any norm; see `step`."""
        layer, normed = self.midlayer, self.midlayer.hidden_norm(states)
        both = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)  # [B, N, 2*D]
        states = normed if self.config.norm_before_residual else states
        states = states + layer.self_attn(both, positions, self.frequencies, attend)
        return states + layer.mlp(layer.post_attention_layernorm(states))

    def logits(self, states: Tensor) -> Tensor:
        """[..., U] logits over the draft vocabulary of [..., D] states."""
        return self.lm_head(self.read(states))

    def read(self, states: Tensor) -> Tensor:
        """[..., D] what the head reads of [..., D] states."""
        return states if self.config.norm_output else self.norm(states)


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The paper's low, middle and high taps for a target of L layers: 2, L//2, L-3.

    Example:
        >>> default_taps(30)
        (2, 15, 27)
    """
    if num_layers >= 6:
        return (2, num_layers // 2, num_layers - 3)
    return (1, max(1, num_layers // 2), num_layers - 1) if num_layers > 1 else (0, 0, 1)
