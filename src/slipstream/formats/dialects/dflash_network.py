"""What all dialects of DFlash share: layers of the Qwen3 kind, fused taps, a block's read-out.

Paper: Chen et al. 2026, DFlash, arXiv:2602.06036; names: z-lab/dflash. Embedding and head are the
target's; dialects that store copies of them have them compared and left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.formats import folder
from slipstream.formats.checkpoint import DFlashCheckpoint, Files, TargetFacts, take_copy
from slipstream.formats.sizes import read_sizes, write_sizes
from slipstream.models.dflash import DFlash, DFlashConfig


def load(
    files: Files,
    target: TargetFacts | None,
    tensors: dict[str, Tensor],
    *,
    taps: tuple[int, ...],
    width: int | None,
    mask_token: int | None,
    is_shifted: bool,
    config: Mapping[str, Any] | None = None,
    path: Mapping[str, Any] | None = None,
) -> DFlashCheckpoint:
    """A checkpoint of files with the official names.

    Args:
        files: of the folder.
        target: facts about the target, to compare copies with.
        tensors: of the files, their dialect's own taken out.
        taps: indices into the hidden states.
        width: slots of a block.
        mask_token: id that stands for a token to be drafted.
        is_shifted: slot j says token j+1.
        config: describes the layers; None takes config.json itself.
        path: further fields of `DFlashConfig`, about the head that knows the token before.

    Raises:
        CheckpointError: unknown or missing tensors, or sizes that disagree.
    """
    place, layer = files.place, files.config if config is None else config
    if "hidden_norm.weight" not in tensors:
        raise CheckpointError(
            f"{place} has no hidden_norm.weight, so it is no DFlash drafter",
            hint="`slipstream zoo` lists drafters that ship; `slipstream train` makes one",
        )
    if layer.get("attention_bias"):
        raise CheckpointError(
            f"{place} has biases in attention, which this drafter does not draft with",
            "take a checkpoint without",
        )
    for value, key, what in (
        (width, "block_size", "the block width"),
        (mask_token, "mask_token_id", "the id that stands for a token to be drafted"),
    ):
        if value is None:
            raise CheckpointError(f"{place}/config.json says no {key}, expected {what}")
    if target is not None and max(taps) > target.num_layers:
        raise CheckpointError(
            f"{place} reads hidden state {max(taps)}, the target has {target.num_layers} layers"
        )
    sizes = read_sizes({"draft_vocab_size": files.config.get("draft_vocab_size"), **layer}, place)
    target_hidden = files.config.get("target_hidden_size") or sizes["hidden_size"]
    network = DFlashConfig(
        **sizes,
        taps=taps,
        target_hidden_size=target_hidden,
        width=width,
        mask_token=mask_token,
        is_shifted=is_shifted,
        **(path or {}),
    )
    vocabulary = folder.take_vocabulary(
        tensors, place, vocab_size=network.vocab_size, draft_vocab_size=network.draft_vocab_size
    )
    embedding, head = (None, None) if target is None else (target.embedding, target.head)
    take_copy(tensors, "embed_tokens.weight", embedding, rows=None, of="embedding")
    rows = None if vocabulary.is_full else vocabulary.target_ids
    take_copy(tensors, "lm_head.weight", head, rows=rows, of="head")
    model = DFlash(network)
    folder.fill(model, tensors, place)
    return DFlashCheckpoint(model.eval(), vocabulary)


def network_tensors(checkpoint: DFlashCheckpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of the network without its path head, under the official names."""
    tensors = folder.to_tensors(checkpoint.model, None, dtype)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("path.")}


def config_of(checkpoint: DFlashCheckpoint, dtype: torch.dtype) -> dict[str, Any]:
    """What every dialect's config.json says of the layers."""
    network = checkpoint.model.config
    return {
        "model_type": "qwen3",
        **write_sizes(network, dtype),
        "layer_types": ["full_attention"] * network.num_layers,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def refuse_path(checkpoint: DFlashCheckpoint, dialect: str) -> None:
    """Raises CheckpointError for a path head in a dialect of plain DFlash."""
    if checkpoint.model.path is not None:
        raise CheckpointError(
            f"{dialect} holds no path head, which this drafter was trained with",
            "choose --to deepspec, specforge or speculators, which have DSpark's",
        )
