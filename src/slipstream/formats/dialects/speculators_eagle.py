"""speculators' older folders of EAGLE-1 and HASS, as its converter wrote them before version 0.3.

The joining layer is `fusion_fc`, the layer `transformer.*`; the sizes are in
`transformer_layer_config`. A variant with further norms (`layernorms`) is refused.
"""

from __future__ import annotations

import torch

from slipstream.errors import CheckpointError
from slipstream.formats.checkpoint import EagleCheckpoint, Files, TargetFacts, renamed
from slipstream.formats.dialect import Dialect
from slipstream.formats.dialects import eagle_layer
from slipstream.formats.dialects.speculators import VERSION

NAMES = (("fusion_fc.", "fc."), ("transformer.", "layers.0."))


def claim(files: Files) -> str | None:
    """By its model type."""
    is_one = files.config.get("speculators_model_type") == "eagle"
    return "config.json says speculators_model_type eagle" if is_one else None


def load(files: Files, target: TargetFacts | None) -> EagleCheckpoint:
    """Official names for its own; see `eagle_layer.load`.

    Raises:
        CheckpointError: the variant with further norms, or files that disagree.
    """
    if files.config.get("layernorms"):
        raise CheckpointError(
            f"{files.place} has further norms (layernorms), which this drafter does not draft with",
            "take a checkpoint without",
        )
    tensors = dict(files.tensors)
    for theirs, ours in NAMES:
        tensors = renamed(tensors, theirs, ours, place=files.place)
    layer = files.config.get("transformer_layer_config") or {}
    return eagle_layer.load(Files(layer, tensors, files.place), target)


def dump(checkpoint: EagleCheckpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files as speculators wrote them."""
    tensors = eagle_layer.tensors_of(checkpoint, dtype)
    for theirs, ours in NAMES:
        tensors = renamed(tensors, ours, theirs)
    layer = eagle_layer.config_of(checkpoint, dtype)
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "speculators_version": VERSION,
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer,
        "layernorms": False,
        "fusion_bias": checkpoint.model.config.bias,
        "speculators_config": {
            "algorithm": "eagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": target.name, "architectures": [target.architecture]},
        },
    }
    return Files(config, tensors)


EAGLE = Dialect("speculators", "eagle", "speculators before 0.3", claim, load, dump)
