"""Checkpoints in memory, whatever their dialect, and a folder's content before it is understood.

One canonical form for each network (`models`): taps are indices into the target's hidden states,
draft vocabularies hold absolute target ids, every norm and every shift is an explicit flag. The
dialects beside this file translate between that and what others write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.models.dflash import DFlash
from slipstream.models.eagle import Eagle
from slipstream.models.eagle3 import Eagle3
from slipstream.models.language import Language
from slipstream.models.medusa import Medusa
from slipstream.models.peagle import PEagle
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.target.protocol import Target


@dataclass(frozen=True, slots=True)
class Eagle3Checkpoint:
    """An EAGLE-3 drafter as stored: the network and what its ids mean."""

    model: Eagle3
    vocabulary: DraftVocabulary


@dataclass(frozen=True, slots=True)
class PEagleCheckpoint:
    """A P-EAGLE drafter as stored: the network and what its ids mean."""

    model: PEagle
    vocabulary: DraftVocabulary


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    """A drafter of EAGLE-1, EAGLE-2 or HASS: the network and the ids it drafts."""

    model: Eagle
    vocabulary: DraftVocabulary


@dataclass(frozen=True, slots=True)
class MedusaCheckpoint:
    """Heads as stored: the network and what its ids mean, None for the target's own."""

    model: Medusa
    vocabulary: DraftVocabulary | None


@dataclass(frozen=True, slots=True)
class DFlashCheckpoint:
    """A drafter of blocks, with or without a path head: the network and what its ids mean."""

    model: DFlash
    vocabulary: DraftVocabulary


@dataclass(frozen=True, slots=True)
class LanguageCheckpoint:
    """A small draft language model: the network and what its ids mean."""

    model: Language
    vocabulary: DraftVocabulary


Checkpoint = (
    Eagle3Checkpoint
    | PEagleCheckpoint
    | EagleCheckpoint
    | MedusaCheckpoint
    | DFlashCheckpoint
    | LanguageCheckpoint
)


@dataclass(frozen=True, slots=True)
class Files:
    """A folder's content: config.json and the tensors by name.

    Args:
        config: empty where there is no config.json.
        tensors: as stored, in their own number types.
        place: the folder, for messages.
        weights: name of the file that the tensors lie in.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    place: str = "the checkpoint"
    weights: str = "model.safetensors"


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a dialect needs to know about the target a drafter serves.

    Args:
        name: how to find it: a Hugging Face id or a folder.
        num_layers: L.
        embedding: [V', D], or None where copies of it cannot be compared.
        head: [V', D], or None.
        architecture: the Hugging Face class name, empty when unknown.
    """

    name: str
    num_layers: int
    embedding: Tensor | None = None
    head: Tensor | None = None
    architecture: str = ""


def facts_of(target: Target, name: str | None = None) -> TargetFacts:
    """What dialects need to know of a loaded target.

    Args:
        target: loaded.
        name: what files call it; None takes its own name.
    """
    spec = target.spec
    return TargetFacts(
        name or spec.name,
        spec.num_layers,
        target.embedding().detach().cpu(),
        target.head().detach().cpu(),
        spec.architecture,
    )


def without_prefix(tensors: Mapping[str, Tensor], prefix: str = "model.") -> dict[str, Tensor]:
    """The tensors, an optional prefix taken off their names.

    Raises:
        CheckpointError: a name is there with and without it.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(prefix)
        if short in found:
            raise CheckpointError(f"tensor {short} is stored twice, once as {prefix}{short}")
        found[short] = tensor
    return found


def renamed(
    tensors: Mapping[str, Tensor], old: str, new: str, *, place: str = "the checkpoint"
) -> dict[str, Tensor]:
    """The tensors, a leading part of their names replaced.

    Raises:
        CheckpointError: a new name is taken already.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        other = new + name.removeprefix(old) if name.startswith(old) else name
        if other in found:
            raise CheckpointError(f"{place} holds {other} twice, also as {old}*")
        found[other] = tensor
    return found


def take_copy(
    tensors: dict[str, Tensor], name: str, original: Tensor | None, *, rows: Tensor | None, of: str
) -> Tensor | None:
    """Take a copy of something of the target's out of the tensors.

    Args:
        tensors: what it is taken out of.
        name: of the copy; it may be absent.
        original: [V', D] what it should be a copy of; None does not compare.
        rows: [U] int64 rows of the original that it should hold; None for all.
        of: what it is, for the message.

    Returns:
        The copy, or None.

    Raises:
        CheckpointError: it is no copy: it was trained, or belongs to another target.
    """
    copy = tensors.pop(name, None)
    if copy is None or original is None:
        return copy
    wanted = original if rows is None else original[rows.to(original.device)]
    if copy.shape != wanted.shape:
        raise CheckpointError(
            f"{name} is {list(copy.shape)}, the target's {of} is {list(wanted.shape)}",
            "give --model the target that the drafter was trained for",
        )
    if not is_copy(copy, wanted):
        raise CheckpointError(
            f"{name} is not the target's {of}: it was trained, or belongs to another target",
            f"give --model its own target; a drafter with its own {of} cannot be held here",
        )
    return copy


def is_copy(copy: Tensor, original: Tensor, tolerance: float = 0.02) -> bool:
    """Whether two weights are the same up to the rounding of narrow number types.

    Args:
        copy: any shape, any floating number type.
        original: of the same shape.
        tolerance: largest relative difference of a row's entries to the largest of the row.
    """
    ours, theirs = copy.float().cpu(), original.float().cpu()
    scale = theirs.abs().amax(-1, keepdim=True).clamp_min(1e-6)
    return bool(((ours - theirs).abs() <= tolerance * scale).all())
