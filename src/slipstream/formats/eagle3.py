"""EAGLE-3 checkpoints: the layout of SafeAILab/EAGLE, which SGLang and vLLM read too.

Paper: Li et al. 2025, EAGLE-3, arXiv:2503.01840; layout: SafeAILab/EAGLE `cnets.py`.
Differs: our own files also carry `slipstream.taps`, the taps as indices into the target's hidden
states. Without it the paper's taps are assumed, and `eagle_aux_hidden_state_layer_ids` is read
as such indices (the convention of vLLM and speculators).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from slipstream.errors import CheckpointError, DrafterMismatchError
from slipstream.formats import folder as files
from slipstream.models.eagle3 import Eagle3, Eagle3Config, default_taps
from slipstream.models.vocabulary import DraftVocabulary

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
OPTIONAL = {"embed_tokens.weight"}


@dataclass(frozen=True, slots=True)
class Eagle3Checkpoint:
    """A drafter as stored: the network and what its ids mean."""

    model: Eagle3
    vocabulary: DraftVocabulary


class _File(BaseModel):
    """The keys of config.json we rely on; others are other engines' business."""

    model_config = ConfigDict(extra="allow")

    architectures: list[str] = []
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
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    target_hidden_size: int | None = None
    eagle_config: dict[str, Any] | None = None
    slipstream: dict[str, Any] | None = None


def read(folder: Path, *, target_layers: int | None = None) -> Eagle3Checkpoint:
    """Read a folder; every tensor must be known, present and of the size config.json says.

    Args:
        folder: holds config.json and model.safetensors.
        target_layers: L of the target, for the default taps of files that name none.

    Raises:
        CheckpointError: missing or truncated files, unknown or missing tensors, sizes that
            disagree.
    """
    folder = Path(folder)
    stored = files.read_config(folder, _File)
    tensors = {key.removeprefix("model."): t for key, t in files.read_tensors(folder).items()}
    tensors = {
        ("midlayer." + k.removeprefix("layers.0.") if k.startswith("layers.0.") else k): t
        for k, t in tensors.items()
    }
    if "midlayer.self_attn.q_proj.weight" not in tensors:
        raise CheckpointError(
            f"{folder} has no midlayer.* tensors, so it is no EAGLE-3 drafter",
            hint="`slipstream zoo` lists drafters that ship; `slipstream train` makes one",
        )
    config = _network_config(stored, tensors, folder, target_layers)
    vocabulary = files.take_vocabulary(
        tensors, folder, vocab_size=config.vocab_size, draft_vocab_size=config.draft_vocab_size
    )
    for name in OPTIONAL:
        tensors.pop(name, None)  # the target's own embedding is used
    model = Eagle3(config)
    files.fill(model, tensors, folder)
    return Eagle3Checkpoint(model.eval(), vocabulary)


def write(
    checkpoint: Eagle3Checkpoint,
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
    tensors = files.to_tensors(checkpoint.model, checkpoint.vocabulary, dtype)
    config = _file_config(checkpoint.model.config, dtype)
    files.write(folder, tensors, config, card=card, overwrite=overwrite)


def check_target(
    config: Eagle3Config, *, vocab_size: int, hidden_size: int, num_layers: int, name: str
) -> None:
    """Refuse a drafter made for another target.

    Args:
        config: the drafter's.
        vocab_size: rows of the target's embedding.
        hidden_size: D of the target.
        num_layers: L of the target.
        name: the target's name, for the message.

    Raises:
        DrafterMismatchError: vocabulary, hidden size or layers differ.
    """
    files.check_facts(
        (
            ("vocabulary", config.vocab_size, vocab_size),
            ("hidden size", config.target_hidden_size, hidden_size),
        ),
        name=name,
        method="eagle3",
    )
    hint = f"train one with `slipstream train --method eagle3 --model {name} ...`"
    if config.hidden_size != hidden_size:
        raise DrafterMismatchError(
            f"the drafter's hidden size {config.hidden_size} differs from the width {hidden_size} "
            f"of {name}'s embedding, which it borrows",
            hint,
        )
    if max(config.taps) > num_layers:
        raise DrafterMismatchError(
            f"the drafter reads layer {max(config.taps)}, {name} has {num_layers}", hint
        )


def _network_config(
    stored: _File, tensors: dict[str, Tensor], folder: Path, target_layers: int | None
) -> Eagle3Config:
    if stored.num_hidden_layers != 1:
        raise CheckpointError(f"{folder} has {stored.num_hidden_layers} draft layers, expected 1")
    target_hidden = stored.target_hidden_size or stored.hidden_size
    taps = (stored.slipstream or {}).get("taps")
    ids = (stored.eagle_config or {}).get("eagle_aux_hidden_state_layer_ids")
    if taps is None and ids is not None:
        taps = ids
    if taps is None:
        taps = default_taps(target_layers or 32)
    fc = tensors.get("fc.weight")
    if fc is not None and fc.shape[1] != len(taps) * target_hidden:
        raise CheckpointError(
            f"{folder}: fc.weight reads {fc.shape[1]} values, config.json says {len(taps)} taps "
            f"of {target_hidden}"
        )
    heads = stored.num_attention_heads
    rope = stored.rope_parameters or {}
    is_scaled = rope.get("rope_type", "default") != "default"
    scaling = stored.rope_scaling or (rope if is_scaled else None)
    return Eagle3Config(
        hidden_size=stored.hidden_size,
        intermediate_size=stored.intermediate_size,
        num_heads=heads,
        num_kv_heads=stored.num_key_value_heads or heads,
        head_size=stored.head_dim or stored.hidden_size // heads,
        vocab_size=stored.vocab_size,
        draft_vocab_size=stored.draft_vocab_size or stored.vocab_size,
        taps=tuple(taps),
        target_hidden_size=target_hidden,
        rms_norm_eps=stored.rms_norm_eps,
        rope_theta=stored.rope_theta or rope.get("rope_theta") or 10000.0,
        rope_scaling=scaling,
        max_length=stored.max_position_embeddings,
    )


def _file_config(config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
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
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.taps),
            "use_aux_hidden_state": True,
        },
        "slipstream": {"method": "eagle3", "taps": list(config.taps)},
    }
