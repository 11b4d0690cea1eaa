"""The prompts a user gave: one text, or the rows of a JSONL file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.cli.checks import check_at_least_one
from slipstream.errors import DataError, SettingError

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, turn by turn; the answers between the turns are the model's own.

    Args:
        turns: user texts in order; one unless every turn was asked for.
        system: system message, or None.
    """

    turns: tuple[str, ...]
    system: str | None = None

    def opening(self) -> list[Message]:
        """The messages before the first user turn."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def first(self, *, raw: bool = False) -> str | list[Message]:
        """The first turn as `Engine.generate` takes it."""
        return self.turns[0] if raw else [*self.opening(), user(self.turns[0])]


def user(text: str) -> Message:
    """A user turn."""
    return {"role": "user", "content": text}


def read_prompts(
    prompt: str | None,
    file: Path | None,
    *,
    limit: int | None = None,
    all_turns: bool = False,
    raw: bool = False,
) -> list[Prompt]:
    """The prompts of `--prompt` or `--prompts`.

    Args:
        prompt: text of `--prompt`, or None.
        file: path of `--prompts`, or None.
        limit: read this many rows only.
        all_turns: keep every user turn of a row, not the first alone.
        raw: prompts go to the model without a chat template.

    Raises:
        SettingError: not exactly one source, a limit below 1, a choice of rows or turns of a
            single prompt, or raw text with several turns.
        DataError: an empty prompt, or a file that cannot be read; names the line.
    """
    check_at_least_one("limit", limit)
    if all_turns and raw:
        raise SettingError(
            "all-turns", "on", "off with --raw", "turns need the chat template: drop one of the two"
        )
    if (prompt is None) == (file is None):
        found = "missing" if prompt is None else "given twice"
        raise SettingError("prompt", found, "one source", "use --prompt TEXT or --prompts FILE")
    if prompt is not None:
        if limit is not None or all_turns:
            name, found = ("all-turns", "on") if limit is None else ("limit", limit)
            raise SettingError(name, found, "nothing with --prompt: it is one turn", "leave it out")
        if not prompt:
            raise DataError("the prompt is empty, expected text", 'use --prompt "your question"')
        return [Prompt((_clean(prompt),))]
    assert file is not None
    return _read_file(file, limit, all_turns)


def _read_file(path: Path, limit: int | None, all_turns: bool) -> list[Prompt]:
    _check_file(path)
    from slipstream.data.conversations import read_rows  # imports torch

    prompts = []
    for row in read_rows(path, limit=limit):
        turns = tuple(m.content for m in row.messages if m.role == "user")
        if not turns or not turns[0]:
            raise DataError(
                f"{path}, line {row.line}: no user turn to answer, expected text",
                "fix or delete the line",
            )
        system = next((m.content for m in row.messages if m.role == "system"), None)
        prompts.append(Prompt(turns if all_turns else turns[:1], system))
    return prompts


def _check_file(path: Path) -> None:
    """What can be told without opening every line."""
    if not path.exists():
        raise DataError(f"{path} does not exist, expected a JSONL file", "check --prompts")
    if path.is_dir():
        raise DataError(f"{path} is a folder, expected a JSONL file", "name the file inside it")
    if path.stat().st_size == 0:
        raise DataError(
            f"{path} is empty, expected at least one line",
            'write one JSON object per line, such as {"prompt": "Hello"}',
        )


def _clean(text: str) -> str:
    """Text that UTF-8 can hold: undecodable bytes of the command line become U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
