"""What may be asked: OpenAI's fields that are honoured, vLLM's names for the others, ours.

A field that is not here is refused by name: an answer that silently ignored it would be wrong.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)

from slipstream.engine.shaping import Penalties
from slipstream.serve.messages import (
    Function,
    JsonObject,
    Message,
    NamedTool,
    Strict,
    Text,
    Tool,
)

StopString = Annotated[str, Field(min_length=1, max_length=256)]
Id = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
IdKey = Annotated[int, Field(ge=0, lt=2**31)]  # keys of JSON objects are texts
Ids = Annotated[
    list[Id], Field(fail_fast=True)
]  # a long list that is wrong throughout is told of once
LARGEST_SEED = 2**63
MOST_BIASED = 4096
MOST_ANSWERS = 64  # of one HTTP request


def _kind_of_prompt(value: Any) -> str:
    """Which of the four it is meant to be, by its first element: only that one is tried."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else 0
    return {list: "lists", str: "texts"}.get(type(first), "ids")


def _kind_of_stop(value: Any) -> str:
    return "texts" if isinstance(value, list) else "text"


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MOST_BIASED:
        raise ValueError(f"{len(value)} tokens, at most {MOST_BIASED} can be biased")
    return value


Bias = Annotated[
    dict[IdKey, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MOST_BIASED),
    BeforeValidator(_few),  # before thousands of wrong ones are told of one by one
]
Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[Text], Field(max_length=MOST_ANSWERS, fail_fast=True), Tag("texts")]
    | Annotated[list[Ids], Field(max_length=MOST_ANSWERS, fail_fast=True), Tag("lists")],
    Discriminator(_kind_of_prompt),
]
Stop = Annotated[
    Annotated[StopString, Tag("text")]
    | Annotated[list[StopString], Field(max_length=16, fail_fast=True), Tag("texts")],
    Discriminator(_kind_of_stop),
]


class StreamOptions(Strict):
    """How a stream ends."""

    include_usage: bool = False


class JsonSchema(Strict):
    """A JSON schema the answer must satisfy."""

    name: str = "answer"
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    """Free text."""

    type: Literal["text"]


class JsonFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(Strict):
    """Text that a regular expression matches from end to end; an extension."""

    type: Literal["regex"]
    regex: Annotated[str, Field(min_length=1, max_length=10_000)]


ResponseFormat = Annotated[
    TextFormat | JsonFormat | SchemaFormat | RegexFormat, Field(discriminator="type")
]


class Asked(Strict):
    """What both endpoints take."""

    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: Bias | None = None
    seed: int | None = Field(None, ge=-LARGEST_SEED, lt=LARGEST_SEED)
    stop: Stop | None = None
    stop_token_ids: Ids = Field([], max_length=64)
    n: int = Field(1, ge=1, le=16)
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    method: str | None = Field(None, description="'none' decodes this request plainly")
    budget: int | None = Field(None, ge=0, lt=2**31, description="drafted nodes a step may have")
    return_token_ids: bool = False
    skip_special_tokens: bool = True

    @field_validator("stream_options", "mark_drafted", check_fields=False)
    @classmethod
    def _needs_a_stream(cls, value: Any, info: ValidationInfo) -> Any:
        if value and not info.data.get("stream"):
            raise ValueError("it goes with stream")
        return value

    @property
    def has_form(self) -> bool:
        """True when the answer may have to be held to a form, whose rules take time to compile."""
        tools = getattr(self, "tools", None)
        return bool(tools) or self.response_format not in (None, TextFormat(type="text"))

    def stops(self) -> list[str | int]:
        """Stop strings and ids, as the engine takes them."""
        strings = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        return [*strings, *self.stop_token_ids]

    def penalties(self) -> Penalties:
        """Changes of the logits."""
        return Penalties(
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.logit_bias or {},
            self.min_p,
        )


class ChatAsked(Asked):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=4096, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    mark_drafted: bool = Field(False, description="tell of each token whether it was drafted")
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and not info.data.get("logprobs"):
            raise ValueError("it goes with logprobs")
        return value

    @field_validator("tool_choice", "parallel_tool_calls")
    @classmethod
    def _needs_tools(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("tools") is None:
            raise ValueError("it goes with tools")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _names_a_tool(cls, value: Any, info: ValidationInfo) -> Any:
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        if isinstance(value, NamedTool) and value.function.name not in names:
            raise ValueError(f"no tool is called {value.function.name}")
        return value

    @property
    def num_answers(self) -> int:
        """Choices."""
        return self.n

    @property
    def callable(self) -> list[Function]:
        """The functions this answer may call."""
        choice = self.tool_choice
        functions = [tool.function for tool in self.tools or () if choice != "none"]
        if isinstance(choice, NamedTool):
            functions = [one for one in functions if one.name == choice.function.name]
        return functions

    @property
    def must_call(self) -> bool:
        """True when the answer has to be a call."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def most_calls(self) -> int | None:
        """Calls it may have; None sets no bound."""
        return 1 if self.parallel_tool_calls is False else None

    @property
    def limit(self) -> int | None:
        """Tokens at most, if a limit was given."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens to tell; None without log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionAsked(Asked):
    """The body of `/v1/completions`."""

    prompt: Prompt
    max_tokens: int = Field(16, ge=1, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def limit(self) -> int:
        """Tokens at most."""
        return self.max_tokens

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens to tell; None without log-probabilities."""
        return self.logprobs

    @property
    def num_answers(self) -> int:
        """Choices of all prompts together."""
        return self.n * len(self.prompts())

    def prompts(self) -> list[str | list[int]]:
        """One or many, as a list."""
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        return list(given)
