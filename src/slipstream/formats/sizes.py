"""The sizes of a Llama-like draft layer, as configs name them and as our networks do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from slipstream.errors import CheckpointError
from slipstream.formats.folder import first_line
from slipstream.formats.rope import read_rope, write_rope

DEFAULT_EPS = 1e-6  # Llama's and Qwen's, where a config leaves it out


class _Sizes(BaseModel):
    """The keys of config.json we rely on; others are other engines' business."""

    model_config = ConfigDict(extra="allow")

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_hidden_layers: int = 1
    vocab_size: int
    draft_vocab_size: int | None = None
    rms_norm_eps: float = DEFAULT_EPS
    max_position_embeddings: int = 2048


def read_sizes(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Sizes of a draft layer by our networks' names, `num_layers` among them.

    Args:
        config: config.json, or the part of it that describes the layer.
        place: where it was read, for messages.

    Raises:
        CheckpointError: a key is missing or of another type, or the layer computes otherwise.
    """
    try:
        stored = _Sizes(**config)
    except (ValidationError, TypeError) as error:
        raise CheckpointError(
            f"{place}/config.json cannot be read: {first_line(error)}",
            "take the drafter from its source again",
        ) from error
    _refuse_others(config, place)
    heads = stored.num_attention_heads
    rope_theta, rope_scaling = read_rope(config, place)
    return {
        "hidden_size": stored.hidden_size,
        "intermediate_size": stored.intermediate_size,
        "num_heads": heads,
        "num_kv_heads": stored.num_key_value_heads or heads,
        "head_size": stored.head_dim or stored.hidden_size // heads,
        "num_layers": stored.num_hidden_layers,
        "vocab_size": stored.vocab_size,
        "draft_vocab_size": stored.draft_vocab_size or stored.vocab_size,
        "rms_norm_eps": stored.rms_norm_eps,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "max_length": stored.max_position_embeddings,
    }


def write_sizes(network: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The same as config.json has it.

    Args:
        network: the network's config.
        dtype: of the tensors beside it.
    """
    return {
        "hidden_act": "silu",
        "hidden_size": network.hidden_size,
        "intermediate_size": network.intermediate_size,
        "num_attention_heads": network.num_heads,
        "num_key_value_heads": network.num_kv_heads,
        "head_dim": network.head_size,
        "num_hidden_layers": getattr(network, "num_layers", 1),
        "vocab_size": network.vocab_size,
        "rms_norm_eps": network.rms_norm_eps,
        **write_rope(network.rope_theta, network.rope_scaling),
        "max_position_embeddings": network.max_length,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _refuse_others(config: Mapping[str, Any], place: str) -> None:
    """Raises CheckpointError for a layer that computes something our networks do not."""
    sliding = config.get("use_sliding_window") or "sliding_attention" in (
        config.get("layer_types") or ()
    )
    for is_there, what in (
        (config.get("hidden_act") not in (None, "silu"), f"a {config.get('hidden_act')} MLP"),
        (config.get("mlp_bias"), "biases in the MLP"),
        (sliding, "a sliding window"),
        (config.get("quantization_config"), "quantised weights"),
        (config.get("logit_scale") not in (None, 1, 1.0), "scaled logits"),
        (_turns_a_part(config), "RoPE on part of a head"),
    ):
        if is_there:
            raise CheckpointError(
                f"{place} has {what}, which this drafter does not draft with",
                "take a checkpoint without",
            )


def _turns_a_part(config: Mapping[str, Any]) -> bool:
    """Whether RoPE turns only some numbers of a head, which configs say in three places."""
    places = (config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {})
    return any(place.get("partial_rotary_factor") not in (None, 1, 1.0) for place in places)
