"""DSpark's folders: DFlash with a shifted read-out and a head that knows the token before.

The vanilla head adds W2 W1[x] to a slot's logits: `markov_w1` [V, rank] by the token before,
`markov_w2` [U, rank] by the token after. Our own head reads both off the target's embedding and
head, so it is written as the two tables it amounts to; tables of others are read as tables.

DeepSpec keeps its settings flat and stores copies of embedding and head; SpecForge keeps them in
`dflash_config`, early files under the prefix `logit_head.`; speculators' are in `speculators.py`.
Gated and recurrent heads are refused. A confidence head says how far to draft, not what: it is
left out.

Paper: DeepSeek 2026, DSpark, arXiv:2607.05147, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.formats.checkpoint import (
    DFlashCheckpoint,
    Files,
    TargetFacts,
    renamed,
    without_prefix,
)
from slipstream.formats.dialect import Dialect
from slipstream.formats.dialects import dflash_network

BEFORE, AFTER = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


def take_path(files: Files, settings: Mapping[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Tensors with the path head under our names, and its rank.

    Args:
        files: of the folder.
        settings: the keys that describe the head.

    Raises:
        CheckpointError: another kind of head.
    """
    kind = settings.get("markov_head_type", "vanilla")
    if kind != "vanilla":
        raise CheckpointError(
            f"{files.place} has a {kind} head over the token before, which this drafter does not "
            "draft with",
            "take a checkpoint with the vanilla head",
        )
    tensors = renamed(without_prefix(files.tensors), "logit_head.", "", place=files.place)
    tensors = {k: t for k, t in tensors.items() if not k.startswith("confidence_head.")}
    if BEFORE not in tensors or AFTER not in tensors:
        raise CheckpointError(f"{files.place} lacks {BEFORE} or {AFTER}")
    tensors["path.before.weight"] = tensors.pop(BEFORE)
    tensors["path.after.weight"] = tensors.pop(AFTER)
    return tensors, tensors["path.before.weight"].shape[1]


@torch.no_grad()
def path_tables(
    checkpoint: DFlashCheckpoint, target: TargetFacts, dtype: torch.dtype, *, is_whole: bool
) -> dict[str, Tensor]:
    """The path head as two tables.

    Args:
        checkpoint: with a path head.
        target: whose embedding and head it may be read off.
        dtype: of the tables where the drafter has some.
        is_whole: rows for every id of the target, whatever the draft vocabulary.

    Raises:
        CheckpointError: there is no path head, the read-out is not shifted, or tables of a
            reduced vocabulary should become whole.
    """
    model, vocabulary = checkpoint.model, checkpoint.vocabulary
    if model.path is None or not model.config.is_shifted:
        raise CheckpointError(
            "DSpark needs a path head and a shifted read-out, which this drafter has not both",
            "choose --to dflash, or train with --method dspark --set is_shifted=true",
        )
    if target.embedding is None or target.head is None:
        raise CheckpointError("the tables are read off the target, which was not given")
    if is_whole and model.config.has_path_table and not vocabulary.is_full:
        raise CheckpointError(
            f"the path table has rows for {len(vocabulary)} of {vocabulary.target_size} ids, "
            "expected all",
            "choose --to speculators, which keeps the draft vocabulary",
        )
    head = target.head.float().cpu()
    if not is_whole:
        head = head[vocabulary.target_ids]
    codes, rows = model.path.codes(target.embedding.float().cpu()), model.path.rows(head)
    if not model.config.has_path_table:
        dtype = torch.float32  # they are products: rounded, they would not say what the head says
    return {
        BEFORE: codes.to(dtype).contiguous().clone(),
        AFTER: rows.to(dtype).contiguous().clone(),
    }


def settings_of(rank: int) -> dict[str, Any]:
    """The keys that describe the head."""
    return {
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }


def claim_deepspec(files: Files) -> str | None:
    """By its flat settings."""
    if "markov_rank" in files.config and "speculators_model_type" not in files.config:
        return "config.json has markov_rank at the top"
    return None


def load_deepspec(files: Files, target: TargetFacts | None) -> DFlashCheckpoint:
    """See `dflash_network.load`."""
    return _load(files, target, files.config)


def dump_deepspec(checkpoint: DFlashCheckpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files with copies of the target's embedding and head."""
    network = checkpoint.model.config
    tensors = dflash_network.network_tensors(checkpoint, dtype)
    tensors |= path_tables(checkpoint, target, dtype, is_whole=True)
    tensors["embed_tokens.weight"] = target.embedding.to("cpu", dtype).contiguous()
    tensors["lm_head.weight"] = target.head.to("cpu", dtype, copy=True).contiguous()
    config = {
        "architectures": ["Qwen3DSparkModel"],
        **dflash_network.config_of(checkpoint, dtype),
        "num_target_layers": target.num_layers,
        "target_layer_ids": [tap - 1 for tap in network.taps],
        "mask_token_id": network.mask_token,
        "block_size": network.width,
        **settings_of(network.path_rank),
    }
    return Files(config, tensors)


def claim_specforge(files: Files) -> str | None:
    """By its block of settings."""
    block = files.config.get("dflash_config") or {}
    if block.get("projector_type") == "dspark":
        return "config.json has dflash_config.projector_type dspark"
    return None


def load_specforge(files: Files, target: TargetFacts | None) -> DFlashCheckpoint:
    """See `dflash_network.load`."""
    return _load(files, target, files.config["dflash_config"])


def dump_specforge(checkpoint: DFlashCheckpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files without copies of embedding and head."""
    network = checkpoint.model.config
    tensors = dflash_network.network_tensors(checkpoint, dtype)
    tensors |= path_tables(checkpoint, target, dtype, is_whole=True)
    config = {
        "architectures": ["DSparkDraftModel"],  # SGLang's DFlash class would skip the head
        **dflash_network.config_of(checkpoint, dtype),
        "num_target_layers": target.num_layers,
        "block_size": network.width,
        "dflash_config": {
            "projector_type": "dspark",
            "attention_mode": "gqa",
            "mask_token_id": network.mask_token,
            "target_layer_ids": [tap - 1 for tap in network.taps],
            **settings_of(network.path_rank),
        },
    }
    return Files(config, tensors)


def _load(
    files: Files, target: TargetFacts | None, settings: Mapping[str, Any]
) -> DFlashCheckpoint:
    tensors, rank = take_path(files, settings)
    if "target_layer_ids" not in settings:
        raise CheckpointError(f"{files.place}/config.json says no target_layer_ids")
    return dflash_network.load(
        files,
        target,
        tensors,
        taps=tuple(layer + 1 for layer in settings["target_layer_ids"]),
        width=files.config.get("block_size") or settings.get("block_size"),
        mask_token=settings.get("mask_token_id"),
        is_shifted=True,
        path={"path_rank": rank, "has_path_table": True},
    )


DEEPSPEC = Dialect("deepspec", "dspark", "DeepSpec", claim_deepspec, load_deepspec, dump_deepspec)
SPECFORGE = Dialect(
    "specforge", "dspark", "SpecForge, SGLang", claim_specforge, load_specforge, dump_specforge
)
