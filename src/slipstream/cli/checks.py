"""Checks of what a user typed, made before anything heavy is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from slipstream.errors import (
    OutputError,
    SettingError,
    UnknownNameError,
    UnsupportedTargetError,
)

DEFAULT_MODEL = "smollm2-135m"


def check_name(kind: str, name: str, known: tuple[str, ...]) -> None:
    """Raises UnknownNameError, with neighbours, unless the name is known."""
    if name not in known:
        raise UnknownNameError(kind, name, known)


def check_at_least_one(name: str, value: int | None) -> None:
    """Raises SettingError for a number below 1; None passes."""
    if value is not None and value < 1:
        raise SettingError(name, value, "1 or more", f"leave --{name} out for the default")


def check_model(model: str) -> None:
    """Raises UnsupportedTargetError when the model is written as a path and nothing is there."""
    looks_like_path = model.startswith((".", "/", "~")) or model.endswith(".gguf")
    if looks_like_path and not Path(model).expanduser().exists():
        raise UnsupportedTargetError(
            f"model {model} does not exist, expected a folder or a .gguf file",
            hint=f"check the path, or use --model {DEFAULT_MODEL}",
        )
    if not model:
        raise UnsupportedTargetError(
            "model is empty, expected a name, an id or a path",
            hint=f"use --model {DEFAULT_MODEL}",
        )


def set_thinking(tokenizer: Any, wish: str | None) -> None:
    """Turn a chat template's thinking mode on or off; None leaves the template's own.

    Raises:
        SettingError: the template has no such choice.
    """
    if wish is None:
        return
    if "enable_thinking" not in tokenizer.template_text:
        raise SettingError(
            "thinking", wish, "nothing: the chat template has no such mode", "leave --thinking out"
        )
    tokenizer.template_mode = {**tokenizer.template_mode, "enable_thinking": wish == "on"}


def check_output_folder(path: Path, *, resume: bool = False) -> None:
    """Raises OutputError when a folder cannot be made, or exists with something in it.

    Args:
        path: the folder a verb is about to write.
        resume: an existing folder is what we want.
    """
    if path.exists() and not path.is_dir():
        raise OutputError(f"output {path} is a file, expected a folder", "choose another --output")
    if path.is_dir() and not resume and any(path.iterdir()):
        raise OutputError(
            f"output {path} exists and is not empty", "choose another --output, or --resume"
        )
    _check_writable(path)


def check_output_file(path: Path, *, own_mark: str | None = None) -> None:
    """Raises OutputError when a file cannot be written, or is there and is not ours.

    Args:
        path: the file a verb is about to write.
        own_mark: text near the start of our own files of this kind, which may be replaced.
    """
    if path.is_dir():
        raise OutputError(f"output {path} is a folder, expected a file", "choose another --output")
    if path.exists():
        with path.open("rb") as file:
            start = file.read(4096).decode("utf-8", "replace")
        if own_mark is None or own_mark not in start:
            raise OutputError(f"output {path} exists", "choose another --output, or move the file")
    if not path.parent.is_dir():
        raise OutputError(f"output folder {path.parent} does not exist", f"mkdir -p {path.parent}")
    _check_writable(path)


def _check_writable(path: Path) -> None:
    """The nearest existing ancestor must be a folder that can be written."""
    place = path if path.is_dir() else path.parent
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise OutputError(
            f"output {path} cannot be written: {place} is not a writable folder",
            "choose another --output",
        )
