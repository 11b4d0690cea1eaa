"""From what a user calls a model to a folder that can be read, and errors for what cannot."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.errors import (
    CheckpointError,
    SlipstreamError,
    UnknownNameError,
    UnsupportedTargetError,
)
from slipstream.target import embedded

HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")


def resolve(name: str, convert: Callable[[Path, Path], None], *, variant: str = "") -> str:
    """A folder, or a Hugging Face id.

    Args:
        name: an embedded name, a folder, a `.gguf` file, or a Hugging Face id, which may name a
            revision: ORG/MODEL@REVISION.
        convert: writes a model folder from a GGUF file.
        variant: of what it writes; the folders of two lie side by side.

    Raises:
        CheckpointError: a folder or file that does not exist, or holds no model.
        UnknownNameError: no embedded model of this name.
        UnsupportedTargetError: a folder that holds an adapter alone, or what `convert` refuses.
    """
    ending = f"-{variant}" if variant else ""
    if name in embedded.CATALOGUE:
        return str(embedded.dequantised(embedded.locate(name), name + ending, convert))
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            raise UnsupportedTargetError(
                f"{name} is an adapter (LoRA), not a model",
                hint="merge it into its model and save that: peft's merge_and_unload()",
            )
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"model folder {name} has no config.json",
                hint="give the folder that holds config.json and the weights",
            )
        return str(path)
    if path.suffix == ".gguf" and path.is_file():
        layout = embedded.USERS_LAYOUT
        return str(embedded.dequantised(path, path.stem + ending, convert, layout=layout))
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")):
        raise CheckpointError(f"model {name} does not exist", hint=_choices())
    if path.exists():
        raise CheckpointError(f"model {name} is not a folder or a .gguf file", hint=_choices())
    if HUB_ID.fullmatch(name):
        return name
    if "/" in name:
        raise CheckpointError(f"model folder {name} does not exist", hint=_choices())
    raise UnknownNameError("model", name, embedded.CATALOGUE)


def pinned(source: str, revision: str | None) -> tuple[str, str | None]:
    """A source without its revision, and the revision.

    Args:
        source: as `resolve` gives it.
        revision: asked for beside the name; it wins over one in the name.

    Example:
        >>> pinned("org/model@abc", None), pinned("org/model", "v2")
        (('org/model', 'abc'), ('org/model', 'v2'))
    """
    found = None if Path(source).exists() else HUB_ID.fullmatch(source)
    return (found[1], revision or found[2]) if found else (source, revision)


def gguf_of(name: str) -> Path | None:
    """The GGUF file behind a name that `resolve` takes, if there is one."""
    if name in embedded.CATALOGUE:
        return embedded.locate(name)
    path = Path(name).expanduser()
    return path if path.suffix == ".gguf" and path.is_file() else None


def unreadable(name: str, error: Exception) -> SlipstreamError:
    """The error a user sees for what the loader raised."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if "Unrecognized configuration class" in reason:
        return UnsupportedTargetError(f"{name} is not a causal language model")
    is_local = name in embedded.CATALOGUE or Path(name).expanduser().exists()
    if not is_local and is_offline():
        return CheckpointError(
            f"cannot read model {name}: it is not in the local cache, and HF_HUB_OFFLINE is set",
            hint=f"unset HF_HUB_OFFLINE, or fetch it once with `hf download {name}`",
        )
    hint = "take the model from its source again" if is_local else _choices()
    return CheckpointError(f"cannot read model {name}: {reason[:300]}", hint=hint)


def is_offline() -> bool:
    """Whether the user told Hugging Face libraries to stay off the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def check_complete(name: str, report: dict[str, Any], num_layers: int) -> None:
    """Refuse weights that lack tensors, or hold layers the config does not count.

    Args:
        name: of the model.
        report: missing_keys, unexpected_keys and mismatched_keys of the loading.
        num_layers: L of the config.

    Raises:
        CheckpointError: config and weights disagree.
    """
    hint = "config.json and the weights must come from the same model"
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise CheckpointError(
            f"model {name} lacks {len(missing)} tensors its config asks for, first {missing[0]}",
            hint,
        )
    mismatched = sorted(str(key) for key in report.get("mismatched_keys", ()))
    if mismatched:
        raise CheckpointError(f"model {name} has tensors of another shape: {mismatched[0]}", hint)
    for key in sorted(report.get("unexpected_keys", ())):
        layer = re.search(r"\.layers\.(\d+)\.", key)
        if layer and int(layer[1]) >= num_layers:
            raise CheckpointError(
                f"model {name} holds {key}, but its config counts {num_layers} layers", hint
            )


def _choices() -> str:
    """What to give instead."""
    return "give a folder, a .gguf file, or one of: " + ", ".join(sorted(embedded.CATALOGUE))
