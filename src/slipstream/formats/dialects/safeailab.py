"""The authors' own EAGLE folders: EAGLE-1, EAGLE-2 and HASS; EAGLE-3.

EAGLE-1: the target's embedding is stored beside the layer. EAGLE-3: `midlayer.*`, the paper's taps
and no key that says so, no RoPE base unless it is other than 10,000 (a missing one means that).
"""

from __future__ import annotations

import torch

from slipstream.errors import CheckpointError
from slipstream.formats.checkpoint import Eagle3Checkpoint, EagleCheckpoint, Files, TargetFacts
from slipstream.formats.dialect import Dialect
from slipstream.formats.dialects import eagle3_layer, eagle_layer
from slipstream.formats.rope import BASE
from slipstream.models.eagle3 import default_taps

NO_PLACE = {
    "fusion_bias": "bias in the layer that fuses the taps",
    "attention_bias": "biases in attention",
    "output_bias": "bias behind attention",
    "norm_features": "norm before the taps are fused (norm_before_fc)",
    "norm_each_tap": "norm for each tap (fc_norm)",
    "norm_before_residual": "residual taken after its norm (norm_before_residual)",
    "norm_output": "norm on handed-on states (norm_output)",
}


def claim_eagle3(files: Files) -> str | None:
    """By its layer's name."""
    names = {name.removeprefix("model.") for name in files.tensors}
    for layer in ("midlayer", "layers.0"):
        if f"{layer}.hidden_norm.weight" in names:
            return f"tensors {layer}.*, one a norm of states, and config.json names no taps"
    return None


def load_eagle3(files: Files, target: TargetFacts | None) -> Eagle3Checkpoint:
    """The paper's taps; see `eagle3_layer.load`.

    Raises:
        CheckpointError: layers are named under a class that does not say how they are counted.
    """
    named = eagle3_layer.named_ids(files.config)
    if named:
        classes = ", ".join(files.config.get("architectures") or ()) or "no class"
        told = ", ".join(f"{key} {ids}" for key, ids in named.items())
        raise CheckpointError(
            f"{files.place}/config.json names the target's layers ({told}) under {classes}: "
            "engines count them from the embedding's output or from the first layer's, and only "
            "the class says how",
            'set "architectures" to Eagle3LlamaForCausalLM (vLLM\'s count) or '
            "LlamaForCausalLMEagle3 (SGLang's)",
        )
    return eagle3_layer.load(files, target, taps=None)


def dump_eagle3(checkpoint: Eagle3Checkpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files for taps that the authors' code reads.

    Raises:
        CheckpointError: other taps, or a norm or bias that the authors' layer does not have.
    """
    eagle3_layer.refuse_what_it_lacks(checkpoint, "eagle", **NO_PLACE)
    network = checkpoint.model.config
    if network.taps != default_taps(target.num_layers):
        raise CheckpointError(
            f"eagle reads the hidden states {default_taps(target.num_layers)} of a target of "
            f"{target.num_layers} layers, this drafter {network.taps}",
            "choose --to specforge, vllm or speculators, which name theirs",
        )
    config = eagle3_layer.config_of(checkpoint, dtype)
    for name in (*eagle3_layer.FLAGS, "attention_bias", "bias"):
        del config[name]
    if network.rope_theta == BASE and network.rope_scaling is None:
        del config["rope_theta"], config["rope_scaling"]
    config = {"architectures": ["LlamaForCausalLMEagle3"], **config}
    return Files(config, eagle3_layer.tensors_of(checkpoint, dtype))


def claim_eagle(files: Files) -> str | None:
    """By what its layer has and lacks."""
    if eagle_layer.is_eagle(files.tensors):
        return "tensors layers.0.* without a norm before attention, and no final norm"
    return None


def load_eagle(files: Files, target: TargetFacts | None) -> EagleCheckpoint:
    """See `eagle_layer.load`."""
    return eagle_layer.load(files, target)


def dump_eagle(checkpoint: EagleCheckpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files with the target's embedding.

    Raises:
        CheckpointError: the target's embedding is not at hand.
    """
    if target.embedding is None:
        raise CheckpointError("eagle stores the target's embedding, which was not given")
    tensors = eagle_layer.tensors_of(checkpoint, dtype)
    tensors["embed_tokens.weight"] = target.embedding.to("cpu", dtype).contiguous()
    config = {"architectures": ["LlamaForCausalLM"], **eagle_layer.config_of(checkpoint, dtype)}
    return Files(config, tensors)


EAGLE3 = Dialect(
    "eagle", "eagle3", "SafeAILab/EAGLE, OpenVINO", claim_eagle3, load_eagle3, dump_eagle3
)
EAGLE = Dialect("eagle", "eagle", "SafeAILab/EAGLE, HASS", claim_eagle, load_eagle, dump_eagle)
