"""Checkpoints of EAGLE-1, EAGLE-2 and HASS: the layout of SafeAILab/EAGLE's first generation.

Paper: Li et al. 2024, EAGLE, arXiv:2401.15077; layout: SafeAILab/EAGLE `cnets1.py`.
Differs: the target's embedding is read from the target, so our own files do not repeat it; files
with `d2t` and `t2d` read only some rows of the target's head, which makes drafting cheaper: q is
then the softmax over these ids, and every other id has q = 0.

One file serves all three methods, which differ in how the network was trained and which trees it
drafts, not in what it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from slipstream.errors import CheckpointError
from slipstream.formats import folder as folders
from slipstream.models.eagle import Eagle, EagleConfig
from slipstream.models.vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    """A drafter as stored: the network and the ids it drafts."""

    model: Eagle
    vocabulary: DraftVocabulary


class _File(BaseModel):
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
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048


def read(folder: Path, *, target_layers: int | None = None) -> EagleCheckpoint:
    """Read a folder; every tensor must be known, present and of the size config.json says.

    Args:
        folder: holds config.json and model.safetensors.
        target_layers: not needed; the feature is always the input of the target's head.

    Raises:
        CheckpointError: missing or truncated files, unknown or missing tensors, sizes that
            disagree.
    """
    folder = Path(folder)
    stored = folders.read_config(folder, _File)
    tensors = {
        name.removeprefix("model."): tensor for name, tensor in folders.read_tensors(folder).items()
    }
    if "layers.0.self_attn.q_proj.weight" not in tensors or "norm.weight" in tensors:
        raise CheckpointError(
            f"{folder} is no EAGLE-1 drafter, expected layers.0.* and no final norm",
            hint="`slipstream zoo` lists drafters that ship; `slipstream train` makes one",
        )
    if stored.num_hidden_layers != 1:
        raise CheckpointError(f"{folder} has {stored.num_hidden_layers} draft layers, expected 1")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors.pop(name, None)  # the target's own are used
    heads = stored.num_attention_heads
    size = stored.draft_vocab_size or stored.vocab_size
    vocabulary = folders.take_vocabulary(
        tensors, folder, vocab_size=stored.vocab_size, draft_vocab_size=size
    )
    model = Eagle(
        EagleConfig(
            hidden_size=stored.hidden_size,
            intermediate_size=stored.intermediate_size,
            num_heads=heads,
            num_kv_heads=stored.num_key_value_heads or heads,
            head_size=stored.head_dim or stored.hidden_size // heads,
            vocab_size=stored.vocab_size,
            draft_vocab_size=len(vocabulary),
            rms_norm_eps=stored.rms_norm_eps,
            rope_theta=stored.rope_theta or 10000.0,
            rope_scaling=stored.rope_scaling,
            max_length=stored.max_position_embeddings,
            bias="fc.bias" in tensors,
            qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
        )
    )
    folders.fill(model, tensors, folder)
    return EagleCheckpoint(model.eval(), vocabulary)


def write(
    checkpoint: EagleCheckpoint,
    folder: Path,
    *,
    card: dict[str, Any] | None = None,
    overwrite: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json, model.safetensors and card.json; the folder appears whole or not.

    Raises:
        OutputError: the folder exists and `overwrite` is off, or cannot be written.
    """
    tensors = folders.to_tensors(checkpoint.model, checkpoint.vocabulary, dtype)
    config = checkpoint.model.config
    stored = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_length,
        "bias": config.bias,
        "qkv_bias": config.qkv_bias,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "slipstream": {"method": "eagle"},
    }
    folders.write(folder, tensors, stored, card=card, overwrite=overwrite)


def check_target(
    config: EagleConfig, *, vocab_size: int, hidden_size: int, num_layers: int, name: str
) -> None:
    """Refuse a drafter made for another target.

    Args:
        config: the drafter's.
        vocab_size: rows of the target's embedding.
        hidden_size: D of the target.
        num_layers: L of the target; any will do.
        name: the target's name, for the message.

    Raises:
        DrafterMismatchError: vocabulary or hidden size differ.
    """
    facts = (
        ("vocabulary", config.vocab_size, vocab_size),
        ("hidden size", config.hidden_size, hidden_size),
    )
    folders.check_facts(facts, name=name, method="eagle")
