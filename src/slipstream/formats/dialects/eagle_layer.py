"""What all dialects of EAGLE-1, EAGLE-2 and HASS share: one layer without norms around it.

Paper: Li et al. 2024, EAGLE, arXiv:2401.15077; names: SafeAILab/EAGLE `cnets1.py`. Whether a file
is of EAGLE-1, EAGLE-2 or HASS it does not say: they differ in training and trees only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.formats import folder
from slipstream.formats.checkpoint import (
    EagleCheckpoint,
    Files,
    TargetFacts,
    take_copy,
    without_prefix,
)
from slipstream.formats.sizes import read_sizes, write_sizes
from slipstream.models.eagle import Eagle, EagleConfig

QUERY = "layers.0.self_attn.q_proj.weight"


def is_eagle(tensors: Mapping[str, Tensor]) -> bool:
    """A layer without a norm before attention, and no final norm."""
    names = {name.removeprefix("model.") for name in tensors}
    return QUERY in names and not names & {"norm.weight", "layers.0.input_layernorm.weight"}


def load(
    files: Files, target: TargetFacts | None, *, tensors: Mapping[str, Tensor] | None = None
) -> EagleCheckpoint:
    """A checkpoint of files with the official names.

    Args:
        files: of the folder.
        target: facts about the target, to compare copies with.
        tensors: respelled officially; None takes those of the files.

    Raises:
        CheckpointError: unknown or missing tensors, or sizes that disagree.
    """
    place = files.place
    found = without_prefix(files.tensors if tensors is None else tensors)
    if not is_eagle(found):
        raise CheckpointError(
            f"{place} is no EAGLE-1 drafter, expected layers.0.* and no final norm",
            hint="`slipstream zoo` lists drafters that ship; `slipstream train` makes one",
        )
    if _unwrapped(files.config).get("add_para_norm"):
        raise CheckpointError(
            f"{place} norms feature and embedding before they join (add_para_norm), which this "
            "drafter does not draft with",
            "take a checkpoint without",
        )
    sizes = read_sizes(_unwrapped(files.config), place)
    if (count := sizes.pop("num_layers")) != 1:
        raise CheckpointError(f"{place} has {count} draft layers, expected 1")
    vocabulary = folder.take_vocabulary(
        found, place, vocab_size=sizes["vocab_size"], draft_vocab_size=sizes["draft_vocab_size"]
    )
    embedding, head = (None, None) if target is None else (target.embedding, target.head)
    take_copy(found, "embed_tokens.weight", embedding, rows=None, of="embedding")
    rows = None if vocabulary.is_full else vocabulary.target_ids
    take_copy(found, "lm_head.weight", head, rows=rows, of="head")
    network = EagleConfig(
        **sizes, bias="fc.bias" in found, qkv_bias=QUERY.replace("weight", "bias") in found
    )
    model = Eagle(network)
    folder.fill(model, found, place)
    return EagleCheckpoint(model.eval(), vocabulary)


def tensors_of(checkpoint: EagleCheckpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors under the official names; foreign engines read all rows of the target's head."""
    return folder.to_tensors(checkpoint.model, None, dtype)


def config_of(checkpoint: EagleCheckpoint, dtype: torch.dtype) -> dict[str, Any]:
    """What every dialect's config.json says of the layer."""
    network = checkpoint.model.config
    return {
        "model_type": "llama",
        **write_sizes(network, dtype),
        "bias": network.bias,
        "qkv_bias": network.qkv_bias,
    }


def _unwrapped(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The layer's own config, which vLLM once kept inside another, as its `model`."""
    inner = config.get("model")
    is_wrapped = config.get("model_type") == "eagle" and isinstance(inner, Mapping)
    return inner if is_wrapped else config
