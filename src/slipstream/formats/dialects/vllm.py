"""vLLM's own spelling of EAGLE-1, EAGLE-3, P-EAGLE and Medusa.

EAGLE-3: class `Eagle3LlamaForCausalLM`, `layers.0.*`; ids of `eagle_config` are indices into the
hidden states, as our taps are. P-EAGLE: the same with `mask_hidden`, whatever the class is called,
and a mask token under one of three keys. EAGLE-1: the layer that joins feature and embedding has no
bias; one is carried by the drafter's own embedding (`folded_bias`). Medusa: `blocks.H.layers.L.*`
and `lm_heads.H.weight`; `original_lm_head` shares one head, `token_map` reduces the vocabulary.
vLLM 0.32 makes a parameter of the map while it reads it and then misses that parameter among what
was read, so the map is read here and not written: the head is stored whole, with the ids under a
name of our own, which vLLM passes over.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.formats import folder
from slipstream.formats.checkpoint import (
    Eagle3Checkpoint,
    EagleCheckpoint,
    Files,
    MedusaCheckpoint,
    PEagleCheckpoint,
    TargetFacts,
    is_copy,
    without_prefix,
)
from slipstream.formats.dialect import Dialect
from slipstream.formats.dialects import eagle3_layer, eagle_layer, folded_bias, peagle_layers
from slipstream.formats.dialects.eagle3_layer import IDS
from slipstream.models.medusa import Medusa, MedusaConfig
from slipstream.models.vocabulary import DraftVocabulary

ARCHITECTURE = "Eagle3LlamaForCausalLM"
EMBEDDING = "embed_tokens.weight"
MASK_TOKENS = (peagle_layers.TOKEN, "pard_token", "ptd_token_id")  # as vLLM looks for it
DRAFT_IDS = "draft_ids"  # [U] int64, of a whole head's rows those that the heads were trained for


def claim_eagle3(files: Files) -> str | None:
    """By its class name and the layer's."""
    names = {name.removeprefix("model.") for name in files.tensors}
    if ARCHITECTURE in (files.config.get("architectures") or ()) and any(
        name.startswith("layers.0.") for name in names
    ):
        return f"architecture {ARCHITECTURE} and tensors layers.0.*"
    return None


def load_eagle3(files: Files, target: TargetFacts | None) -> Eagle3Checkpoint:
    """Ids are taps; see `eagle3_layer.load`."""
    return eagle3_layer.load(files, target, taps=eagle3_layer.layer_ids(files.config, files.place))


def dump_eagle3(checkpoint: Eagle3Checkpoint, _target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files with ids for vLLM, whose older runner reads them in `eagle_config`, the newer above.

    Raises:
        CheckpointError: vLLM's layer has no place for something.
    """
    return _dump_pairs(checkpoint, eagle3_layer.config_of(checkpoint, dtype), dtype)


def claim_peagle(files: Files) -> str | None:
    """By what its slots read."""
    names = {name.removeprefix("model.") for name in files.tensors}
    return f"a tensor {peagle_layers.HIDDEN}" if peagle_layers.HIDDEN in names else None


def load_peagle(files: Files, target: TargetFacts | None) -> PEagleCheckpoint:
    """Ids are taps; see `peagle_layers.load`."""
    named = [files.config[key] for key in MASK_TOKENS if files.config.get(key) is not None]
    taps = eagle3_layer.layer_ids(files.config, files.place)
    return peagle_layers.load(files, target, taps=taps, mask_token=next(iter(named), None))


def dump_peagle(checkpoint: PEagleCheckpoint, _target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files that vLLM serves as EAGLE-3 with parallel drafting; see `dump_eagle3`."""
    return _dump_pairs(checkpoint, peagle_layers.config_of(checkpoint, dtype), dtype)


def _dump_pairs(
    checkpoint: Eagle3Checkpoint | PEagleCheckpoint, said: dict[str, Any], dtype: torch.dtype
) -> Files:
    lacks = {"fusion_bias": "bias in the layer that fuses the taps"}
    eagle3_layer.refuse_what_it_lacks(checkpoint, "vllm", **lacks)
    network = checkpoint.model.config
    config = {
        **said,
        IDS: list(network.taps),
        "eagle_config": {IDS: list(network.taps), "use_aux_hidden_state": True},
    }
    if network.output_bias and not network.attention_bias:
        raise CheckpointError("vllm has a bias behind attention only with biases before it")
    tensors = eagle3_layer.tensors_of(checkpoint, dtype, layer="layers.0.")
    return Files({"architectures": [ARCHITECTURE], **config}, tensors)


def claim_eagle(files: Files) -> str | None:
    """By its class name."""
    names = set(files.config.get("architectures") or ())
    if "EagleLlamaForCausalLM" in names and eagle_layer.is_eagle(files.tensors):
        return "architecture EagleLlamaForCausalLM"
    return None


def load_eagle(files: Files, target: TargetFacts | None) -> EagleCheckpoint:
    """See `eagle_layer.load`; a bias may lie in the embedding.

    Raises:
        CheckpointError: it does, and the target's embedding is not at hand or another.
    """
    if not files.config.get(folded_bias.KEY):
        return eagle_layer.load(files, target)
    tensors = without_prefix(files.tensors)
    folded = tensors.pop(EMBEDDING, None)
    if folded is None or target is None or target.embedding is None:
        raise CheckpointError(f"{files.place} needs {EMBEDDING} and the target's, to tell its bias")
    weight = tensors["fc.weight"]
    tensors["fc.bias"] = folded_bias.unfold(weight, folded, target.embedding, files.place)
    return eagle_layer.load(files, target, tensors=tensors)


def dump_eagle(checkpoint: EagleCheckpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files for vLLM's EAGLE-1; a bias of the joining layer goes into the embedding.

    Raises:
        CheckpointError: there is such a bias, and the target's embedding is not at hand.
    """
    config = {
        "architectures": ["EagleLlamaForCausalLM"],
        **eagle_layer.config_of(checkpoint, dtype),
    }
    tensors, model = eagle_layer.tensors_of(checkpoint, dtype), checkpoint.model
    if model.config.bias:
        if target.embedding is None:
            raise CheckpointError("vllm's EAGLE-1 holds the bias in the target's embedding, "
                                  "which was not given")  # fmt: skip
        config |= {"bias": False, folded_bias.KEY: True}
        weight, bias = tensors["fc.weight"], tensors.pop("fc.bias")
        tensors[EMBEDDING] = folded_bias.fold(weight, bias, target.embedding)
    return Files(config, tensors)


def claim_medusa(files: Files) -> str | None:
    """By its model type."""
    if files.config.get("model_type") == "medusa" and "blocks.0.layers.0.weight" in files.tensors:
        return "model_type medusa and tensors blocks.*"
    return None


def load_medusa(files: Files, target: TargetFacts | None) -> MedusaCheckpoint:
    """Heads, each with its projection, or all with one that may be the target's.

    Raises:
        CheckpointError: unknown or missing tensors, or a head shared that is not the target's.
    """
    tensors, place = dict(files.tensors), files.place
    blocks = [m for n in tensors if (m := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.weight", n))]
    if not blocks:
        raise CheckpointError(f"{place} has no tensors blocks.0.layers.0.weight")
    num_heads = 1 + max(int(found[1]) for found in blocks)
    num_blocks = 1 + max(int(found[2]) for found in blocks)
    shared = bool(files.config.get("original_lm_head"))
    ids, first = tensors.pop("token_map", None), tensors.get("lm_heads.0.weight")
    ids = tensors.pop(DRAFT_IDS, ids)
    if first is None or "vocab_size" not in files.config:
        raise CheckpointError(f"{place} lacks lm_heads.0.weight, or config.json lacks vocab_size")
    vocab_size = files.config["vocab_size"]
    vocabulary = DraftVocabulary.full(vocab_size)
    if ids is not None:
        vocabulary = DraftVocabulary(ids.to(torch.int64), vocab_size)
    if shared:
        _check_shared(first, vocabulary, target, place)
        del tensors["lm_heads.0.weight"]
    found = {_ours(name, num_blocks): tensor for name, tensor in tensors.items()}
    config = MedusaConfig(
        hidden_size=first.shape[1],
        num_heads=num_heads,
        num_blocks=num_blocks,
        vocab_size=vocab_size,
        draft_vocab_size=len(vocabulary),
        borrows_head=shared,
    )
    model = Medusa(config)
    if not files.config.get("medusa_fc_bias"):  # absent biases are zero
        for name, value in model.state_dict().items():
            if name.endswith("linear.bias"):
                found.setdefault(name, torch.zeros_like(value))
    folder.fill(model, found, place)
    return MedusaCheckpoint(model.eval(), vocabulary)


def dump_medusa(checkpoint: MedusaCheckpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files for vLLM's MedusaModel; a borrowed head is stored once, and whole.

    Raises:
        CheckpointError: the target's head is borrowed and not at hand, or heads with their own
            projections know only some ids.
    """
    network = checkpoint.model.config
    own = not network.borrows_head
    if own and checkpoint.vocabulary is not None and not checkpoint.vocabulary.is_full:
        raise CheckpointError(
            "vllm reduces the vocabulary only for heads that share the target's projection, and "
            "these have their own",
            "choose --to medusa, or train heads that borrow the target's",
        )
    tensors = {
        _theirs(name, network.num_blocks): tensor
        for name, tensor in folder.to_tensors(checkpoint.model, None, dtype).items()
    }
    vocabulary = checkpoint.vocabulary
    if network.borrows_head:
        if target.head is None:
            raise CheckpointError("vllm stores the target's head, which was not given")
        vocabulary = vocabulary or DraftVocabulary.full(target.head.shape[0])
        head = target.head[: vocabulary.target_size]
        tensors["lm_heads.0.weight"] = head.to("cpu", dtype).contiguous()
    if not vocabulary.is_full:
        tensors[DRAFT_IDS] = vocabulary.target_ids
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": network.hidden_size,
        "num_heads": network.num_heads,
        "num_hidden_layers": network.num_blocks,
        "vocab_size": vocabulary.target_size,
        "truncated_vocab_size": vocabulary.target_size,
        "medusa_fc_bias": True,
        "original_lm_head": network.borrows_head,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    return Files(config, tensors)


def _check_shared(
    head: Tensor, vocabulary: DraftVocabulary, target: TargetFacts | None, place: str
) -> None:
    """Raises CheckpointError when the one head of all is not the target's."""
    if target is None or target.head is None:
        return
    wanted = target.head
    if head.shape[0] != wanted.shape[0]:
        wanted = wanted[vocabulary.target_ids.to(wanted.device)]
    if head.shape != wanted.shape or not is_copy(head, wanted):
        raise CheckpointError(
            f"{place}: lm_heads.0.weight, which all heads share, is not the target's head",
            "give --model the target that the heads were trained for",
        )


def _ours(name: str, num_blocks: int) -> str:
    """`blocks.H.layers.L.weight` and `lm_heads.H.weight` to our names."""
    name = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"heads.\1.\2.linear.", name)
    return re.sub(r"^lm_heads\.(\d+)\.", rf"heads.\1.{num_blocks}.", name)


def _theirs(name: str, num_blocks: int) -> str:
    """The way back."""
    name = re.sub(r"^heads\.(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
    return re.sub(rf"^heads\.(\d+)\.{num_blocks}\.", r"lm_heads.\1.", name)


EAGLE3 = Dialect("vllm", "eagle3", "vLLM", claim_eagle3, load_eagle3, dump_eagle3)
PEAGLE = Dialect("vllm", "peagle", "vLLM", claim_peagle, load_peagle, dump_peagle)
EAGLE = Dialect("vllm", "eagle", "vLLM", claim_eagle, load_eagle, dump_eagle)
MEDUSA = Dialect("vllm", "medusa", "vLLM", claim_medusa, load_medusa, dump_medusa)
