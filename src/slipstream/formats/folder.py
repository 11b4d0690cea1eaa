"""What every draft checkpoint on disk has in common: a config, tensors, a card, written whole.

A layout (one file each beside this one) says which keys and tensors a folder holds; here are the
ways in which any folder can be wrong, told the same way for all of them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.errors import CheckpointError, DrafterMismatchError, OutputError
from slipstream.models.vocabulary import DraftVocabulary

Schema = TypeVar("Schema", bound=BaseModel)


def read_config(folder: Path, schema: type[Schema]) -> Schema:
    """config.json, checked against a schema.

    Raises:
        CheckpointError: the folder or the file is missing, or it lacks a key we need.
    """
    path = folder / "config.json"
    if not path.is_file():
        state = "does not exist" if not folder.exists() else "has no config.json"
        raise CheckpointError(f"{folder} {state}", hint="`slipstream zoo` lists drafters that ship")
    try:
        return schema(**json.loads(path.read_text()))
    except (json.JSONDecodeError, ValidationError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {first_line(error)}", "take the drafter from its source again"
        ) from error


def read_tensors(folder: Path, pickled: str = "pytorch_model.bin") -> dict[str, Tensor]:
    """The tensors of model.safetensors, else of a pickled state dict (tensors only, no code).

    Raises:
        CheckpointError: neither is there, or it is truncated.
    """
    path = folder / "model.safetensors"
    if path.is_file():
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is truncated or damaged: {first_line(error)}", hint="copy it again"
            ) from error
    path = folder / pickled
    if path.is_file():
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # unpickling fails in many ways
            raise CheckpointError(
                f"{path} cannot be read: {first_line(error)}",
                "take the drafter from its source again",
            ) from error
    raise CheckpointError(f"{folder} has neither model.safetensors nor {pickled}")


def fill(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Load tensors into a network made from config.json, as float32.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another size.
    """
    expected = model.state_dict()
    missing = sorted(set(expected) - set(tensors))
    unknown = sorted(set(tensors) - set(expected))
    if missing or unknown:
        raise CheckpointError(
            f"{folder}: missing tensors {missing or 'none'}, unknown tensors {unknown or 'none'}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{folder}: {name} is {list(tensor.shape)}, config.json says "
                f"{list(expected[name].shape)}"
            )
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def take_vocabulary(
    tensors: dict[str, Tensor], folder: Path, *, vocab_size: int, draft_vocab_size: int
) -> DraftVocabulary:
    """The draft vocabulary; its maps `d2t` and `t2d` are taken out of the tensors.

    Raises:
        CheckpointError: a reduced vocabulary without a map, or maps that contradict each other.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is not None:
        return DraftVocabulary.from_files(d2t, t2d, vocab_size)
    if draft_vocab_size == vocab_size:
        return DraftVocabulary.full(vocab_size)
    raise CheckpointError(
        f"{folder}: the head says {draft_vocab_size} ids, the target has {vocab_size}, and there "
        "is no d2t map",
        hint="the map is part of the training; take it from the folder the weights come from",
    )


def to_tensors(
    model: nn.Module, vocabulary: DraftVocabulary | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A network's weights in a number type, and the maps of a reduced vocabulary."""
    tensors = {
        name: tensor.detach().to(dtype).contiguous() for name, tensor in model.state_dict().items()
    }
    if vocabulary is not None and not vocabulary.is_full:
        tensors["d2t"] = vocabulary.offsets()
        tensors["t2d"] = vocabulary.mask()
    return tensors


def write(
    folder: Path,
    tensors: dict[str, Tensor],
    config: Mapping[str, Any],
    *,
    card: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write config.json, model.safetensors and card.json; the folder appears whole or not.

    Raises:
        OutputError: the folder exists and `overwrite` is off, or cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise OutputError(f"{folder} exists", "choose another --output")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error}") from error
    try:
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if card is not None:
            (temporary / "card.json").write_text(json.dumps(card, indent=2) + "\n")
        temporary.chmod(0o755)
        (temporary / "model.safetensors").chmod(0o644)
        if folder.exists():
            _swap(temporary, folder)
        else:
            temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_facts(facts: Iterable[tuple[str, object, object]], *, name: str, method: str) -> None:
    """Refuse a drafter made for another target.

    Args:
        facts: (what, the drafter's, the target's).
        name: the target's name.
        method: for the hint.

    Raises:
        DrafterMismatchError: one of them differs.
    """
    for what, ours, theirs in facts:
        if ours != theirs:
            raise DrafterMismatchError(
                f"the drafter was made for a target with {what} {ours}, {name} has {theirs}",
                f"train one with `slipstream train --method {method} --model {name} ...`",
            )


def first_line(error: Exception) -> str:
    """What an error says, without its later lines."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _swap(new: Path, old: Path) -> None:
    """Replace a folder; the old one is moved aside first and restored on failure."""
    aside = old.with_name(f".{old.name}-old")
    shutil.rmtree(aside, ignore_errors=True)
    old.replace(aside)
    try:
        new.replace(old)
    except OSError:
        aside.replace(old)
        raise
    shutil.rmtree(aside, ignore_errors=True)
