"""A small draft language model: a few Llama layers between the target's embedding and own logits.

It reads tokens alone. The target's frozen embedding is borrowed and the head covers a reduced
draft vocabulary, so that nearly all of its weights do work.

Paper: Leviathan et al. 2023, arXiv:2211.17192 (any smaller model may draft); the layers are
Llama's, Touvron et al. 2023, arXiv:2302.13971.
Differs: attention is the caller's (`attend`), so one network serves drafting and training.

The state of position i has seen tokens x[0..i]; its logits are those of x[i+1].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from slipstream.errors import CheckpointError
from slipstream.models.blocks import Attend, GatedMLP, Projections, RMSNorm, inverse_frequencies


@dataclass(frozen=True, slots=True)
class LanguageConfig:
    """Shape of the network.

    Args:
        hidden_size: D, equal to the target's embedding width.
        intermediate_size: width of the MLPs.
        num_layers: decoder layers.
        num_heads: H.
        num_kv_heads: key and value heads, a divisor of H.
        head_size: C.
        vocab_size: rows of the target's embedding.
        draft_vocab_size: U.
        rms_norm_eps: epsilon of all norms.
        rope_theta: RoPE base.
        rope_scaling: None, or as in Hugging Face configs.
        max_length: positions seen in training; informative, nothing is clamped to it.

    Raises:
        CheckpointError: sizes that cannot belong together.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    max_length: int = 2048

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise CheckpointError(f"{self.num_layers} layers, expected 1 or more")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} heads do not divide into {self.num_kv_heads} key-value heads"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise CheckpointError(
                f"draft vocabulary {self.draft_vocab_size} is larger than the target's "
                f"{self.vocab_size}"
            )


class LanguageLayer(nn.Module):
    """One decoder layer; the names are Hugging Face's, so that a target's layer can be copied.

    Args:
        config: of the network; another network's with the same fields will do.
        bias: of queries, keys and values.
        output_bias: of the way back from attention.
    """

    def __init__(
        self, config: LanguageConfig, *, bias: bool = False, output_bias: bool = False
    ) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(d, eps)
        self.self_attn = Projections(
            d,
            d,
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            bias=bias,
            output_bias=output_bias,
            scaling=config.rope_scaling,
        )
        self.post_attention_layernorm = RMSNorm(d, eps)
        self.mlp = GatedMLP(d, config.intermediate_size)

    def forward(
        self, states: Tensor, positions: Tensor, frequencies: Tensor, attend: Attend
    ) -> Tensor:
        """[B, N, D] from [B, N, D]."""
        normed = self.input_layernorm(states)
        states = states + self.self_attn(normed, positions, frequencies, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


class Language(nn.Module):
    """The network: `forward` gives states, `logits` reads them."""

    frequencies: Tensor

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(LanguageLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        frequencies = inverse_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """All layers.

        Args:
            embedded: [B, N, D], the target's embeddings of the tokens.
            positions: [B, N] int64.
            attend: which keys each query sees; called once a layer, from the first to the last.

        Returns:
            [B, N, D] states.
        """
        states = embedded
        for layer in self.layers:
            states = layer(states, positions, self.frequencies, attend)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """[..., U] logits over the draft vocabulary of [..., D] states."""
        return self.lm_head(self.norm(states))
