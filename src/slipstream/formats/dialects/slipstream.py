"""Our own folders: the nearest official layout, and a `slipstream` object that says the rest.

EAGLE-1 and EAGLE-3 follow SafeAILab/EAGLE, P-EAGLE speculators, DFlash z-lab/dflash; Medusa heads
and draft language models have a layout of their own. Taps are written as indices into the target's
hidden states; embedding and head are stored where they are the drafter's own, never the target's;
reduced vocabularies have their maps for every method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from slipstream.errors import CheckpointError
from slipstream.formats import folder
from slipstream.formats.checkpoint import (
    DFlashCheckpoint,
    Eagle3Checkpoint,
    EagleCheckpoint,
    Files,
    LanguageCheckpoint,
    MedusaCheckpoint,
    PEagleCheckpoint,
    TargetFacts,
)
from slipstream.formats.dialect import Dialect
from slipstream.formats.dialects import (
    dflash_network,
    eagle3_layer,
    eagle_layer,
    peagle_layers,
    zlab,
)
from slipstream.models.language import Language, LanguageConfig
from slipstream.models.medusa import Medusa, MedusaConfig

MEDUSA_TYPE = "slipstream-medusa"
LANGUAGE_TYPE = "slipstream-language"


class _Medusa(BaseModel):
    """config.json of Medusa heads."""

    model_config = ConfigDict(extra="ignore")

    model_type: Literal["slipstream-medusa"]
    hidden_size: int
    num_heads: int
    num_blocks: int
    vocab_size: int
    draft_vocab_size: int
    borrows_head: bool


class _Language(BaseModel):
    """config.json of a small draft language model."""

    model_config = ConfigDict(extra="ignore")

    model_type: Literal["slipstream-language"]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int


_Stored = TypeVar("_Stored", bound=BaseModel)


def _claims(*names: str) -> Callable[[Files], str | None]:
    """The claim of folders that name one of these methods themselves."""

    def claim(files: Files) -> str | None:
        method = (files.config.get("slipstream") or {}).get("method")
        return f"config.json says slipstream.method {method}" if method in names else None

    return claim


def _claims_blocks(has_path: bool) -> Callable[[Files], str | None]:
    """The claim of folders of blocks, with or without a path head."""

    def claim(files: Files) -> str | None:
        own = files.config.get("slipstream") or {}
        said = _claims("dflash", "ddtree", "dspark")(files)
        return said if bool(own.get("path_rank")) == has_path else None

    return claim


def _claims_type(name: str) -> Callable[[Files], str | None]:
    """The claim of folders of a model type of our own."""

    def claim(files: Files) -> str | None:
        is_ours = files.config.get("model_type") == name
        return f"config.json says model_type {name}" if is_ours else None

    return claim


def _stored(files: Files, schema: type[_Stored]) -> _Stored:
    """config.json, checked.

    Raises:
        CheckpointError: it lacks a key.
    """
    try:
        return schema(**files.config)
    except (ValidationError, TypeError) as error:
        raise CheckpointError(
            f"{files.place}/config.json cannot be read: {folder.first_line(error)}",
            "take the drafter from its source again",
        ) from error


def _load_eagle3(files: Files, target: TargetFacts | None) -> Eagle3Checkpoint:
    return eagle3_layer.load(files, target, taps=files.config["slipstream"].get("taps"))


def _dump_eagle3(checkpoint: Eagle3Checkpoint, _target: TargetFacts, dtype: torch.dtype) -> Files:
    taps = list(checkpoint.model.config.taps)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **eagle3_layer.config_of(checkpoint, dtype),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": taps, "use_aux_hidden_state": True},
        "slipstream": {"method": "eagle3", "taps": taps},
    }
    return Files(config, eagle3_layer.tensors_of(checkpoint, dtype))


def _load_peagle(files: Files, target: TargetFacts | None) -> PEagleCheckpoint:
    return peagle_layers.load(
        files,
        target,
        taps=files.config["slipstream"].get("taps"),
        mask_token=files.config.get(peagle_layers.TOKEN),
    )


def _dump_peagle(checkpoint: PEagleCheckpoint, _target: TargetFacts, dtype: torch.dtype) -> Files:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **peagle_layers.config_of(checkpoint, dtype),
        "slipstream": {"method": "peagle", "taps": list(checkpoint.model.config.taps)},
    }
    return Files(config, eagle3_layer.tensors_of(checkpoint, dtype, layer="layers.0."))


def _load_eagle(files: Files, target: TargetFacts | None) -> EagleCheckpoint:
    return eagle_layer.load(files, target)


def _dump_eagle(checkpoint: EagleCheckpoint, _target: TargetFacts, dtype: torch.dtype) -> Files:
    config = {
        "architectures": ["LlamaForCausalLMEagle"],
        **eagle_layer.config_of(checkpoint, dtype),
        "draft_vocab_size": checkpoint.model.config.draft_vocab_size,
        "slipstream": {"method": "eagle"},
    }
    return Files(config, folder.to_tensors(checkpoint.model, checkpoint.vocabulary, dtype))


def _load_dflash(files: Files, target: TargetFacts | None) -> DFlashCheckpoint:
    own, block = files.config["slipstream"], files.config.get("dflash_config") or {}
    if "taps" not in own:
        raise CheckpointError(f"{files.place}/config.json says no slipstream.taps")
    merged = {"target_hidden_size": own.get("target_hidden_size")}
    return dflash_network.load(
        Files({**files.config, **merged}, files.tensors, files.place),
        target,
        dict(files.tensors),
        taps=tuple(own["taps"]),
        width=files.config.get("block_size"),
        mask_token=block.get("mask_token_id"),
        is_shifted=zlab.is_shifted(files.config),
        path={
            "path_rank": own.get("path_rank", 0),
            "has_path_table": own.get("has_path_table", False),
        },
    )


def _dump_dflash(checkpoint: DFlashCheckpoint, _target: TargetFacts, dtype: torch.dtype) -> Files:
    network = checkpoint.model.config
    config = {
        "architectures": ["DFlashDraftModel"],
        **dflash_network.config_of(checkpoint, dtype),
        "draft_vocab_size": network.draft_vocab_size,
        "block_size": network.width,
        "dflash_config": {
            "mask_token_id": network.mask_token,
            "target_layer_ids": [tap - 1 for tap in network.taps],
            "shift_label": network.is_shifted,
        },
        "slipstream": {
            "method": "dflash",
            "taps": list(network.taps),
            "target_hidden_size": network.target_hidden_size,
            "path_rank": network.path_rank,
            "has_path_table": network.has_path_table,
        },
    }
    return Files(config, folder.to_tensors(checkpoint.model, checkpoint.vocabulary, dtype))


def _load_medusa(files: Files, _target: TargetFacts | None) -> MedusaCheckpoint:
    stored = _stored(files, _Medusa)
    tensors = dict(files.tensors)
    vocabulary = folder.take_vocabulary(
        tensors,
        files.place,
        vocab_size=stored.vocab_size,
        draft_vocab_size=stored.draft_vocab_size,
    )
    model = Medusa(MedusaConfig(**stored.model_dump(exclude={"model_type"})))
    folder.fill(model, tensors, files.place)
    return MedusaCheckpoint(model.eval(), vocabulary)


def _dump_medusa(checkpoint: MedusaCheckpoint, _target: TargetFacts, dtype: torch.dtype) -> Files:
    vocabulary = checkpoint.vocabulary
    if vocabulary is None:
        raise CheckpointError(
            "these heads do not say how many ids their target has",
            "write them with the target's vocabulary",
        )
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary.target_size,
        "draft_vocab_size": len(vocabulary),
    }
    stored = _Medusa(model_type=MEDUSA_TYPE, **{**asdict(checkpoint.model.config), **sizes})
    return Files(stored.model_dump(), folder.to_tensors(checkpoint.model, vocabulary, dtype))


def _load_language(files: Files, _target: TargetFacts | None) -> LanguageCheckpoint:
    stored, tensors = _stored(files, _Language), dict(files.tensors)
    vocabulary = folder.take_vocabulary(
        tensors,
        files.place,
        vocab_size=stored.vocab_size,
        draft_vocab_size=stored.draft_vocab_size,
    )
    model = Language(
        LanguageConfig(
            hidden_size=stored.hidden_size,
            intermediate_size=stored.intermediate_size,
            num_layers=stored.num_hidden_layers,
            num_heads=stored.num_attention_heads,
            num_kv_heads=stored.num_key_value_heads,
            head_size=stored.head_dim,
            vocab_size=stored.vocab_size,
            draft_vocab_size=stored.draft_vocab_size,
            rms_norm_eps=stored.rms_norm_eps,
            rope_theta=stored.rope_theta,
            rope_scaling=stored.rope_scaling,
            max_length=stored.max_position_embeddings,
        )
    )
    folder.fill(model, tensors, files.place)
    return LanguageCheckpoint(model.eval(), vocabulary)


def _dump_language(
    checkpoint: LanguageCheckpoint, _target: TargetFacts, dtype: torch.dtype
) -> Files:
    config = checkpoint.model.config
    stored = _Language(
        model_type=LANGUAGE_TYPE,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        max_position_embeddings=config.max_length,
    )
    tensors = folder.to_tensors(checkpoint.model, checkpoint.vocabulary, dtype)
    return Files(stored.model_dump(), tensors)


READERS = "slipstream"
EAGLE3 = Dialect("slipstream", "eagle3", READERS, _claims("eagle3"), _load_eagle3, _dump_eagle3)
PEAGLE = Dialect("slipstream", "peagle", READERS, _claims("peagle"), _load_peagle, _dump_peagle)
EAGLE = Dialect(
    "slipstream", "eagle", READERS, _claims("eagle", "eagle2", "hass"), _load_eagle, _dump_eagle
)
DFLASH = Dialect("slipstream", "dflash", READERS, _claims_blocks(False), _load_dflash, _dump_dflash)
DSPARK = Dialect("slipstream", "dspark", READERS, _claims_blocks(True), _load_dflash, _dump_dflash)
MEDUSA = Dialect(
    "slipstream", "medusa", READERS, _claims_type(MEDUSA_TYPE), _load_medusa, _dump_medusa
)
CHAIN = Dialect(
    "slipstream", "chain", READERS, _claims_type(LANGUAGE_TYPE), _load_language, _dump_language
)
