"""A small draft language model on disk: our folder, or a whole Llama for other engines.

Ours: config.json says `"model_type": "slipstream-language"`; model.safetensors holds `layers.*`,
`norm`, `lm_head` and the maps `d2t` and `t2d` of EAGLE-3 files. The embedding is the target's and
is not stored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from slipstream.formats import detect
from slipstream.formats import folder as files
from slipstream.formats.checkpoint import LanguageCheckpoint as LanguageCheckpoint
from slipstream.formats.checkpoint import TargetFacts
from slipstream.formats.dialects import slipstream
from slipstream.models.language import LanguageConfig


def is_ours(folder: Path) -> bool:
    """True for a small network of ours, also as a whole model, judged by its config alone."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    own = config.get("slipstream") or {}
    return config.get("model_type") == slipstream.LANGUAGE_TYPE or own.get("method") == "chain"


def read(
    folder: Path, *, target_layers: int | None = None, target: TargetFacts | None = None
) -> LanguageCheckpoint:
    """Read a folder; every tensor must be known, present and of the size config.json says.

    Args:
        folder: holds config.json and model.safetensors.
        target_layers: not needed by these layouts.
        target: more about the target, so that copies of its weights are compared.

    Raises:
        CheckpointError: missing or truncated files, unknown or missing tensors, sizes that
            disagree.
    """
    if target is None and target_layers is not None:
        target = TargetFacts("", target_layers)
    return detect.read(Path(folder), ("chain",), target=target)


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
    files.write_own(slipstream.CHAIN, checkpoint, folder, card, overwrite, dtype)


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
