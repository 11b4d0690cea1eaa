"""The prompt sets that ship, by name, and what a bench needs of a prompt.

A set is a file of `assets/benchmark`, found by its name (`mt_bench`, `gsm8k`, `humaneval`, ...).
`NAME/FAMILY` keeps one family of it (`multilingual/chat`), and Spec-Bench's families have names of
their own (`translation`, `qa`, `rag`, ...). Only the first user turn is asked.

Paper: Xia et al. 2024, Spec-Bench, arXiv:2401.07851, section 4 (six task families).
Differs: the six are asked for one by one; its multi-turn family is `mt_bench`, first turns only.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from slipstream.errors import DataError, SettingError, UnknownNameError

SUFFIXES = (".jsonl.gz", ".jsonl")
SPEC_BENCH = "spec_bench"
FAMILIES = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Families of Spec-Bench that are tasks by their own name; its sixth is `mt_bench`."""
CODE_REQUEST = (
    "Complete the following Python function. Answer with the whole function.\n\n```python\n{}\n```"
)


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt of a task.

    Args:
        task: name of its task, as asked for.
        id: as the file names it.
        ids: tokens, template applied.
    """

    task: str
    id: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TaskText:
    """A prompt before the tokenizer: its task, id, family and first user turn."""

    task: str
    id: str
    family: str
    text: str


def folder() -> Path:
    """Where the shipped prompt sets are."""
    return Path(str(resources.files("slipstream"))) / "assets" / "benchmark"


def known(place: Path | None = None) -> dict[str, Path]:
    """Task name → file; a trailing `_test` or `_mix` of the file's name is optional."""
    place = place or folder()
    found: dict[str, Path] = {}
    for path in sorted(place.iterdir()) if place.is_dir() else ():
        for suffix in SUFFIXES:
            if path.name.endswith(suffix):
                name = path.name.removesuffix(suffix)
                found[name.removesuffix("_test").removesuffix("_mix")] = path
                break
    return found


def names(place: Path | None = None) -> list[str]:
    """Every task that can be asked for by one word."""
    sets = known(place)
    return sorted({*sets, *(FAMILIES if SPEC_BENCH in sets else ())})


def read_task(name: str, *, limit: int | None = None, place: Path | None = None) -> list[TaskText]:
    """The prompts of a task, spread evenly over its file when limited.

    Args:
        name: a task, a family of Spec-Bench, or TASK/FAMILY.
        limit: at most this many prompts.
        place: folder of prompt sets; the shipped one by default.

    Raises:
        UnknownNameError: no such task or family.
        SettingError: the limit is below 1.
        DataError: the file is damaged.
    """
    if limit is not None and limit < 1:
        raise SettingError("limit", limit, "1 or more", "leave --limit out for all prompts")
    tasks = known(place)
    task, _, family = (f"{SPEC_BENCH}/{name}" if name in FAMILIES else name).partition("/")
    key = task.removesuffix("_test").removesuffix("_mix")
    if key not in tasks:
        raise UnknownNameError("task", name, names(place))
    rows = [_text(name, key, row) for row in _rows(tasks[key])]
    if family:
        families = sorted({row.family for row in rows})
        rows = [row for row in rows if row.family == family or row.family.startswith(f"{family}/")]
        if not rows:
            raise UnknownNameError(f"family of {task}", family, families)
    if limit is None or limit >= len(rows):
        return rows
    return [rows[i * len(rows) // limit] for i in range(limit)]


def _rows(path: Path) -> list[dict]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"prompt set {path.name} is damaged: {error}", "reinstall the package"
        ) from error


def _text(task: str, key: str, row: dict) -> TaskText:
    text = row["turns"][0]
    if key == "humaneval":  # raw completion prompts: asked for as a chat turn
        text = CODE_REQUEST.format(text.rstrip())
    return TaskText(task, str(row["id"]), str(row.get("task", "")), text)


def ids_hash(prompts: Sequence[BenchPrompt]) -> str:
    """Short SHA-256 of all prompt ids in order: equal hashes, equal questions."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(list(prompt.ids)).encode())
    return digest.hexdigest()[:16]
