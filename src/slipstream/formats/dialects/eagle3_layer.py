"""What all dialects of EAGLE-3 share: one layer, its maps and flags, under two spellings.

Paper: Li et al. 2025, EAGLE-3, arXiv:2503.01840; names: SafeAILab/EAGLE `cnets.py`. The flags are
vLLM's and speculators': `norm_before_residual`, `norm_before_fc`, and EAGLE-3.1's `fc_norm` and
`norm_output`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.formats import folder
from slipstream.formats.checkpoint import (
    Eagle3Checkpoint,
    Files,
    TargetFacts,
    renamed,
    take_copy,
    without_prefix,
)
from slipstream.formats.sizes import read_sizes, write_sizes
from slipstream.models.eagle3 import Eagle3, Eagle3Config, default_taps

QUERY = "midlayer.self_attn.q_proj.weight"
FLAGS = {
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_features",
    "fc_norm": "norm_each_tap",
    "norm_output": "norm_output",
}
"""Keys of config.json and our names for them."""


def load(
    files: Files,
    target: TargetFacts | None,
    *,
    taps: Sequence[int] | None,
    config: Mapping[str, Any] | None = None,
) -> Eagle3Checkpoint:
    """A checkpoint of files in any spelling.

    Args:
        files: of the folder.
        target: facts about the target, for taps that are not named and copies that are compared.
        taps: indices into the hidden states; None for the paper's.
        config: describes the layer; None takes config.json itself.

    Raises:
        CheckpointError: unknown or missing tensors, or sizes that disagree.
    """
    place = files.place
    tensors = renamed(without_prefix(files.tensors), "layers.0.", "midlayer.", place=place)
    if QUERY not in tensors:
        raise CheckpointError(
            f"{place} has no midlayer.* tensors, so it is no EAGLE-3 drafter",
            hint="`slipstream zoo` lists drafters that ship; `slipstream train` makes one",
        )
    _refuse_others(files, tensors)
    sizes = read_sizes({**files.config, **(config or {})}, place)
    if sizes.pop("num_layers") != 1 or any(name.startswith("layers.") for name in tensors):
        raise CheckpointError(f"{place} has several draft layers, expected 1")
    fc = tensors.get("fc.weight")
    target_hidden = files.config.get("target_hidden_size") or sizes["hidden_size"]
    taps = _taps(taps, fc, target_hidden, target, place)
    network = Eagle3Config(
        **sizes,
        taps=tuple(taps),
        target_hidden_size=target_hidden,
        fusion_bias="fc.bias" in tensors,
        attention_bias=QUERY.replace("weight", "bias") in tensors,
        output_bias="midlayer.self_attn.o_proj.bias" in tensors,
        **{ours: bool(_flag(files.config, theirs)) for theirs, ours in FLAGS.items()},
    )
    vocabulary = folder.take_vocabulary(
        tensors,
        place,
        vocab_size=network.vocab_size,
        draft_vocab_size=network.draft_vocab_size,
    )
    embedding = None if target is None else target.embedding
    take_copy(tensors, "embed_tokens.weight", embedding, rows=None, of="embedding")
    model = Eagle3(network)
    folder.fill(model, tensors, place)
    return Eagle3Checkpoint(model.eval(), vocabulary)


def tensors_of(
    checkpoint: Eagle3Checkpoint, dtype: torch.dtype, *, layer: str = "midlayer."
) -> dict[str, Tensor]:
    """Tensors under the official names, or with another name for the layer."""
    tensors = folder.to_tensors(checkpoint.model, checkpoint.vocabulary, dtype)
    return renamed(tensors, "midlayer.", layer)


def config_of(checkpoint: Eagle3Checkpoint, dtype: torch.dtype) -> dict[str, Any]:
    """What every dialect's config.json says of the layer, flags included."""
    network = checkpoint.model.config
    return {
        "model_type": "llama",
        **write_sizes(network, dtype),
        "draft_vocab_size": network.draft_vocab_size,
        "target_hidden_size": network.target_hidden_size,
        "attention_bias": network.attention_bias,
        "bias": network.fusion_bias,
        **{theirs: getattr(network, ours) for theirs, ours in FLAGS.items()},
    }


def refuse_what_it_lacks(checkpoint: Eagle3Checkpoint, dialect: str, **names: str) -> None:
    """Raises CheckpointError for a part of the network that a dialect has no place for.

    Args:
        checkpoint: to be written.
        dialect: that cannot hold some things.
        **names: attributes of the network's config that are such things, and what they are.
    """
    for attribute, what in names.items():
        if getattr(checkpoint.model.config, attribute):
            raise CheckpointError(
                f"{dialect} has no {what}, which this drafter was trained with",
                "choose another --to: specforge, vllm and speculators have most",
            )


def refuse_tap_count(checkpoint: Eagle3Checkpoint, dialect: str) -> None:
    """Raises CheckpointError for a drafter of other than three taps."""
    count = len(checkpoint.model.config.taps)
    if count != 3:
        raise CheckpointError(
            f"{dialect} reads 3 hidden states of the target, this drafter {count}",
            "choose another --to: speculators takes any number",
        )


def _flag(config: Mapping[str, Any], name: str) -> Any:
    """A flag, at the top or among `eagle_config`."""
    return config.get(name, (config.get("eagle_config") or {}).get(name, False))


def _taps(
    taps: Sequence[int] | None,
    fc: Tensor | None,
    target_hidden: int,
    target: TargetFacts | None,
    place: str,
) -> Sequence[int]:
    """The taps named, else the paper's; the fusing layer must agree with their number."""
    if taps is None:
        taps = default_taps(32 if target is None else target.num_layers)
    if fc is not None and fc.shape[1] != len(taps) * target_hidden:
        raise CheckpointError(
            f"{place}: fc.weight reads {fc.shape[1]} values, config.json says {len(taps)} taps "
            f"of {target_hidden}"
        )
    return taps


def _refuse_others(files: Files, tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError for relatives of EAGLE-3 that draft in another way."""
    eagle = files.config.get("eagle_config") or {}
    for is_there, what in (
        ("mask_hidden" in tensors, "P-EAGLE, which drafts all depths in one pass (mask_hidden)"),
        (
            eagle.get("use_aux_hidden_state") is False,
            "a drafter without taps (use_aux_hidden_state false)",
        ),
    ):
        if is_there:
            raise CheckpointError(
                f"{files.place} holds {what}; this drafter cannot run it",
                "take an EAGLE-3 checkpoint with one layer and three taps",
            )
