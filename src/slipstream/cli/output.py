"""How the verbs speak: one JSON value for programs, a console for people, files whole or not.

Standard output carries the answer alone; logs, bars and summaries go to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@contextlib.contextmanager
def json_output(is_wanted: bool) -> Iterator[JsonWriter]:
    """Within it everything printed goes to standard error; the writer alone reaches stdout."""
    writer = JsonWriter(sys.stdout)
    if not is_wanted:
        yield writer
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield writer


@dataclass(slots=True)
class JsonWriter:
    """Writes one JSON value, once, to the real standard output."""

    stream: Any
    is_done: bool = False

    def write(self, value: object) -> None:
        """Print the value as one line of UTF-8 JSON (NaN is not JSON and becomes null)."""
        assert not self.is_done, "one JSON value per run"
        self.is_done = True
        self.stream.write(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False) + "\n")
        self.stream.flush()


def _finite(value: object) -> object:
    """The value with NaN and infinities as null, tuples as lists and paths as text."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def console() -> Console:
    """Where people are spoken to beside the answer itself: standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def tell(text: str) -> None:
    """A line on standard error; where that cannot be written, a full disk say, work goes on."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def quiet_libraries() -> None:
    """Keep other packages' banners, bars and warnings out of the user's way."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for package in ("torch", "transformers", "huggingface_hub", "gguf"):
        warnings.filterwarnings("ignore", module=rf"{package}(\.|$)")
