"""The answers file on disk: appended row by row, valid after a kill at any moment.

One JSON object per line: `id`, `source`, `prompt_ids`, `response_ids` (end-of-turn token
included), `finish` ("stop" or "length"), `messages`, `temperature` where it is not 0, and
`retokenised` where the answer came as text, so that its ids may not be those emitted. Beside it,
`<name>.settings.json` says what the answers were made with, so that a resumed run cannot mix.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from slipstream.data.conversations import Message
from slipstream.data.hold import Hold
from slipstream.errors import DataError, OutputError


class AnswersFile:
    """Appends answers; knows which ids are there already.

    Args:
        path: the JSONL file.
        settings: what the answers are made with; compared when resuming.
        resume: go on in an existing file; without it, an existing file is an error.

    Raises:
        OutputError: the file exists and `resume` is off, was made with other settings, is being
            written by another process, or cannot be written.
        DataError: a line of the existing file is not one of ours.
    """

    def __init__(self, path: str | Path, *, settings: Mapping[str, Any], resume: bool) -> None:
        self.path = Path(path)
        self._where: dict[str, int] = {}
        if self.path.exists() and not resume:
            raise OutputError(
                f"output {self.path} exists", "go on with --resume, or choose another --output"
            )
        if self.path.exists() and not self.path.is_file():
            raise OutputError(f"output {self.path} is not a file", "choose another --output")
        try:
            if self.path.exists():
                self._check_settings(settings)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with ExitStack() as opened:  # all of it, or nothing stays open and held
                self._file = opened.enter_context(self.path.open("ab"))
                opened.enter_context(Hold(self.path))
                self._scan()
                self._file.seek(0, os.SEEK_END)  # half a row may have gone
                self._write_settings(settings)
                self._opened = opened.pop_all()
        except OSError as error:
            raise OutputError(
                f"output {self.path} cannot be written: {error.strerror}", "choose another --output"
            ) from error

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._where

    def __len__(self) -> int:
        return len(self._where)

    def __enter__(self) -> AnswersFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.close()

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size

    @property
    def settings_path(self) -> Path:
        """Where the settings are."""
        return settings_path(self.path)

    def append(
        self,
        row_id: str,
        *,
        source: str,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        finish: str,
        messages: Sequence[Message],
        temperature: float = 0.0,
        is_retokenised: bool = False,
    ) -> None:
        """Write one row whole and flush it.

        Raises:
            OutputError: the disk is full or gone.
        """
        row = {
            "id": row_id,
            "source": source,
            "prompt_ids": list(prompt_ids),
            "response_ids": list(response_ids),
            "finish": finish,
            "messages": [message.to_dict() for message in messages],
        }
        if temperature:
            row["temperature"] = temperature
        if is_retokenised:
            row["retokenised"] = True
        start = self._file.tell()
        try:
            self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(
                f"{self.path}: row {row_id} could not be written: {error.strerror}",
                "make room, then go on with --resume",
            ) from error
        self._where[row_id] = start

    def messages(self, row_id: str) -> list[dict[str, Any]]:
        """The chat of a stored row, its answer last."""
        with self.path.open("rb") as file:
            file.seek(self._where[row_id])
            return json.loads(file.readline())["messages"]

    def _scan(self) -> None:
        """Index the rows; a last line without its newline is half a row and goes."""
        start = 0
        with self.path.open("r+b") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    file.truncate(start)
                    return
                if line.strip():
                    self._where[self._id_of(line, number)] = start
                start += len(line)

    def _id_of(self, line: bytes, number: int) -> str:
        try:
            row = json.loads(line)
            if "response_ids" in row:
                return str(row["id"])
        except (ValueError, KeyError, TypeError):
            pass
        raise DataError(
            f"{self.path}, line {number}: not a row of an answers file",
            "delete the line, or choose another --output",
        )

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        found = read_settings(self.path)
        for name, value in settings.items():
            if name in found and found[name] != value:
                raise OutputError(
                    f"{self.path} was made with {name} {found[name]}, this run has {value}",
                    "resume with the same settings, or choose another --output",
                )

    def _write_settings(self, settings: Mapping[str, Any]) -> None:
        temporary = self.settings_path.with_name(f".{self.settings_path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(dict(settings), indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.settings_path)


def settings_path(answers: Path) -> Path:
    """Where the settings of an answers file are."""
    return answers.with_name(answers.name + ".settings.json")


def read_settings(answers: Path) -> dict[str, Any]:
    """What answers were made with; empty where nothing says so."""
    try:
        found = json.loads(settings_path(answers).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
