"""What every draft checkpoint on disk has in common: a config, tensors, a card, written whole.

A dialect (one file each in `dialects`) says which keys and tensors a folder holds; here are the
ways in which any folder can be wrong, told the same way for all of them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.errors import CheckpointError, OutputError
from slipstream.formats.checkpoint import Files
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


def read_files(folder: Path) -> Files:
    """Everything in a folder, whatever its dialect.

    Raises:
        CheckpointError: the folder, config.json or the tensors are missing or damaged.
    """
    heads = sorted(p for p in folder.glob("medusa_lm_head.*") if p.suffix in _READERS)
    weights = heads[0] if heads else _find_tensors(folder)
    path = folder / "config.json"
    config: dict[str, Any] = {}
    if path.is_file() or not heads:
        config = read_config(folder, _AnyConfig).model_dump()
    if weights is None:
        raise CheckpointError(f"{folder} has neither model.safetensors nor pytorch_model.bin")
    return Files(config, _read_one(weights), str(folder), weights.name)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors, in one file or several, else of pytorch_model.bin.

    Raises:
        CheckpointError: neither is there, or it is truncated.
    """
    path = _find_tensors(folder)
    if path is None:
        raise CheckpointError(f"{folder} has neither model.safetensors nor pytorch_model.bin")
    return _read_one(path)


def _find_tensors(folder: Path) -> Path | None:
    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_one(path: Path) -> dict[str, Tensor]:
    """Tensors of one file, or of those that an index names."""
    try:
        if path.suffix == ".json":
            parts = sorted(set(json.loads(path.read_text())["weight_map"].values()))
            return {k: t for part in parts for k, t in load_file(path.parent / part).items()}
        return _READERS[path.suffix](path)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} is truncated or damaged: {first_line(error)}", hint="copy it again"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # unpickling fails in many ways
        raise CheckpointError(
            f"{path} cannot be read: {first_line(error)}",
            "take the drafter from its source again",
        ) from error


def _unpickle(path: Path) -> dict[str, Tensor]:
    """A pickled state dict: tensors only, no code."""
    warnings.warn(
        f"{path.name} is a pickle: it is read as tensors only; `slipstream convert --from "
        f"{path.parent} --to slipstream ...` writes safetensors",
        stacklevel=2,
    )
    found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise CheckpointError(f"{path} holds no tensors by name, so it is no state dict")
    return found


_READERS = {".safetensors": load_file, ".bin": _unpickle, ".pt": _unpickle}


class _AnyConfig(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(extra="allow")


def fill(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path | str) -> None:
    """Load tensors into a network made from config.json, in the network's own type.

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
    model.load_state_dict(dict(tensors))  # copies them into the network's own type


def take_vocabulary(
    tensors: dict[str, Tensor], folder: Path | str, *, vocab_size: int, draft_vocab_size: int
) -> DraftVocabulary:
    """The draft vocabulary; its maps `d2t` and `t2d` are taken out of the tensors.

    Raises:
        CheckpointError: a reduced vocabulary without a map, a map for another number of ids, or
            maps that contradict each other.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is not None and d2t.numel() != draft_vocab_size:
        raise CheckpointError(
            f"{folder}: d2t maps {d2t.numel()} ids, the drafter says {draft_vocab_size}",
            "the map is part of the training; take it from the folder the weights come from",
        )
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
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    weights: str = "model.safetensors",
    card: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write config.json, the tensors and card.json; the folder appears whole or not.

    Args:
        folder: that appears.
        tensors: by name.
        config: for config.json.
        weights: name of the tensors' file; one that ends in .pt is a pickled state dict.
        card: for card.json, or None.
        overwrite: replace a folder that is there.

    Raises:
        OutputError: the folder exists and `overwrite` is off, or cannot be written.
    """
    with prepared(folder, overwrite=overwrite) as place:
        place.mkdir(exist_ok=True)
        if weights.endswith(".pt"):
            torch.save(dict(tensors), place / weights)
        else:
            save_file(dict(tensors), place / weights, metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if card is not None:
            (place / "card.json").write_text(json.dumps(card, indent=2) + "\n")
        (place / weights).chmod(0o644)


def refuse_existing(folder: Path, *, overwrite: bool) -> None:
    """Raises OutputError for a folder that is there and may not be replaced."""
    if folder.exists() and not overwrite:
        raise OutputError(f"{folder} exists", "choose another --output")


@contextmanager
def prepared(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A place beside a folder, which takes the folder's name when all went well.

    Args:
        folder: that appears.
        overwrite: replace a folder that is there.

    Yields:
        A path at which nothing is yet; whatever is put there is kept, or deleted on an error.

    Raises:
        OutputError: the folder exists and `overwrite` is off, or cannot be written.
    """
    folder = Path(folder)
    refuse_existing(folder, overwrite=overwrite)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error}") from error
    place = aside / folder.name
    try:
        yield place
        if folder.exists():
            _swap(place, folder)
        else:
            place.replace(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def first_line(error: Exception) -> str:
    """What an error says, without its later lines; of a schema's, the first key that is wrong."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return ": ".join([*map(str, first["loc"]), first["msg"].lower()])
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
