"""speculators' folders, which vLLM serves: EAGLE-3, P-EAGLE, DFlash, DSpark under one schema.

The layer's sizes are in `transformer_layer_config`, the rest at the top. Ids are indices into the
hidden states, as our taps are. Copies of the target's embedding, and for DFlash of its head, are
stored; they are compared and left out. `norm_before_residual` is always written, because
speculators and vLLM assume different values where it is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.formats.checkpoint import (
    DFlashCheckpoint,
    Eagle3Checkpoint,
    Files,
    PEagleCheckpoint,
    TargetFacts,
    without_prefix,
)
from slipstream.formats.dialect import Dialect
from slipstream.formats.dialects import dflash_network, dspark, eagle3_layer, peagle_layers

VERSION = "0.9.0"
NUM_TOKENS = 5  # what speculators' recipes serve an EAGLE-3 drafter with, and we a P-EAGLE one
_TRAINING_ONLY = ("verifier_norm.weight", "verifier_lm_head.weight")
_LAYER_KEYS = (
    "hidden_act", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_hidden_layers", "vocab_size", "rms_norm_eps",
    "rope_theta", "rope_scaling", "max_position_embeddings", "tie_word_embeddings",
    "attention_bias", "layer_types", "use_sliding_window", "sliding_window", "model_type",
)  # fmt: skip


def _claims(kind: str) -> Callable[[Files], str | None]:
    def claim(files: Files) -> str | None:
        found = files.config.get("speculators_model_type")
        return f"config.json says speculators_model_type {found}" if found == kind else None

    return claim


def load_eagle3(files: Files, target: TargetFacts | None) -> Eagle3Checkpoint:
    """Ids are taps; see `eagle3_layer.load`."""
    return eagle3_layer.load(
        Files(files.config, _served(files), files.place),
        target,
        taps=eagle3_layer.layer_ids(files.config, files.place),
        config=_llama_layer(files),
    )


def dump_eagle3(checkpoint: Eagle3Checkpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files that speculators loads and vLLM serves.

    Raises:
        CheckpointError: there is no place for something.
    """
    return _dump_pairs("eagle3", "Eagle3Speculator", checkpoint, target, dtype)


def load_peagle(files: Files, target: TargetFacts | None) -> PEagleCheckpoint:
    """Ids are taps; see `peagle_layers.load`."""
    return peagle_layers.load(
        Files(files.config, _served(files), files.place),
        target,
        taps=eagle3_layer.layer_ids(files.config, files.place),
        mask_token=files.config.get(peagle_layers.TOKEN),
        config=_llama_layer(files),
    )


def dump_peagle(checkpoint: PEagleCheckpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files that speculators loads and vLLM serves, as EAGLE-3 with parallel drafting.

    Raises:
        CheckpointError: there is no place for something.
    """
    made = _dump_pairs("peagle", "PEagleSpeculator", checkpoint, target, dtype)
    more = {peagle_layers.TOKEN: checkpoint.model.config.mask_token, "embed_requires_grad": True}
    return Files({**made.config, **more}, made.tensors)


def _dump_pairs(
    kind: str,
    architecture: str,
    checkpoint: Eagle3Checkpoint | PEagleCheckpoint,
    target: TargetFacts,
    dtype: torch.dtype,
) -> Files:
    lacks = {"fusion_bias": "bias in the layer that fuses the taps"}
    eagle3_layer.refuse_what_it_lacks(checkpoint, "speculators", **lacks)
    said = eagle3_layer.config_of(checkpoint, dtype)
    config = {
        "architectures": [architecture],
        "speculators_model_type": kind,
        **_common(kind, NUM_TOKENS, said, target),
        "draft_vocab_size": len(checkpoint.vocabulary),
        **{name: said[name] for name in eagle3_layer.FLAGS},
        "target_hidden_size": said["target_hidden_size"],
        "eagle_aux_hidden_state_layer_ids": list(checkpoint.model.config.taps),
        "embed_requires_grad": False,
    }
    tensors = eagle3_layer.tensors_of(checkpoint, dtype, layer="layers.0.")
    if target.embedding is not None and not checkpoint.model.config.has_embedding:
        # Speculators makes a random one up where it is missing.
        tensors["embed_tokens.weight"] = target.embedding.to("cpu", dtype).contiguous()
    return Files(config, tensors)


def load_dflash(files: Files, target: TargetFacts | None) -> DFlashCheckpoint:
    """Ids are taps; see `dflash_network.load`."""
    return _load_blocks(files, target, without_prefix(_served(files)), is_shifted=False)


def dump_dflash(checkpoint: DFlashCheckpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files that speculators loads and vLLM serves.

    Raises:
        CheckpointError: there is a path head, or the target is not at hand.
    """
    dflash_network.refuse_path(checkpoint, "speculators' dflash")
    return _dump_blocks("dflash", "DFlashSpeculator", checkpoint, target, dtype)


def load_dspark(files: Files, target: TargetFacts | None) -> DFlashCheckpoint:
    """Ids are taps; see `dflash_network.load`."""
    served = Files(files.config, _served(files), files.place)
    tensors, rank = dspark.take_path(served, files.config)
    path = {"path_rank": rank, "has_path_table": True}
    return _load_blocks(files, target, tensors, is_shifted=True, path=path)


def dump_dspark(checkpoint: DFlashCheckpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files that speculators loads and vLLM serves; see `dspark.path_tables`."""
    tables = dspark.path_tables(checkpoint, target, dtype, is_whole=False)
    made = _dump_blocks("dspark", "DSparkSpeculator", checkpoint, target, dtype)
    settings = dspark.settings_of(checkpoint.model.config.path_rank)
    return Files({**made.config, **settings}, {**made.tensors, **tables})


def _load_blocks(
    files: Files,
    target: TargetFacts | None,
    tensors: dict[str, Tensor],
    *,
    is_shifted: bool,
    path: Mapping[str, Any] | None = None,
) -> DFlashCheckpoint:
    if not files.config.get("aux_hidden_state_layer_ids"):
        raise CheckpointError(f"{files.place}/config.json says no aux_hidden_state_layer_ids")
    return dflash_network.load(
        files,
        target,
        tensors,
        taps=tuple(files.config["aux_hidden_state_layer_ids"]),
        width=files.config.get("block_size", 8),
        mask_token=files.config.get("mask_token_id"),
        is_shifted=bool(files.config.get("sample_from_anchor", is_shifted)),
        config=_layer(files),
        path=path,
    )


def _dump_blocks(
    kind: str,
    architecture: str,
    checkpoint: DFlashCheckpoint,
    target: TargetFacts,
    dtype: torch.dtype,
) -> Files:
    if target.embedding is None or target.head is None:
        raise CheckpointError("speculators stores copies of the target's, which was not given")
    network, vocabulary = checkpoint.model.config, checkpoint.vocabulary
    tensors = dflash_network.network_tensors(checkpoint, dtype)
    rows = target.head[vocabulary.target_ids.to(target.head.device)]
    tensors["embed_tokens.weight"] = target.embedding.to("cpu", dtype).contiguous()
    tensors["lm_head.weight"] = rows.to("cpu", dtype).contiguous()
    if not vocabulary.is_full:
        tensors |= {"d2t": vocabulary.offsets(), "t2d": vocabulary.mask()}
    said = dflash_network.config_of(checkpoint, dtype)
    num_tokens = network.num_drafts(network.width)
    config = {
        "architectures": [architecture],
        "speculators_model_type": kind,
        **_common(kind, num_tokens, said, target),
        "draft_vocab_size": len(vocabulary),
        "target_hidden_size": network.target_hidden_size,
        "aux_hidden_state_layer_ids": list(network.taps),
        "mask_token_id": network.mask_token,
        "block_size": network.width,
        "sample_from_anchor": network.is_shifted,
        "sliding_window_non_causal": False,
    }
    return Files(config, tensors)


def _common(
    algorithm: str, num_tokens: int, said: Mapping[str, Any], target: TargetFacts
) -> dict[str, Any]:
    """The keys of every algorithm."""
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {
                "name_or_path": target.name,
                "architectures": [target.architecture] if target.architecture else [],
            },
        },
        "transformer_layer_config": {name: said[name] for name in _LAYER_KEYS if name in said},
        "torch_dtype": said["torch_dtype"],
    }


def _layer(files: Files) -> Mapping[str, Any]:
    layer = files.config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise CheckpointError(f"{files.place}/config.json has no transformer_layer_config")
    return layer


def _llama_layer(files: Files) -> Mapping[str, Any]:
    """What describes the layers of pairs.

    Raises:
        CheckpointError: they are Qwen3's.
    """
    layer = _layer(files)
    if layer.get("model_type") == "qwen3" and any("q_norm" in name for name in files.tensors):
        raise CheckpointError(
            f"{files.place} norms queries and keys, which this drafter does not draft with",
            "take a checkpoint whose layer is Llama's",
        )
    return layer


def _served(files: Files) -> dict[str, Tensor]:
    """The tensors without what only training uses."""
    return {name: t for name, t in files.tensors.items() if name not in _TRAINING_ONLY}


READERS = "speculators, vLLM"
EAGLE3 = Dialect("speculators", "eagle3", READERS, _claims("eagle3"), load_eagle3, dump_eagle3)
PEAGLE = Dialect("speculators", "peagle", READERS, _claims("peagle"), load_peagle, dump_peagle)
DFLASH = Dialect("speculators", "dflash", READERS, _claims("dflash"), load_dflash, dump_dflash)
DSPARK = Dialect("speculators", "dspark", READERS, _claims("dspark"), load_dspark, dump_dspark)
