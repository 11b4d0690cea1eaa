"""EAGLE-1's draft network, also EAGLE-2's and HASS's: a feature and the next token to a feature.

Paper: Li et al. 2024, EAGLE, arXiv:2401.15077, section 4.1.
Differs: attention is the caller's (`attend`), so one network serves drafting and every training
that simulates it.
Also: SafeAILab/EAGLE `cnets1.py` fixes the parameter names used here.

Pair i joins the feature of position i (the input of the target's head, after its final norm) with
the *next* token x[i+1] and predicts the feature of position i+1; the target's own frozen head
reads x[i+2] from that. There is neither a norm before attention nor one at the end: what goes in
and what comes out are features. The rotary position of pair i is i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.errors import CheckpointError
from slipstream.models.blocks import Attend, GatedMLP, Projections, RMSNorm, inverse_frequencies


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Shape of the network.

    Args:
        hidden_size: D, the target's.
        intermediate_size: width of the MLP.
        num_heads: H.
        num_kv_heads: key and value heads, a divisor of H.
        head_size: C.
        vocab_size: V of the target.
        draft_vocab_size: U, rows of the target's head that are read.
        rms_norm_eps: epsilon of the norm.
        rope_theta: RoPE base the network was trained with.
        rope_scaling: None, or as in Hugging Face configs.
        max_length: positions seen in training; informative, nothing is clamped to it.
        bias: of the layer that joins feature and embedding.
        qkv_bias: of queries, keys and values, as Qwen2's.

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
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    max_length: int = 2048
    bias: bool = True
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} heads do not divide into {self.num_kv_heads} key-value heads"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise CheckpointError(
                f"draft vocabulary {self.draft_vocab_size} is larger than the target's "
                f"{self.vocab_size}"
            )


class EagleLayer(nn.Module):
    """A decoder layer without a norm before attention; the names are the checkpoint's."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.self_attn = Projections(
            d,
            d,
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            bias=config.qkv_bias,
            scaling=config.rope_scaling,
        )
        self.mlp = GatedMLP(d, config.intermediate_size)
        self.post_attention_layernorm = RMSNorm(d, config.rms_norm_eps)


class Eagle(nn.Module):
    """The network: `step` turns features into the features one position later."""

    frequencies: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([EagleLayer(config)])
        frequencies = inverse_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """[..., D] as it is: a predicted feature is fed back like a real one."""
        return features

    def step(self, states: Tensor, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Features of the next positions.

        Args:
            states: [B, N, D], features, the target's or predicted ones.
            embedded: [B, N, D], embeddings of the next tokens.
            positions: [B, N] int64, rotary positions.
            attend: which keys each query sees.

        Returns:
            [B, N, D], predicted features: input of the target's head and of the next step.
        """
        layer = self.layers[0]
        joined = self.fc(torch.cat([embedded, states], dim=-1))
        joined = joined + layer.self_attn(joined, positions, self.frequencies, attend)
        return joined + layer.mlp(layer.post_attention_layernorm(joined))
