"""What all dialects of P-EAGLE share: EAGLE-3's tensors, more layers, and what slots read.

Paper: Hui et al. 2026, P-EAGLE, arXiv:2602.01469; names: vllm-project/speculators. The embedding is
trained, so one that is stored is the drafter's own. Further layers are `layers.1`, `layers.2`, ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slipstream.errors import CheckpointError
from slipstream.formats.checkpoint import Files, PEagleCheckpoint, TargetFacts
from slipstream.formats.dialects import eagle3_layer
from slipstream.formats.dialects.eagle3_layer import EMBEDDING
from slipstream.models.peagle import PEagle, PEagleConfig

HIDDEN = "mask_hidden"
TOKEN = "mask_token_id"


def load(
    files: Files,
    target: TargetFacts | None,
    *,
    taps: Sequence[int] | None,
    mask_token: int | None,
    config: Mapping[str, Any] | None = None,
) -> PEagleCheckpoint:
    """A checkpoint of files in any spelling.

    Args:
        files: of the folder.
        target: facts about the target, for taps that are not named and a head that is not stored.
        taps: indices into the hidden states; None for the paper's.
        mask_token: id that stands for a token to be drafted.
        config: describes the layers; None takes config.json itself.

    Raises:
        CheckpointError: unknown or missing tensors, sizes that disagree, no mask token, or
            something that only the target knows and that is not at hand.
    """
    if mask_token is None:
        raise CheckpointError(
            f"{files.place}/config.json says no {TOKEN}, expected the id that stands for a token "
            "to be drafted",
            "take it from the config that the drafter was trained with",
        )
    tensors = eagle3_layer.layer_tensors(files)
    said = eagle3_layer.fields_of(files, tensors, target, taps=taps, config=config)
    network = PEagleConfig(
        **said,
        has_embedding=EMBEDDING in tensors,
        num_layers=eagle3_layer.num_layers(tensors),
        mask_token=mask_token,
    )
    if HIDDEN in tensors:
        tensors[HIDDEN] = tensors[HIDDEN].reshape(1, 1, -1)  # some files leave a dimension out
    model = PEagle(network)
    return PEagleCheckpoint(model, eagle3_layer.fill(model, tensors, target, files.place))


def config_of(checkpoint: PEagleCheckpoint, dtype: torch.dtype) -> dict[str, Any]:
    """What every dialect's config.json says of the layers, flags and mask token included."""
    said = eagle3_layer.config_of(checkpoint, dtype)
    return {**said, TOKEN: checkpoint.model.config.mask_token}
