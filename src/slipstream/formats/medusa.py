"""Medusa heads on disk: our folder, the authors' `medusa_lm_head.pt`, vLLM's.

Ours: config.json says `"model_type": "slipstream-medusa"`; model.safetensors holds
`heads.I.R.linear.*` (block R of head I), `heads.I.B.weight` where heads have their own projection
behind their B blocks, and the maps `d2t` and `t2d` of a reduced vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream.formats import detect
from slipstream.formats import folder as files
from slipstream.formats.checkpoint import MedusaCheckpoint as MedusaCheckpoint
from slipstream.formats.checkpoint import TargetFacts
from slipstream.formats.dialects import slipstream
from slipstream.models.medusa import MedusaConfig


def read(
    folder: Path, *, target_layers: int | None = None, target: TargetFacts | None = None
) -> MedusaCheckpoint:
    """Read a folder; every tensor must be known, present and of the size config.json says.

    Args:
        folder: holds config.json and the tensors.
        target_layers: not needed by these layouts.
        target: more about the target, so that copies of its weights are compared.

    Raises:
        CheckpointError: missing or truncated files, unknown or missing tensors, sizes that
            disagree.
    """
    if target is None and target_layers is not None:
        target = TargetFacts("", target_layers)
    return detect.read(Path(folder), ("medusa",), target=target)


def write(
    checkpoint: MedusaCheckpoint,
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
    files.write_own(slipstream.MEDUSA, checkpoint, folder, card, overwrite, dtype)


def check_target(
    config: MedusaConfig, *, vocab_size: int, hidden_size: int, num_layers: int, name: str
) -> None:
    """Refuse heads made for another target.

    Args:
        config: the heads'.
        vocab_size: rows of the target's embedding.
        hidden_size: D of the target.
        num_layers: L of the target; any will do.
        name: the target's name, for the message.

    Raises:
        DrafterMismatchError: vocabulary or hidden size differ.
    """
    facts = [("hidden size", config.hidden_size, hidden_size)]
    if config.vocab_size is not None:
        facts.append(("vocabulary", config.vocab_size, vocab_size))
    files.check_facts(facts, name=name, method="medusa")
