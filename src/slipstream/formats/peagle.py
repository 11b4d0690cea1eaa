"""P-EAGLE checkpoints: any known dialect in, our own folder out.

Paper: Hui et al. 2026, P-EAGLE, arXiv:2602.01469. Our own layout is that of EAGLE-3's files with
`layers.1.*` and so on, `embed_tokens`, `mask_hidden` and the config's `mask_token_id`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream.formats import detect
from slipstream.formats import folder as files
from slipstream.formats.checkpoint import PEagleCheckpoint as PEagleCheckpoint
from slipstream.formats.checkpoint import TargetFacts
from slipstream.formats.dialects import slipstream
from slipstream.formats.eagle3 import check_target as check_target


def read(
    folder: Path, *, target_layers: int | None = None, target: TargetFacts | None = None
) -> PEagleCheckpoint:
    """Read a folder; every tensor must be known, present and of the size config.json says.

    Args:
        folder: holds config.json and the tensors.
        target_layers: L of the target, for the default taps of files that name none.
        target: more about the target, for a head that is not stored.

    Raises:
        CheckpointError: missing or truncated files, unknown or missing tensors, sizes that
            disagree.
    """
    if target is None and target_layers is not None:
        target = TargetFacts("", target_layers)
    return detect.read(Path(folder), ("peagle",), target=target)


def write(
    checkpoint: PEagleCheckpoint,
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
    files.write_own(slipstream.PEAGLE, checkpoint, folder, card, overwrite, dtype)
