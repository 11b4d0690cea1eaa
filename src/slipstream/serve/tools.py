"""Tool calls: in which words a model writes them, and how they are read back from its text.

The chat template shows the model its tools and tells it how to call; that wording is the model's
dialect, and it is recognised by what stands in the template. Text that is not a call of a given
tool stays text. Where a call must come, or must follow its schema, a grammar holds the model to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.engine.text import overlap

ANYTHING = "/(.|\\n)*/"  # any text, in a grammar


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a family of models writes its calls: JSON between two marks.

    Args:
        sign: a piece of the chat templates that teach it.
        begin: the mark before calls; empty where the answer itself is the call.
        end: the mark after them; empty where they last to the answer's end.
        arguments: the key of a call's arguments.
        in_list: the calls stand in one JSON list.
    """

    sign: str
    begin: str = ""
    end: str = ""
    arguments: str = "arguments"
    in_list: bool = False


DIALECTS = (
    Dialect("<tool_call>", "<tool_call>", "</tool_call>"),  # Hermes, Qwen, SmolLM
    Dialect("[TOOL_CALLS]", "[TOOL_CALLS]", in_list=True),  # Mistral
    Dialect('"parameters": dictionary', arguments="parameters"),  # Llama 3
)
FOREIGN = ("<function=", "<arg_key>", "<tool_calls>", "[ARGS]")
"""Pieces of templates that teach another way with the same marks: Qwen3-Coder and GLM write XML,
Apriel and Hunyuan a list between marks of their own, newer Mistral the name before `[ARGS]`."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool the model calls.

    Args:
        name: of the tool.
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


def takes_tools(template: str) -> bool:
    """True when a chat template shows tools to the model.

    Example:
        >>> takes_tools("{% if tools %}{{ tools | tojson }}{% endif %}")
        True
    """
    return re.search(r"\btools\b", template) is not None


def dialect_of(template: str) -> Dialect | None:
    """How a template teaches its model to call; None when it is no dialect we read."""
    if any(piece in template for piece in FOREIGN):
        return None
    return next((dialect for dialect in DIALECTS if dialect.sign in template), None)


class CallReader:
    """Parts an answer's text, as it comes, into words and calls.

    Args:
        dialect: how calls are written.
        names: of the tools; anything else is no call.
        most: calls that are told; whatever comes after them is dropped.

    Example:
        >>> reader = CallReader(DIALECTS[0], {"f"})
        >>> reader.push('Well. <tool_call>{"name": "f", "argu')
        ('Well. ', [])
        >>> reader.push('ments": {}}</tool_call>')
        ('', [Call(name='f', arguments='{}')])
    """

    def __init__(self, dialect: Dialect, names: Collection[str], most: int | None = None) -> None:
        self._dialect, self._names, self._most = dialect, frozenset(names), most
        self._held = ""  # what may still become a mark, or the inside of an open call
        self._is_inside = False
        self._may_begin = True  # without a mark, only the answer's start can be a call
        self._is_after_call = False  # blanks after a call only part it from what follows
        self.num_calls = 0

    @property
    def is_full(self) -> bool:
        """True once all calls that are told have come: nothing follows them."""
        return self._most is not None and self.num_calls >= self._most

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Words and calls that became certain with this text."""
        self._held += text
        words, calls = "", []
        while not self.is_full:
            if not self._is_inside:
                words += self._before_call()
                if not self._is_inside:
                    return words, calls
            end = self._dialect.end
            body, mark, rest = self._held.partition(end) if end else (self._held, "", "")
            if not mark:
                return words, calls
            self._held, self._is_inside = rest, False
            found = self._read(body)
            self._is_after_call = found is not None
            if found is None:
                words += self._dialect.begin + body + end
            else:
                calls += found
        self._held = ""
        return words, calls

    def finish(self) -> tuple[str, list[Call]]:
        """What is left at the answer's end; a call that is whole but not closed counts."""
        held, was_inside = self._held, self._is_inside
        self._held, self._is_inside = "", False
        if not was_inside:
            return held, []
        found = self._read(held)
        return (self._dialect.begin + held, []) if found is None else ("", found)

    def _before_call(self) -> str:
        """The words up to the next call; afterwards the reader is inside it, if there is one."""
        begin = self._dialect.begin
        if self._is_after_call:
            self._held = self._held.lstrip()
            self._is_after_call = not self._held
        if not begin:
            return self._before_bare_call()
        words, mark, rest = self._held.partition(begin)
        if mark:
            self._held, self._is_inside = rest, True
            return words
        keep = len(self._held) - overlap(self._held, begin)
        words, self._held = self._held[:keep], self._held[keep:]
        return words

    def _before_bare_call(self) -> str:
        start = self._held.lstrip()
        if self._may_begin and start[:1] in ("", "{"):
            self._is_inside = start != ""
            return ""
        self._may_begin = False
        words, self._held = self._held, ""
        return words

    def _read(self, body: str) -> list[Call] | None:
        """The calls between two marks; None when they are none."""
        try:
            values = list(_values(body))
        except (ValueError, RecursionError):
            return None
        found = [self._call(value) for value in values]
        if not found or None in found:
            return None
        if self._most is not None:
            found = found[: max(0, self._most - self.num_calls)]
        self.num_calls += len(found)
        return found

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get(self._dialect.arguments)
        return Call(value["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None


def _values(body: str) -> Sequence[Any]:
    """JSON values one after the other; a list gives its members.

    Raises:
        ValueError: it is not JSON.
    """
    decoder = json.JSONDecoder(parse_constant=_refuse)
    values: list[Any] = []
    body = body.strip()
    while body:
        value, end = decoder.raw_decode(body)
        values += value if isinstance(value, list) else [value]
        body = body[end:].lstrip("; \t\r\n")
    return values


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def rules(
    dialect: Dialect,
    schemas: Mapping[str, Mapping[str, Any]],
    *,
    must: bool,
    most: int | None,
    token: int | None,
) -> str:
    """A Lark grammar, in llguidance's words, of answers that call as they should.

    Args:
        dialect: how calls are written.
        schemas: JSON schema of the arguments, by tool.
        must: the answer is calls and nothing else; otherwise there may be text, and calls in it.
        most: calls at most.
        token: id of the mark before calls, where it is a token of its own kind.
    """
    body = {"anyOf": [_schema(dialect, name) for name in schemas]}
    if dialect.in_list:
        body = {"type": "array", "items": body, "minItems": 1}
        body |= {} if most is None else {"maxItems": most}
    body["$defs"] = {name: _moved(schema, f"#/$defs/{name}") for name, schema in schemas.items()}
    begin = f"<[{token}]>" if token is not None else json.dumps(dialect.begin)
    end = f'"\\n"? {json.dumps(dialect.end)} "\\n"?' if dialect.end else ""
    lines = [f"calls: %json {json.dumps(body)}"]
    if not dialect.begin:
        start = "calls" if must else "calls | OTHER"
        lines.append("OTHER: /([^{ \\n](.|\\n)*)?/")
    elif must:
        start = "one" if dialect.in_list or most == 1 else "one+"
        lines.append(f'one: {begin} "\\n"? calls {end}')
    else:
        start = "one* TEXT"
        opening = f"TEXT {begin}" if token is not None else "opening"
        lines.append(f'one: {opening} "\\n"? calls {end}')
        lines.append(f"TEXT: {ANYTHING}")
        if token is None:
            lines.append(f"opening[lazy]: TEXT {begin}")
    return "\n".join([f"start: {start}", *lines])


def _schema(dialect: Dialect, name: str) -> dict[str, Any]:
    """The schema of one call; that of its arguments stands in the document's definitions."""
    properties = {"name": {"const": name}, dialect.arguments: {"$ref": f"#/$defs/{name}"}}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _moved(part: Any, place: str) -> Any:
    """A schema that is no document of its own any more: its references start at its new place."""
    if isinstance(part, list):
        return [_moved(one, place) for one in part]
    if not isinstance(part, dict):
        return part
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in part.items()
    }
