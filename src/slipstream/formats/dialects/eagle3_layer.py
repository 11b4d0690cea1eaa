"""What all dialects of EAGLE-3 share: one layer, its maps and flags, under two spellings.

P-EAGLE has the same and more (`peagle_layers`).

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
    PEagleCheckpoint,
    TargetFacts,
    renamed,
    take_copy,
    without_prefix,
)
from slipstream.formats.sizes import read_sizes, write_sizes
from slipstream.models.eagle3 import Eagle3, Eagle3Config, default_taps
from slipstream.models.vocabulary import DraftVocabulary

QUERY = "midlayer.self_attn.q_proj.weight"
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
FLAGS = {
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_features",
    "fc_norm": "norm_each_tap",
    "norm_output": "norm_output",
}
"""Keys of config.json and our names for them."""
IDS = "eagle_aux_hidden_state_layer_ids"
"""At the top: indices into the hidden states, to vLLM and to speculators."""
INNER = f"eagle_config.{IDS}"
TRAINED = "aux_hidden_states_layer_ids"
"""AngelSlim's trainer: outputs of layers."""


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
        target: facts about the target, for taps that are not named, a head that is not stored and
            copies that are compared.
        taps: indices into the hidden states; None for the paper's.
        config: describes the layer; None takes config.json itself.

    Raises:
        CheckpointError: unknown or missing tensors, sizes that disagree, or something that only
            the target knows and that is not at hand.
    """
    tensors = layer_tensors(files)
    if (files.config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise CheckpointError(
            f"{files.place} holds a drafter without taps (use_aux_hidden_state false); this "
            "drafter cannot run it",
            "take an EAGLE-3 checkpoint with one layer and three taps",
        )
    if num_layers(tensors) > 1:
        raise CheckpointError(f"{files.place} has {num_layers(tensors)} draft layers, expected 1")
    said = fields_of(files, tensors, target, taps=taps, config=config)
    # As wide as the target, what is stored is a copy of the target's.
    own = EMBEDDING in tensors and said["hidden_size"] != said["target_hidden_size"]
    model = Eagle3(Eagle3Config(**said, has_embedding=own))
    return Eagle3Checkpoint(model, fill(model, tensors, target, files.place))


def layer_tensors(files: Files) -> dict[str, Tensor]:
    """The tensors, those of the layer that reads pairs below `midlayer.`.

    Raises:
        CheckpointError: there is no such layer.
    """
    place = files.place
    tensors = renamed(without_prefix(files.tensors), "layers.0.", "midlayer.", place=place)
    if QUERY not in tensors:
        raise CheckpointError(
            f"{place} has no midlayer.* tensors, so it is no EAGLE-3 drafter",
            hint="`slipstream zoo` lists drafters that ship; `slipstream train` makes one",
        )
    return tensors


def num_layers(tensors: Mapping[str, Tensor]) -> int:
    """Decoder layers, counted in the weights: the one that reads pairs and those above it."""
    return 1 + len({name.split(".")[1] for name in tensors if name.startswith("layers.")})


def fields_of(
    files: Files,
    tensors: Mapping[str, Tensor],
    target: TargetFacts | None,
    *,
    taps: Sequence[int] | None,
    config: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Every field of `Eagle3Config` but `has_embedding`; see `load`."""
    place, said = files.place, {**files.config, **(config or {})}
    if said.get("draft_vocab_size") is None:
        said["draft_vocab_size"] = _num_ids(tensors)
    sizes = read_sizes(said, place)
    del sizes["num_layers"]  # published configs count the target's; what is stored counts
    target_hidden = files.config.get("target_hidden_size") or sizes["hidden_size"]
    return {
        **sizes,
        "taps": tuple(_taps(taps, tensors.get("fc.weight"), target_hidden, target, place)),
        "target_hidden_size": target_hidden,
        "fusion_bias": "fc.bias" in tensors,
        "attention_bias": QUERY.replace("weight", "bias") in tensors,
        "output_bias": "midlayer.self_attn.o_proj.bias" in tensors,
        **{ours: bool(_flag(files.config, theirs)) for theirs, ours in FLAGS.items()},
    }


def fill(
    model: Eagle3, tensors: dict[str, Tensor], target: TargetFacts | None, place: str
) -> DraftVocabulary:
    """Load tensors into a network, what the target has too compared or taken from it; see `load`.

    Returns:
        The draft vocabulary.
    """
    network = model.config
    vocabulary = folder.take_vocabulary(
        tensors,
        place,
        vocab_size=network.vocab_size,
        draft_vocab_size=network.draft_vocab_size,
    )
    if not network.has_embedding:
        embedding = None if target is None else target.embedding
        take_copy(tensors, EMBEDDING, embedding, rows=None, of="embedding")
    if HEAD not in tensors:
        tensors[HEAD] = _borrowed_head(network, vocabulary, target, place)
    folder.fill(model, tensors, place)
    model.eval()
    return vocabulary


def tensors_of(
    checkpoint: Eagle3Checkpoint | PEagleCheckpoint,
    dtype: torch.dtype,
    *,
    layer: str = "midlayer.",
) -> dict[str, Tensor]:
    """Tensors under the official names, or with another name for the layer."""
    tensors = folder.to_tensors(checkpoint.model, checkpoint.vocabulary, dtype)
    return renamed(tensors, "midlayer.", layer)


def config_of(
    checkpoint: Eagle3Checkpoint | PEagleCheckpoint, dtype: torch.dtype
) -> dict[str, Any]:
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


def refuse_what_it_lacks(
    checkpoint: Eagle3Checkpoint | PEagleCheckpoint, dialect: str, **names: str
) -> None:
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


def layer_ids(config: Mapping[str, Any], place: str, *, offset: int = 0) -> tuple[int, ...] | None:
    """The taps that a config names, None where it names none.

    Args:
        config: config.json.
        place: where it was read, for messages.
        offset: tap less id in `eagle_config`, which engines count differently.

    Raises:
        CheckpointError: two places name other taps.
    """
    offsets = {INNER: offset, TRAINED: 1}
    found = {
        key: tuple(id + offsets.get(key, 0) for id in ids) for key, ids in named_ids(config).items()
    }
    if len(set(found.values())) > 1:
        told = ", ".join(f"{key} {taps}" for key, taps in found.items())
        raise CheckpointError(
            f"{place}/config.json names the target's layers twice, and as indices into its hidden "
            f"states they differ: {told}",
            "keep the one that the drafter was trained with",
        )
    return next(iter(found.values()), None)


def named_ids(config: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Every key that names layers of the target, and its ids as they are written.

    An empty list is how ModelOpt says that nothing was set.
    """
    inner = (config.get("eagle_config") or {}).get(IDS)
    named = {IDS: config.get(IDS), INNER: inner, TRAINED: config.get(TRAINED)}
    return {key: ids for key, ids in named.items() if ids}


def _num_ids(tensors: Mapping[str, Tensor]) -> int | None:
    """Ids the drafter says, by its own head or its map; None for the target's."""
    found = tensors.get(HEAD, tensors.get("d2t"))
    return None if found is None else found.shape[0]


def _borrowed_head(
    network: Eagle3Config, vocabulary: DraftVocabulary, target: TargetFacts | None, place: str
) -> Tensor:
    """[U, D] of the target's head, for a drafter that stores none.

    Raises:
        CheckpointError: the target is not at hand, or of another width.
    """
    if target is None or target.head is None:
        raise CheckpointError(
            f"{place} stores no {HEAD}: it reads the target's, which was not given",
            "give target=, such as slipstream.load(...).target",
        )
    if target.head.shape != (vocabulary.target_size, network.hidden_size):
        raise CheckpointError(
            f"{place} stores no {HEAD} and needs the target's as "
            f"{[vocabulary.target_size, network.hidden_size]}, which is {list(target.head.shape)}",
            "give --model the target that the drafter was trained for",
        )
    return target.head[vocabulary.target_ids.to(target.head.device)].cpu()


def _taps(
    taps: Sequence[int] | None,
    fc: Tensor | None,
    target_hidden: int,
    target: TargetFacts | None,
    place: str,
) -> Sequence[int]:
    """The taps named, else the paper's; the fusing layer must agree with their number."""
    if taps is None and target is None:
        raise CheckpointError(
            f"{place}/config.json names no layers of the target, and the paper's depend on how "
            "many it has, which was not given",
            "give target=, such as slipstream.load(...).target",
        )
    if taps is None:
        taps = default_taps(target.num_layers)
    if fc is not None and fc.shape[1] != len(taps) * target_hidden:
        raise CheckpointError(
            f"{place}: fc.weight reads {fc.shape[1]} values, config.json says {len(taps)} taps "
            f"of {target_hidden}"
        )
    return taps
