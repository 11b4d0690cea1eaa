"""AngelSlim's EAGLE-3 folders: the official tensors under vLLM's class name, the paper's taps.

Its configs carry the target's RoPE base although some were trained with 10,000 (measured by
others: accepted length 2.39 becomes 2.50 for Qwen3-4B); `convert` says so when real features do.
"""

from __future__ import annotations

import torch

from slipstream.formats.checkpoint import Eagle3Checkpoint, Files, TargetFacts
from slipstream.formats.dialect import Dialect
from slipstream.formats.dialects import eagle3_layer, safeailab

ARCHITECTURE = "Eagle3LlamaForCausalLM"


def claim(files: Files) -> str | None:
    """By its class name and the layer's."""
    names = {name.removeprefix("model.") for name in files.tensors}
    if (
        ARCHITECTURE in (files.config.get("architectures") or ())
        and "midlayer.hidden_norm.weight" in names
    ):
        return f"architecture {ARCHITECTURE} and tensors midlayer.*"
    return None


def load(files: Files, target: TargetFacts | None) -> Eagle3Checkpoint:
    """Ids, where there are any, are taps, as in vLLM, or its trainer's; see `eagle3_layer.load`."""
    taps = eagle3_layer.layer_ids(files.config, files.place)
    return eagle3_layer.load(files, target, taps=taps)


def dump(checkpoint: Eagle3Checkpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files as the authors' but for the class name and the RoPE base, which is always named."""
    made = safeailab.dump_eagle3(checkpoint, target, dtype)
    network = checkpoint.model.config
    config = {
        **made.config,
        "architectures": [ARCHITECTURE],
        "rope_theta": network.rope_theta,
        "rope_scaling": network.rope_scaling,
    }
    return Files(config, made.tensors)


EAGLE3 = Dialect("angelslim", "eagle3", "AngelSlim, vLLM", claim, load, dump)
