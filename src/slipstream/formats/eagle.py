"""Checkpoints of EAGLE-1, EAGLE-2 and HASS: any known dialect in, our own folder out.

Paper: Li et al. 2024, EAGLE, arXiv:2401.15077. Our own layout is that of SafeAILab/EAGLE.
Differs: the target's embedding is read from the target, so our own files do not repeat it; files
with `d2t` and `t2d` read only some rows of the target's head, which makes drafting cheaper: q is
then the softmax over these ids, and every other id has q = 0.

One file serves all three methods, which differ in how the network was trained and which trees it
drafts, not in what it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream.formats import detect
from slipstream.formats import folder as files
from slipstream.formats.checkpoint import EagleCheckpoint as EagleCheckpoint
from slipstream.formats.checkpoint import TargetFacts
from slipstream.formats.dialects import slipstream
from slipstream.models.eagle import EagleConfig


def read(
    folder: Path, *, target_layers: int | None = None, target: TargetFacts | None = None
) -> EagleCheckpoint:
    """Read a folder; every tensor must be known, present and of the size config.json says.

    Args:
        folder: holds config.json and the tensors.
        target_layers: not needed; the feature is always the input of the target's head.
        target: more about the target, so that copies of its weights are compared.

    Raises:
        CheckpointError: missing or truncated files, unknown or missing tensors, sizes that
            disagree.
    """
    if target is None and target_layers is not None:
        target = TargetFacts("", target_layers)
    return detect.read(Path(folder), ("eagle",), target=target)


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
    files.write_own(slipstream.EAGLE, checkpoint, folder, card, overwrite, dtype)


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
    files.check_facts(facts, name=name, method="eagle")
