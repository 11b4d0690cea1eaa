"""DFlash checkpoints: the layout of z-lab/dflash, with what our own files add to it.

Paper: Chen et al. 2026, DFlash, arXiv:2602.06036; layout: z-lab/Qwen3-8B-DFlash-b16. DSpark's
read-out, arXiv:2607.05147, is the flag `shift_label` as in SpecForge.
Differs: `target_layer_ids` are outputs of layers, our taps are hidden states, so tap = id + 1; our
own files also carry `slipstream.taps`, and `d2t` and `t2d` where the head is restricted to a
draft vocabulary and `path.*` where there is a path head, which other engines do not know.
Embedding and head are the target's and never stored; copies of them in files are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from slipstream.errors import CheckpointError
from slipstream.formats import folder as files
from slipstream.models.dflash import DFlash, DFlashConfig
from slipstream.models.vocabulary import DraftVocabulary

BORROWED = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class DFlashCheckpoint:
    """A drafter as stored: the network and what its ids mean."""

    model: DFlash
    vocabulary: DraftVocabulary


class _Block(BaseModel):
    """`dflash_config`."""

    model_config = ConfigDict(extra="allow")

    mask_token_id: int
    target_layer_ids: list[int]
    block_size: int | None = None
    shift_label: bool = False
    causal: bool = False
    causal_head: bool = False


class _File(BaseModel):
    """The keys of config.json we rely on; others are other engines' business."""

    model_config = ConfigDict(extra="allow")

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_hidden_layers: int
    vocab_size: int
    draft_vocab_size: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    use_sliding_window: bool = False
    block_size: int | None = None
    dflash_config: _Block
    slipstream: dict[str, Any] | None = None


def read(folder: Path, *, target_layers: int | None = None) -> DFlashCheckpoint:
    """Read a folder; every tensor must be known, present and of the size config.json says.

    Args:
        folder: holds config.json and model.safetensors.
        target_layers: L of the target, to refuse taps that it does not have; None does not check.

    Raises:
        CheckpointError: missing or truncated files, unknown or missing tensors, sizes that
            disagree, or a variant that is not DFlash.
    """
    folder = Path(folder)
    stored = files.read_config(folder, _File)
    tensors = {key.removeprefix("model."): t for key, t in files.read_tensors(folder).items()}
    if "hidden_norm.weight" not in tensors:
        raise CheckpointError(
            f"{folder} has no hidden_norm.weight, so it is no DFlash drafter",
            hint="`slipstream zoo` lists drafters that ship; `slipstream train` makes one",
        )
    config = _network_config(stored, folder)
    if target_layers is not None and max(config.taps) > target_layers:
        raise CheckpointError(
            f"{folder} reads hidden state {max(config.taps)}, the target has {target_layers} layers"
        )
    vocabulary = files.take_vocabulary(
        tensors, folder, vocab_size=config.vocab_size, draft_vocab_size=config.draft_vocab_size
    )
    for name in BORROWED:
        tensors.pop(name, None)
    model = DFlash(config)
    files.fill(model, tensors, folder)
    return DFlashCheckpoint(model.eval(), vocabulary)


def write(
    checkpoint: DFlashCheckpoint,
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
    config: DFlashConfig, *, vocab_size: int, hidden_size: int, num_layers: int, name: str
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
            ("embedding of width", config.hidden_size, hidden_size),
            ("at least as many layers as", max(config.taps), min(max(config.taps), num_layers)),
        ),
        name=name,
        method="dflash",
    )


def _network_config(stored: _File, folder: Path) -> DFlashConfig:
    block = stored.dflash_config
    for wanted, what in (
        (block.causal or block.causal_head, "causal attention in the block"),
        (stored.attention_bias, "biases in attention"),
        (stored.use_sliding_window, "a sliding window"),
    ):
        if wanted:
            raise CheckpointError(
                f"{folder} has {what}, which this drafter does not draft with",
                hint="take a checkpoint with bidirectional attention over the whole context",
            )
    width = stored.block_size or block.block_size
    if width is None:
        raise CheckpointError(f"{folder}/config.json says no block_size, expected the block width")
    own = stored.slipstream or {}
    heads, rope = stored.num_attention_heads, stored.rope_parameters or {}
    is_scaled = rope.get("rope_type", "default") != "default"
    return DFlashConfig(
        hidden_size=stored.hidden_size,
        intermediate_size=stored.intermediate_size,
        num_heads=heads,
        num_kv_heads=stored.num_key_value_heads or heads,
        head_size=stored.head_dim or stored.hidden_size // heads,
        num_layers=stored.num_hidden_layers,
        vocab_size=stored.vocab_size,
        draft_vocab_size=stored.draft_vocab_size or stored.vocab_size,
        taps=tuple(own.get("taps") or (i + 1 for i in block.target_layer_ids)),
        target_hidden_size=own.get("target_hidden_size", stored.hidden_size),
        width=width,
        mask_token=block.mask_token_id,
        is_shifted=block.shift_label,
        rms_norm_eps=stored.rms_norm_eps,
        rope_theta=stored.rope_theta or rope.get("rope_theta") or 10000.0,
        rope_scaling=stored.rope_scaling or (rope if is_scaled else None),
        max_length=stored.max_position_embeddings,
        path_rank=own.get("path_rank", 0),
    )


def _file_config(config: DFlashConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "num_hidden_layers": config.num_layers,
        "layer_types": ["full_attention"] * config.num_layers,
        "attention_bias": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "block_size": config.width,
        "dflash_config": {
            "mask_token_id": config.mask_token,
            "target_layer_ids": [tap - 1 for tap in config.taps],
            "shift_label": config.is_shifted,
        },
        "slipstream": {
            "method": "dflash",
            "taps": list(config.taps),
            "target_hidden_size": config.target_hidden_size,
            "path_rank": config.path_rank,
        },
    }
