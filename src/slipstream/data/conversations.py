"""Read chats from JSONL: the dialects people have, one normalised `Conversation` out.

Accepted, one JSON object per line (optionally gzipped, name ending in .gz):

    {"messages": [{"role": "user", "content": "..."}, ...]}
    {"conversations": [{"role": "user", "content": "..."}, ...]}
    {"conversations": [{"from": "human", "value": "..."}, ...]}
    {"turns": ["first user turn", ...]}                       benchmark prompts
    {"prompt": "one user turn"}                               plain prompts
    {"prompt_ids": [...], "response_ids": [...], "messages"}  answers of `data regenerate`

A byte order mark, CRLF line ends and blank lines are fine. Anything else is a `DataError` that
names the file and the line.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from slipstream.data.supervise import Supervised, supervise
from slipstream.errors import DataError

__all__ = ["Conversation", "Message", "Supervised", "read_rows", "supervise"]

ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
SHAPES = "messages, conversations, turns, prompt, or prompt_ids with response_ids"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat.

    Args:
        role: user, assistant, system, developer or tool.
        content: its text.
        reasoning: the assistant's thoughts, where the data keeps them apart.
        tool_calls: what the assistant calls, as OpenAI describes it but for the arguments, which
            are an object: templates write them themselves.
        tool_call_id: of the call that a tool answers.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[Any, ...] = ()
    tool_call_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The form chat templates read."""
        plain: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            plain["reasoning_content"] = self.reasoning
        if self.tool_calls:
            plain["tool_calls"] = list(self.tool_calls)
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Message:
        """The turn that `to_dict` wrote."""
        return cls(
            plain["role"],
            plain["content"],
            plain.get("reasoning_content"),
            tuple(plain.get("tool_calls", ())),
            plain.get("tool_call_id"),
        )


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row of a data file.

    Args:
        id: from the row, or "<file stem>:<line>".
        messages: the turns in order; user turns only for prompts.
        source: where the row came from, from its `source` or `task`, possibly empty.
        finish: "stop" or "length" where an answer's end is known, else None.
        prompt_ids: tokens of the prompt, for rows that were tokenised when answered.
        response_ids: tokens of the answer, end-of-turn token included.
        temperature: at which the answer was sampled; 0 is greedy.
        is_retokenised: the answer came as text: its ids may not be those that were emitted.
        line: line number in the file, from 1.
    """

    id: str
    messages: tuple[Message, ...]
    source: str = ""
    finish: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    response_ids: tuple[int, ...] | None = None
    temperature: float = 0.0
    is_retokenised: bool = False
    line: int = 0

    @property
    def is_tokenised(self) -> bool:
        """True where the row carries its own token ids."""
        return self.prompt_ids is not None

    @property
    def has_answer(self) -> bool:
        """True where there is assistant text to learn from."""
        return self.is_tokenised or any(m.role == "assistant" for m in self.messages)

    @property
    def user_turns(self) -> tuple[Message, ...]:
        """System and user turns, the assistant's left out: what `regenerate` answers."""
        return tuple(m for m in self.messages if m.role in ("system", "developer", "user"))


def read_rows(path: str | Path, *, limit: int | None = None) -> Iterator[Conversation]:
    """Read a JSONL file row by row, in any accepted dialect.

    Args:
        path: the file; read as UTF-8, gunzipped where its name ends in .gz.
        limit: stop after this many rows; None reads all.

    Raises:
        DataError: the file is missing, empty or not UTF-8, or a line cannot be read as a row.
    """
    path = Path(path)
    num_rows = 0
    try:
        with _open(path) as lines:
            for number, raw in enumerate(lines, start=1):
                text = _decode(raw, path, number)
                if not text:
                    continue
                if limit is not None and num_rows >= limit:
                    return
                yield _parse(text, path, number)
                num_rows += 1
    except (OSError, EOFError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"{path}: cannot be read: {what}", "give the path of a JSONL file"
        ) from error
    if num_rows == 0:
        raise DataError(
            f"{path}: the file has no rows, expected at least one line",
            f"write one JSON object per line with {SHAPES}",
        )


def _open(path: Path) -> BinaryIO:
    if path.name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _decode(raw: bytes, path: Path, number: int) -> str:
    """Lines are cut at the newline byte alone: U+2028 and its kind inside a string do no harm."""
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {number}: not UTF-8 (byte {error.start}: {raw[error.start]:#04x})",
            "save the file as UTF-8",
        ) from error


def _parse(text: str, path: Path, number: int) -> Conversation:
    where = f"{path}, line {number}"
    try:
        row = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        hint = "fix or delete the line; each line must be one complete JSON object"
        if text.startswith("["):
            hint = "this looks like one JSON array; write its items one per line instead"
        reason = getattr(error, "msg", "nested too deeply")
        column = getattr(error, "colno", 1)
        raise DataError(
            f"{where}: not valid JSON ({reason} at column {column}): found {_short(text)}", hint
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: found {_kind(row)}, expected a JSON object with {SHAPES}",
            "write one JSON object per line",
        )
    return _conversation(row, where, default_id=f"{path.name.split('.')[0]}:{number}", line=number)


def _conversation(row: dict[str, Any], where: str, *, default_id: str, line: int) -> Conversation:
    identity = row.get("id")
    finish = row.get("finish")
    prompt_ids = response_ids = None
    if "prompt_ids" in row or "response_ids" in row:
        prompt_ids = _ids(row, "prompt_ids", where)
        response_ids = _ids(row, "response_ids", where)
        if not prompt_ids:
            raise DataError(
                f"{where}: prompt_ids is empty, expected at least one token",
                "delete the row; `slipstream data regenerate` writes such rows whole",
            )
    messages = _messages(row, where, is_required=prompt_ids is None)
    return Conversation(
        id=default_id if identity is None else str(identity),
        messages=messages,
        source=str(row.get("source") or row.get("task") or ""),
        finish=None if finish is None else str(finish),
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        temperature=_number(row, "temperature", where),
        is_retokenised=bool(row.get("retokenised")),
        line=line,
    )


def _messages(row: dict[str, Any], where: str, *, is_required: bool) -> tuple[Message, ...]:
    for key in ("messages", "conversations"):
        if key in row:
            turns = _list(row[key], key, where, is_required=is_required)
            return tuple(_message(turn, f"{key}[{i}]", where) for i, turn in enumerate(turns))
    if "turns" in row:
        turns = _list(row["turns"], "turns", where)
        return tuple(Message("user", _text(t, f"turns[{i}]", where)) for i, t in enumerate(turns))
    if "prompt" in row:
        return (Message("user", _text(row["prompt"], "prompt", where)),)
    if not is_required:
        return ()
    if "text" in row:
        raise DataError(
            f"{where}: found pre-formatted 'text', expected {SHAPES}",
            "give the chat as messages: which part of a flat text is the answer cannot be told",
        )
    found = ", ".join(sorted(map(str, row))) or "no keys"
    raise DataError(
        f"{where}: found {found}, expected {SHAPES}",
        'write {"messages": [{"role": "user", "content": "..."}]}',
    )


def _list(value: object, key: str, where: str, *, is_required: bool = True) -> list[Any]:
    if not isinstance(value, list) or (is_required and not value):
        found = "an empty list" if value == [] else _kind(value)
        raise DataError(
            f"{where}: {key} is {found}, expected a list of at least one turn", "fix the line"
        )
    return value


def _message(turn: object, key: str, where: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(
            f"{where}: {key} is {_kind(turn)}, expected an object",
            'write each turn as {"role": "user", "content": "..."}',
        )
    role_key = "role" if "role" in turn else "from"
    text_key = "content" if "content" in turn else "value"
    if role_key not in turn or text_key not in turn:
        found = ", ".join(sorted(map(str, turn))) or "nothing"
        raise DataError(
            f"{where}: {key} has {found}, expected role and content, or from and value",
            'write each turn as {"role": "user", "content": "..."}',
        )
    role = ROLES.get(str(turn[role_key]).lower())
    if role is None:
        raise DataError(
            f"{where}: {key} has role {turn[role_key]!r}, expected one of {', '.join(ROLES)}",
            "rename the role",
        )
    reasoning, calls = turn.get("reasoning_content"), turn.get("tool_calls") or []
    answered = turn.get("tool_call_id")
    if not isinstance(calls, list):
        raise DataError(
            f"{where}: {key}.tool_calls is {_kind(calls)}, expected a list", "fix the line"
        )
    said = "" if calls and turn[text_key] is None else turn[text_key]
    return Message(
        role,
        _text(said, f"{key}.{text_key}", where),
        None if reasoning is None else _text(reasoning, f"{key}.reasoning_content", where),
        tuple(_call(call, f"{key}.tool_calls", where) for call in calls),
        None if answered is None else _text(answered, f"{key}.tool_call_id", where),
    )


def _call(call: object, key: str, where: str) -> object:
    """A call as templates read it: OpenAI's arguments are a text of JSON, theirs the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        raise DataError(f"{where}: arguments in {key} are no JSON", "fix the line") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _text(value: object, key: str, where: str) -> str:
    """A string, or a list of text parts; lone surrogates become U+FFFD."""
    if isinstance(value, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in value
    ):
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key} is {_kind(value)}, expected text", "fix the line")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return value


def _ids(row: dict[str, Any], key: str, where: str) -> tuple[int, ...]:
    value = row.get(key)
    if not isinstance(value, list) or any(type(i) is not int or i < 0 for i in value):
        found = "missing" if key not in row else _kind(value)
        raise DataError(
            f"{where}: {key} is {found}, expected a list of token ids (integers, 0 or more)",
            "rows with token ids need both prompt_ids and response_ids",
        )
    return tuple(value)


def _number(row: dict[str, Any], key: str, where: str) -> float:
    value = row.get(key) or 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{where}: {key} is {_kind(value)}, expected a number", "fix the line")
    return float(value)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), f"the number {value}")


def _short(text: str, width: int = 60) -> str:
    return repr(text if len(text) <= width else text[:width] + "...")
