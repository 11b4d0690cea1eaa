"""Who said what, and what may be called: the messages and tools of a chat, as OpenAI has them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

Text = Annotated[str, Field(max_length=4_000_000)]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
MOST_LEVELS = 100  # of lists and objects in each other
MOST_FIELDS = 200  # of an object that has fields of known names


def sound(value: Any) -> Any:
    """JSON that templates and grammars can take: texts that can be encoded, not nested too deeply.

    Raises:
        ValueError: it is not.
    """
    left = [(value, 1)]
    while left:
        each, level = left.pop()
        if level > MOST_LEVELS:
            raise ValueError(f"nested more than {MOST_LEVELS} levels deep")
        if isinstance(each, str):
            try:
                each.encode()
            except UnicodeEncodeError:
                raise ValueError("a text holds half a surrogate pair") from None
        elif isinstance(each, dict):
            left += [(key, level) for key in each]
            left += [(one, level + 1) for one in each.values()]
        elif isinstance(each, list):
            left += [(one, level + 1) for one in each]
    return value


JsonObject = Annotated[dict[str, object], AfterValidator(sound)]


class Strict(BaseModel):
    """Refuses fields that it does not have. A null is a field that was left out, as for OpenAI."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MOST_FIELDS:  # before each unknown one is told of
            raise ValueError(f"an object of {len(value)} fields")
        return {key: one for key, one in value.items() if one is not None or key == "content"}


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("parts")],
    Discriminator(lambda value: "parts" if isinstance(value, list) else "text"),
]


class _Turn(Strict):
    content: Content | None

    def plain(self) -> dict[str, Any]:
        """Role and text, as chat templates read them."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class Said(_Turn):
    """A turn of the user, or instructions, which OpenAI's newer clients call the developer's."""

    role: Literal["system", "developer", "user"]
    content: Content

    def plain(self) -> dict[str, Any]:
        """Role and text, under the names that templates know."""
        role = "system" if self.role == "developer" else self.role
        return super().plain() | {"role": role}


class CalledFunction(Strict):
    """Which function was called, and how."""

    name: FunctionName
    arguments: Text

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, arguments: str) -> str:
        try:
            value = json.loads(arguments)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        sound(value)
        return arguments


class ToolCall(Strict):
    """A call that the model made."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """As chat templates read it, which write the arguments themselves."""
        arguments = json.loads(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Answered(_Turn):
    """A turn of the model; clients send back what they were sent."""

    role: Literal["assistant"]
    content: Content | None = None
    refusal: None = None
    tool_calls: (
        Annotated[list[ToolCall], Field(min_length=1, max_length=128, fail_fast=True)] | None
    ) = None

    def plain(self) -> dict[str, Any]:
        """Role, text and calls."""
        calls = [call.plain() for call in self.tool_calls or ()]
        return super().plain() | ({"tool_calls": calls} if calls else {})


class Returned(_Turn):
    """What a tool gave back."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, Field(max_length=256)]

    def plain(self) -> dict[str, Any]:
        """Role, text and the call it belongs to."""
        return super().plain() | {"tool_call_id": self.tool_call_id}


Message = Annotated[Said | Answered | Returned, Field(discriminator="role")]


class Function(Strict):
    """A function the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(None, description="calls follow `parameters`, by a grammar")


class Tool(Strict):
    """A tool the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The function to call."""

    name: FunctionName


class NamedTool(Strict):
    """The tool to call."""

    type: Literal["function"]
    function: NamedFunction
