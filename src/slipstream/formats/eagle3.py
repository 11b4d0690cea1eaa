"""EAGLE-3 checkpoints: any known dialect in, our own folder out.

Paper: Li et al. 2025, EAGLE-3, arXiv:2503.01840. Our own layout is that of SafeAILab/EAGLE and
also says which hidden states are read; see `dialects`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream.errors import DrafterMismatchError
from slipstream.formats import detect
from slipstream.formats import folder as files
from slipstream.formats.checkpoint import Eagle3Checkpoint as Eagle3Checkpoint
from slipstream.formats.checkpoint import TargetFacts
from slipstream.formats.dialects import slipstream
from slipstream.models.eagle3 import Eagle3Config


def read(
    folder: Path, *, target_layers: int | None = None, target: TargetFacts | None = None
) -> Eagle3Checkpoint:
    """Read a folder; every tensor must be known, present and of the size config.json says.

    Args:
        folder: holds config.json and the tensors.
        target_layers: L of the target, for the default taps of files that name none.
        target: more about the target, so that copies of its weights are compared.

    Raises:
        CheckpointError: missing or truncated files, unknown or missing tensors, sizes that
            disagree.
    """
    if target is None and target_layers is not None:
        target = TargetFacts("", target_layers)
    return detect.read(Path(folder), ("eagle3",), target=target)


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
    files.write_own(slipstream.EAGLE3, checkpoint, folder, card, overwrite, dtype)


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
    if config.hidden_size != hidden_size and not config.has_embedding:
        raise DrafterMismatchError(
            f"the drafter's hidden size {config.hidden_size} differs from the width {hidden_size} "
            f"of {name}'s embedding, which it borrows: it stores none of its own",
            hint,
        )
    if max(config.taps) > num_layers:
        raise DrafterMismatchError(
            f"the drafter reads layer {max(config.taps)}, {name} has {num_layers}", hint
        )
