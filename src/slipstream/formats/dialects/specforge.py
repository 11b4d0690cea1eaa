"""SpecForge's folders, which SGLang serves: EAGLE-3, and EAGLE-1 under SGLang's class name.

`eagle_aux_hidden_state_layer_ids` are outputs of layers here, so tap = id + 1: SGLang adds one to
them, vLLM does not. SGLang skips tensors it has no parameter for, and leaves parameters without a
tensor as they were allocated, both without a word (0.5.23):

* EAGLE-3: queries, keys and values have no bias, the residual is taken before its norm, and `bias`
  in config.json means one behind attention too.
* EAGLE-1: the joining layer always has a bias, and `bias` in config.json means four in attention.
"""

from __future__ import annotations

import torch

from slipstream.formats.checkpoint import (
    Eagle3Checkpoint,
    EagleCheckpoint,
    Files,
    TargetFacts,
    without_prefix,
)
from slipstream.formats.dialect import Dialect
from slipstream.formats.dialects import eagle3_layer, eagle_layer
from slipstream.formats.dialects.eagle3_layer import IDS

ARCHITECTURE = "LlamaForCausalLMEagle3"
ARCHITECTURES = {
    False: ("LlamaForCausalLMEagle", "llama"),
    True: ("Qwen2ForCausalLMEagle", "qwen2"),
}
"""EAGLE-1's class and model type, by whether queries, keys and values have biases."""
BIAS = "fc.bias"
NO_PLACE = {
    "fusion_bias": "bias in the layer that fuses the taps without one behind attention",
    "attention_bias": "biases in attention",
    "output_bias": "bias behind attention",
    "norm_before_residual": "residual taken after its norm (norm_before_residual)",
}


def claim_eagle3(files: Files) -> str | None:
    """By its class name, where taps are named too."""
    config = files.config
    if ARCHITECTURE not in (config.get("architectures") or ()):
        return None
    if config.get("eagle_config"):
        return f"architecture {ARCHITECTURE} with an eagle_config (its ids are layer outputs)"
    return f"architecture {ARCHITECTURE} with ids at the top" if config.get(IDS) else None


def load_eagle3(files: Files, target: TargetFacts | None) -> Eagle3Checkpoint:
    """Layer outputs to taps; see `eagle3_layer.load`."""
    taps = eagle3_layer.layer_ids(files.config, files.place, offset=1)
    return eagle3_layer.load(files, target, taps=taps)


def dump_eagle3(checkpoint: Eagle3Checkpoint, _target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files with ids for SGLang.

    Raises:
        CheckpointError: SGLang's layer has no place for something.
    """
    eagle3_layer.refuse_what_it_lacks(checkpoint, "specforge", **NO_PLACE)
    config = {
        "architectures": [ARCHITECTURE],
        **eagle3_layer.config_of(checkpoint, dtype),
        "eagle_config": {
            IDS: [tap - 1 for tap in checkpoint.model.config.taps],
            "use_aux_hidden_state": True,
        },
    }
    return Files(config, eagle3_layer.tensors_of(checkpoint, dtype))


def claim_eagle(files: Files) -> str | None:
    """By SGLang's class name."""
    found = set(files.config.get("architectures") or ())
    for name, _ in ARCHITECTURES.values():
        if name in found and eagle_layer.is_eagle(files.tensors):
            return f"architecture {name}"
    return None


def load_eagle(files: Files, target: TargetFacts | None) -> EagleCheckpoint:
    """See `eagle_layer.load`; a bias of zeros is none."""
    tensors = without_prefix(files.tensors)
    if BIAS in tensors and not tensors[BIAS].any():
        del tensors[BIAS]
    return eagle_layer.load(files, target, tensors=tensors)


def dump_eagle(checkpoint: EagleCheckpoint, _target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files without copies: SGLang shares the target's embedding and head."""
    network = checkpoint.model.config
    name, kind = ARCHITECTURES[network.qkv_bias]
    config = {
        **eagle_layer.config_of(checkpoint, dtype),
        "architectures": [name],
        "model_type": kind,
        "bias": False,
    }
    tensors = eagle_layer.tensors_of(checkpoint, dtype)
    tensors.setdefault(BIAS, torch.zeros(network.hidden_size, dtype=dtype))
    return Files(config, tensors)


READERS = "SpecForge, SGLang"
EAGLE3 = Dialect("specforge", "eagle3", READERS, claim_eagle3, load_eagle3, dump_eagle3)
EAGLE = Dialect("specforge", "eagle", "SGLang", claim_eagle, load_eagle, dump_eagle)
