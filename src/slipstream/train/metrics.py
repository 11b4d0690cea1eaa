"""`metrics.jsonl`: one record a step, whole after a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path


class Metrics:
    """`metrics.jsonl`: one record a step; records after the resumed step are dropped."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        kept = [line for step, line in self._read() if step <= resumed_step]
        temporary = path.with_suffix(".partial")
        temporary.write_text("".join(kept))
        temporary.replace(path)

    def append(self, record: dict[str, object]) -> None:
        """Write one line, flushed."""
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _read(self) -> Iterator[tuple[int, str]]:
        if not self.path.is_file():
            return
        for line in self.path.read_text().splitlines(keepends=True):
            try:
                yield json.loads(line)["step"], line
            except (json.JSONDecodeError, KeyError):
                continue  # a line cut short by a kill


def scalars(record: dict[str, object]) -> dict[str, float]:
    """A record as trackers want it: numbers by name, lists one entry a depth.

    Example:
        >>> scalars({"loss": 2.0, "reach": [0.5, 0.2], "cause": "template"})
        {'loss': 2.0, 'reach/1': 0.5, 'reach/2': 0.2}
    """
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            found |= {f"{name}/{depth}": float(x) for depth, x in enumerate(value, start=1)}
        elif isinstance(value, int | float):
            found[name] = float(value)
    return found
