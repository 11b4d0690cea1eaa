"""DFlash checkpoints, with or without a path head: any known dialect in, our own folder out.

Paper: Chen et al. 2026, DFlash, arXiv:2602.06036. Our own layout is that of z-lab/dflash.
Differs: our files also carry `slipstream.taps`, `d2t` and `t2d` where the head is restricted to a
draft vocabulary, and `path.*` where there is a path head, which other engines do not know.
Embedding and head are the target's and never stored; copies of them in files are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream.formats import detect
from slipstream.formats import folder as files
from slipstream.formats.checkpoint import DFlashCheckpoint as DFlashCheckpoint
from slipstream.formats.checkpoint import TargetFacts
from slipstream.formats.dialects import slipstream
from slipstream.models.dflash import DFlashConfig


def read(
    folder: Path, *, target_layers: int | None = None, target: TargetFacts | None = None
) -> DFlashCheckpoint:
    """Read a folder; every tensor must be known, present and of the size config.json says.

    Args:
        folder: holds config.json and the tensors.
        target_layers: L of the target, to refuse taps that it does not have; None does not check.
        target: more about the target, so that copies of its weights are compared.

    Raises:
        CheckpointError: missing or truncated files, unknown or missing tensors, sizes that
            disagree.
    """
    if target is None and target_layers is not None:
        target = TargetFacts("", target_layers)
    return detect.read(Path(folder), ("dflash", "dspark"), target=target)


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
    files.write_own(slipstream.DFLASH, checkpoint, folder, card, overwrite, dtype)


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
