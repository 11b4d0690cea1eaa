"""SpecForge's folders, which SGLang serves: EAGLE-3, and EAGLE-1 under SGLang's class name.

`eagle_aux_hidden_state_layer_ids` are outputs of layers here, so tap = id + 1: SGLang adds one to
them, vLLM does not. Unknown tensors are skipped by SGLang without a word.
"""

from __future__ import annotations

import torch

from slipstream.formats.checkpoint import Eagle3Checkpoint, EagleCheckpoint, Files, TargetFacts
from slipstream.formats.dialect import Dialect
from slipstream.formats.dialects import eagle3_layer, eagle_layer

ARCHITECTURE = "LlamaForCausalLMEagle3"
IDS = "eagle_aux_hidden_state_layer_ids"


def claim_eagle3(files: Files) -> str | None:
    """By its class name, where taps are named too."""
    if ARCHITECTURE in (files.config.get("architectures") or ()) and files.config.get(
        "eagle_config"
    ):
        return f"architecture {ARCHITECTURE} with an eagle_config (its ids are layer outputs)"
    return None


def load_eagle3(files: Files, target: TargetFacts | None) -> Eagle3Checkpoint:
    """Layer outputs to taps; see `eagle3_layer.load`."""
    ids = files.config["eagle_config"].get(IDS)
    taps = None if ids is None else tuple(layer + 1 for layer in ids)
    return eagle3_layer.load(files, target, taps=taps)


def dump_eagle3(checkpoint: Eagle3Checkpoint, _target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files with ids for SGLang."""
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
    names = {"LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle"}
    found = names & set(files.config.get("architectures") or ())
    if found and eagle_layer.is_eagle(files.tensors):
        return f"architecture {found.pop()}"
    return None


def load_eagle(files: Files, target: TargetFacts | None) -> EagleCheckpoint:
    """See `eagle_layer.load`."""
    return eagle_layer.load(files, target)


def dump_eagle(checkpoint: EagleCheckpoint, _target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files without copies: SGLang shares the target's embedding and head."""
    name = "Qwen2ForCausalLMEagle" if checkpoint.model.config.qkv_bias else "LlamaForCausalLMEagle"
    config = {"architectures": [name], **eagle_layer.config_of(checkpoint, dtype)}
    return Files(config, eagle_layer.tensors_of(checkpoint, dtype))


READERS = "SpecForge, SGLang"
EAGLE3 = Dialect("specforge", "eagle3", READERS, claim_eagle3, load_eagle3, dump_eagle3)
EAGLE = Dialect("specforge", "eagle", "SGLang", claim_eagle, load_eagle, dump_eagle)
