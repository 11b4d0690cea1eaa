"""DFlash as its authors store it, which SpecForge, SGLang, OpenVINO and llama.cpp's converter read.

`target_layer_ids` are outputs of layers in every engine, so tap = id + 1. `block_size` stands at
the top of older files and inside `dflash_config` in newer ones. There is no embedding, no head and
no vocabulary map: engines read all rows of the target's head.

Layout: z-lab/Qwen3-8B-DFlash-b16. SpecForge's `shift_label` and vLLM's `sample_from_anchor` are
DSpark's read-out; they are read and not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slipstream.errors import CheckpointError
from slipstream.formats.checkpoint import DFlashCheckpoint, Files, TargetFacts, without_prefix
from slipstream.formats.dialect import Dialect
from slipstream.formats.dialects import dflash_network

ARCHITECTURE = "DFlashDraftModel"


def claim(files: Files) -> str | None:
    """By its block of settings."""
    if files.config.get("dflash_config"):
        return "config.json has a dflash_config"
    return None


def load(files: Files, target: TargetFacts | None) -> DFlashCheckpoint:
    """A block drafter that attends both ways.

    Raises:
        CheckpointError: a relative that drafts otherwise, or files that disagree.
    """
    block = files.config["dflash_config"]
    kind = block.get("projector_type", "dflash")
    for wanted, what in (
        (block.get("causal") or block.get("causal_head"), "causal attention in the block"),
        (block.get("use_swa"), "a sliding window"),
        (block.get("attention_sink_bias"), "attention sinks"),
        (block.get("is_neox_style") is False, "interleaved RoPE"),
        (kind not in ("dflash", None), f"the head of {kind}"),
    ):
        if wanted:
            raise CheckpointError(
                f"{files.place} has {what}, which this drafter does not draft with",
                hint="take a checkpoint with bidirectional attention over the whole context",
            )
    if "target_layer_ids" not in block:
        raise CheckpointError(f"{files.place}/config.json says no dflash_config.target_layer_ids")
    return dflash_network.load(
        files,
        target,
        without_prefix(files.tensors),
        taps=tuple(layer + 1 for layer in block["target_layer_ids"]),
        width=files.config.get("block_size") or block.get("block_size"),
        mask_token=block.get("mask_token_id"),
        is_shifted=is_shifted(files.config),
    )


def is_shifted(config: Mapping[str, Any]) -> bool:
    """Whether slot j says token j+1: vLLM's key or SGLang's, in the block or above, or SpecForge's.

    Example:
        >>> is_shifted({"dflash_config": {"sample_from_anchor": True}}), is_shifted({})
        (True, False)
    """
    block = config.get("dflash_config") or {}
    keys = ("sample_from_anchor", "query_zero_predicts_next")
    said = [place[key] for place in (block, config) for key in keys if place.get(key) is not None]
    return bool(said[0] if said else block.get("shift_label"))


def dump(checkpoint: DFlashCheckpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files that the authors' code loads.

    Raises:
        CheckpointError: there is a path head, or slots say the token after their own: engines read
            `shift_label` for Domino only, and would take each draft for the token before it.
    """
    dflash_network.refuse_path(checkpoint, "dflash")
    network = checkpoint.model.config
    if network.is_shifted:
        raise CheckpointError(
            "dflash's engines read slot j as token j, and this drafter's slots say the token after "
            "their own (shifted)",
            "choose --to speculators, which says so, or train with --set is_shifted=false",
        )
    block = {
        "mask_token_id": network.mask_token,
        "target_layer_ids": [tap - 1 for tap in network.taps],
    }
    config = {
        "architectures": [ARCHITECTURE],
        **dflash_network.config_of(checkpoint, dtype),
        "num_target_layers": target.num_layers,
        "block_size": network.width,
        "dflash_config": block,
    }
    return Files(config, dflash_network.network_tensors(checkpoint, dtype))


DFLASH = Dialect("dflash", "dflash", "z-lab/dflash, SpecForge, OpenVINO", claim, load, dump)
