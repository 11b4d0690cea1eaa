"""What a loaded model says of itself: `TargetSpec` and the sizes of its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.target.protocol import TargetSpec
from slipstream.target.support import text_config


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of a layer's keys.

    Args:
        num_layers: L.
        num_heads: key/value heads.
        head_size: C; read, never derived where the config states it.
        groups: query heads per key head.
    """

    num_layers: int
    num_heads: int
    head_size: int
    groups: int


@dataclass(frozen=True, slots=True)
class LogitRule:
    """What a model does to the head's output: `softcap * tanh(scale * x / softcap)`.

    Args:
        scale: factor on logits (Cohere, Granite).
        softcap: bound on logits (Gemma 2).
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """The model's logits from the head's, float32."""
        logits = logits.float() if logits.dtype != torch.float64 else logits
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def spec_of(model: Any, tokenizer: Any, name: str) -> TargetSpec:
    """Facts about a model; `vocab_size` counts only ids that the tokenizer knows."""
    config = text_config(model.config)
    head = model.get_output_embeddings().weight
    vocab_size = head.shape[0]
    if tokenizer is not None:
        known = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
        vocab_size = min(vocab_size, known)
    return TargetSpec(
        name=name or model.config.model_type,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        max_length=_context(config),
        eos_ids=_eos_ids(model, tokenizer, vocab_size),
        dtype=head.dtype,
        device=head.device,
        architecture=type(model).__name__,
    )


def cache_shape(config: Any) -> CacheShape:
    """Sizes from the configuration."""
    config = text_config(config)
    num_query_heads = config.num_attention_heads
    num_heads = getattr(config, "num_key_value_heads", None) or num_query_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_query_heads
    return CacheShape(config.num_hidden_layers, num_heads, head_size, num_query_heads // num_heads)


def logit_rule(config: Any) -> LogitRule:
    """Scale and cap of the logits, where the configuration has them."""
    config = text_config(config)
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    return LogitRule(scale, getattr(config, "final_logit_softcapping", None))


def _context(config: Any) -> int:
    """Tokens of context; with LongRoPE, up to where its frequencies switch."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and rope.get("original_max_position_embeddings"):
        return int(rope["original_max_position_embeddings"])
    return int(config.max_position_embeddings)


def _eos_ids(model: Any, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Ids that end an answer: generation settings (else the config's) and the tokenizer's."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = getattr(text_config(model.config), "eos_token_id", None)
    ids = set(found) if isinstance(found, list | tuple) else {found}
    if tokenizer is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(int(i) for i in ids if i is not None and 0 <= i < vocab_size))
