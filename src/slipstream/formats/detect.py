"""Which dialect is this folder, and how does it show?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError, UnknownNameError
from slipstream.formats import folder
from slipstream.formats.checkpoint import (
    Checkpoint,
    DFlashCheckpoint,
    Eagle3Checkpoint,
    EagleCheckpoint,
    Files,
    LanguageCheckpoint,
    PEagleCheckpoint,
    TargetFacts,
)
from slipstream.formats.dialect import Dialect
from slipstream.formats.dialects import ALL
from slipstream.formats.dialects.slipstream import LANGUAGE_TYPE


@dataclass(frozen=True, slots=True)
class Found:
    """A folder whose dialect is known.

    Args:
        dialect: of the folder.
        because: what shows it.
        files: its content.
    """

    dialect: Dialect
    because: str
    files: Files

    def load(self, target: TargetFacts | None = None) -> Checkpoint:
        """The checkpoint; see `Dialect.load`."""
        return self.dialect.load(self.files, target)

    def __str__(self) -> str:
        return f"{self.dialect.name} ({self.dialect.method}): {self.because}"


def detect(place: Path) -> Found:
    """Look at a folder.

    Raises:
        CheckpointError: it cannot be read, or is of no dialect we know.
    """
    files = folder.read_files(Path(place))
    is_speculators = "speculators_model_type" in files.config  # says itself what it is
    for dialect in ALL:
        if is_speculators and dialect.name != "speculators":
            continue
        because = dialect.claim(files)
        if because is not None:
            return Found(dialect, because, files)
    raise CheckpointError(_unknown(files), f"known dialects: {', '.join(names())}")


def read(place: Path, methods: tuple[str, ...], *, target: TargetFacts | None = None) -> Any:
    """The checkpoint of a folder that holds one of some methods' networks, in any dialect.

    Args:
        place: the folder.
        methods: whose networks will do, as dialects name them.
        target: facts about the target it serves.

    Raises:
        CheckpointError: it cannot be read, or holds another method's network.
    """
    found = detect(place)
    if found.dialect.method not in methods:
        raise CheckpointError(
            f"{place} holds {_SPOKEN[found.dialect.method]} drafter, so it is no "
            f"{_SPOKEN[methods[0]].split(' ', 1)[1]} drafter ({found.because})",
            f"give it to --method {found.dialect.method}",
        )
    return found.load(target)


def is_own_language_model(place: Path) -> bool:
    """True for a small network of ours, also as a whole model, judged by its config alone."""
    try:
        config = json.loads((Path(place) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    own = config.get("slipstream") or {}
    return config.get("model_type") == LANGUAGE_TYPE or own.get("method") == "chain"


def method_of(checkpoint: Checkpoint) -> str:
    """Whose network a checkpoint holds, as dialects name them."""
    if isinstance(checkpoint, DFlashCheckpoint):
        return "dflash" if checkpoint.model.path is None else "dspark"
    if isinstance(checkpoint, Eagle3Checkpoint):
        return "eagle3"
    if isinstance(checkpoint, PEagleCheckpoint):
        return "peagle"
    if isinstance(checkpoint, LanguageCheckpoint):
        return "chain"
    return "eagle" if isinstance(checkpoint, EagleCheckpoint) else "medusa"


def dialect_for(name: str, method: str) -> Dialect:
    """The dialect to write a method's network in.

    Raises:
        UnknownNameError: there is no such dialect.
        CheckpointError: it has no place for this method.
    """
    if name not in names():
        raise UnknownNameError("dialect", name, names())
    for dialect in ALL:
        if dialect.name == name and dialect.method == method and dialect.dump is not None:
            return dialect
    raise CheckpointError(
        f"dialect {name} has no place for {_SPOKEN[method]} drafter",
        f"choose --to {', '.join(d.name for d in ALL if d.method == method and d.dump)}",
    )


def names() -> tuple[str, ...]:
    """Every dialect's name, in order."""
    return tuple(dict.fromkeys(dialect.name for dialect in ALL))


_SPOKEN = {
    "eagle3": "an EAGLE-3",
    "peagle": "a P-EAGLE",
    "eagle": "an EAGLE-1",
    "medusa": "a Medusa",
    "dflash": "a DFlash",
    "dspark": "a DSpark",
    "chain": "a language-model",
}


def _unknown(files: Files) -> str:
    """What a folder of no known dialect holds."""
    architectures = ", ".join(files.config.get("architectures") or ()) or "none"
    kind = files.config.get("speculators_model_type")
    if kind:
        return f"{files.place} is a speculators {kind}, which no drafter here can run"
    shown = ", ".join(sorted(files.tensors)[:4])
    return (
        f"{files.place} is of no known dialect: architectures {architectures}, "
        f"{len(files.tensors)} tensors, first {shown}"
    )
