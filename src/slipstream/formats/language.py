"""Our own folder of a small draft language model (`models.language`).

config.json says `"model_type": "slipstream-language"`; model.safetensors holds `layers.*`, `norm`,
`lm_head` and the maps `d2t` and `t2d` of EAGLE-3 files. The embedding is the target's and is not
stored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from slipstream.formats import folder as files
from slipstream.formats.checkpoint import TargetFacts
from slipstream.models.language import Language, LanguageConfig
from slipstream.models.vocabulary import DraftVocabulary

MODEL_TYPE = "slipstream-language"


@dataclass(frozen=True, slots=True)
class LanguageCheckpoint:
    """A drafter as stored: the network and what its ids mean."""

    model: Language
    vocabulary: DraftVocabulary


class _File(BaseModel):
    """config.json."""

    model_config = ConfigDict(extra="ignore")

    model_type: Literal["slipstream-language"]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int


def is_ours(folder: Path) -> bool:
    """True for a folder of this layout, judged by its config alone."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE


def read(
    folder: Path, *, target_layers: int | None = None, target: TargetFacts | None = None
) -> LanguageCheckpoint:
    """Read a folder; every tensor must be known, present and of the size config.json says.

    Args:
        folder: holds config.json and model.safetensors.
        target_layers: not needed by this layout.
        target: not needed by this layout.

    Raises:
        CheckpointError: missing or truncated files, unknown or missing tensors, sizes that
            disagree.
    """
    folder = Path(folder)
    stored, tensors = files.read_config(folder, _File), files.read_tensors(folder)
    config = LanguageConfig(
        hidden_size=stored.hidden_size,
        intermediate_size=stored.intermediate_size,
        num_layers=stored.num_hidden_layers,
        num_heads=stored.num_attention_heads,
        num_kv_heads=stored.num_key_value_heads,
        head_size=stored.head_dim,
        vocab_size=stored.vocab_size,
        draft_vocab_size=stored.draft_vocab_size,
        rms_norm_eps=stored.rms_norm_eps,
        rope_theta=stored.rope_theta,
        rope_scaling=stored.rope_scaling,
        max_length=stored.max_position_embeddings,
    )
    vocabulary = files.take_vocabulary(
        tensors, folder, vocab_size=config.vocab_size, draft_vocab_size=config.draft_vocab_size
    )
    model = Language(config)
    files.fill(model, tensors, folder)
    return LanguageCheckpoint(model.eval(), vocabulary)


def write(
    checkpoint: LanguageCheckpoint,
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
    config = checkpoint.model.config
    stored = _File(
        model_type=MODEL_TYPE,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        max_position_embeddings=config.max_length,
    )
    tensors = files.to_tensors(checkpoint.model, checkpoint.vocabulary, dtype)
    files.write(folder, tensors, stored.model_dump(), card=card, overwrite=overwrite)


def check_target(
    config: LanguageConfig, *, vocab_size: int, hidden_size: int, num_layers: int, name: str
) -> None:
    """Refuse a drafter made for another target, whose embedding it borrows.

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
    files.check_facts(facts, name=name, method="chain")
