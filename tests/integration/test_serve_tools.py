"""Tool calls through the official client: shown, made, read back, forced, and sent back again."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest

from chats import PLAIN, TOOLS
from serving import running, tiny_engine

ASKED = [{"role": "user", "content": "Weather in Rome?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string", "enum": ["Rome", "Oslo"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Tells the time."}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALLS = f'Well. {CALL}\n<tool_call>{{"name": "clock", "arguments": {{}}}}</tool_call>\n'


@contextmanager
def client_of(says: str | None = None, template: str = TOOLS) -> Iterator[openai.OpenAI]:
    engine = tiny_engine(max_length=2500, template=template, says=says)
    with running(engine, num_rows=2) as served:
        yield openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0)


@pytest.fixture(scope="module")
def talker() -> Iterator[openai.OpenAI]:
    """Its model says two calls."""
    with client_of(CALLS) as client:
        yield client


@pytest.fixture(scope="module")
def babbler() -> Iterator[openai.OpenAI]:
    """Its model says letters at random."""
    with client_of() as client:
        yield client


def ask(client: openai.OpenAI, **options: object) -> object:
    defaults = {"model": "tiny", "messages": ASKED, "tools": [WEATHER, CLOCK], "temperature": 0}
    return client.chat.completions.create(**(defaults | options))


def told(calls: list) -> list[tuple[str, dict]]:
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.type == "function" and len(call.id) == 9 for call in calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_calls_are_read_and_their_results_go_back(talker: openai.OpenAI) -> None:
    choice = ask(talker).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Well. "
    assert told(choice.message.tool_calls) == [("weather", {"city": "Rome"}), ("clock", {})]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
        for call in choice.message.tool_calls
    ]
    first = ask(talker).usage.prompt_tokens
    again = ask(talker, messages=[*ASKED, choice.message, *results])
    assert again.usage.prompt_tokens > first + len(CALL) + 2 * len("Sunny.")


def test_a_streams_calls_are_those_of_the_whole(talker: openai.OpenAI) -> None:
    words, calls, ends = "", [], []
    for chunk in ask(talker, stream=True):
        for choice in chunk.choices:
            words += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            ends.append(choice.finish_reason)
    assert words == "Well. " and ends[-1] == "tool_calls" and set(ends[:-1]) == {None}
    assert told(calls) == [("weather", {"city": "Rome"}), ("clock", {})]
    assert [call.index for call in calls] == [0, 1]


def test_the_clients_own_accumulator_and_async(talker: openai.OpenAI) -> None:
    async def run() -> object:
        asked = {"model": "tiny", "messages": ASKED, "tools": [WEATHER, CLOCK], "temperature": 0}
        async with (
            openai.AsyncOpenAI(base_url=talker.base_url, api_key="-", max_retries=0) as client,
            client.chat.completions.stream(**asked) as stream,
        ):
            return await stream.get_final_completion()

    message = asyncio.run(run()).choices[0].message
    assert told(message.tool_calls) == [("weather", {"city": "Rome"}), ("clock", {})]


def test_one_call_at_most_and_none(talker: openai.OpenAI) -> None:
    one = ask(talker, parallel_tool_calls=False)
    assert told(one.choices[0].message.tool_calls) == [("weather", {"city": "Rome"})]
    assert one.usage.completion_tokens < ask(talker).usage.completion_tokens, "it stops there"
    none = ask(talker, tool_choice="none").choices[0]
    assert none.message.content == CALLS and none.message.tool_calls is None
    assert none.finish_reason == "stop"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "rocket", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "clock"}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"x": NaN}}</tool_call>',
        "<tool_call>[]</tool_call> and <tool_",
        '<tool_call>{"name": "clo',
    ],
)
def test_what_is_no_call_of_a_given_tool_is_text(text: str) -> None:
    with client_of(text) as client:
        choice = ask(client).choices[0]
        streamed = "".join(c.choices[0].delta.content or "" for c in ask(client, stream=True))
    assert choice.message.content == text == streamed
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"


def spoken(client: openai.OpenAI, **options: object) -> tuple[str, list[tuple[str, dict]], str]:
    """Words, calls and end of a streamed answer."""
    words, calls, end = "", [], ""
    for chunk in ask(client, stream=True, **options):
        for choice in chunk.choices:
            words += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            end = choice.finish_reason or end
    return words, told(calls), end


CLOCK_CALL = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
ROCKET_CALL = '<tool_call>{"name": "rocket", "arguments": {}}</tool_call>'


def test_words_after_a_call_keep_their_blanks_in_a_stream() -> None:
    with client_of(f"{CLOCK_CALL}\nI asked the  clock for you.") as client:
        whole = ask(client).choices[0].message
        words, calls, end = spoken(client)
    assert whole.content == words == "I asked the  clock for you."
    assert told(whole.tool_calls) == calls == [("clock", {})] and end == "tool_calls"


@pytest.mark.parametrize("method", ["ngram", "none"])
def test_only_the_one_call_ends_an_answer(method: str) -> None:
    """A closing mark after what is no call does not, whoever drafts; what follows is not made."""
    text = f"{ROCKET_CALL} is no tool, so: {CLOCK_CALL}"
    options = {"parallel_tool_calls": False, "extra_body": {"method": method}}
    with client_of(f"{text} and {CLOCK_CALL} once more") as client:
        answer = ask(client, **options)
        words, calls, end = spoken(client, **options)
    choice = answer.choices[0]
    assert choice.message.content == words == f"{ROCKET_CALL} is no tool, so: "
    assert told(choice.message.tool_calls) == calls == [("clock", {})]
    assert choice.finish_reason == end == "tool_calls"
    assert answer.usage.completion_tokens == len(text), "a token per letter, and none behind it"


def test_without_a_call_one_at_most_changes_nothing() -> None:
    with client_of(ROCKET_CALL) as client:
        choice = ask(client, parallel_tool_calls=False).choices[0]
    assert choice.message.content == ROCKET_CALL and choice.finish_reason == "stop"


def test_a_model_can_be_made_to_call(babbler: openai.OpenAI) -> None:
    """The babbler would say letters; grammar and drafts leave the same call."""
    free = ask(babbler, max_tokens=60).choices[0]
    assert free.message.tool_calls is None
    for choice, names in (
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ):
        found = [
            ask(
                babbler, tool_choice=choice, parallel_tool_calls=False, seed=3, temperature=1.0,
                extra_body={"method": method},
            ).choices[0]
            for method in ("ngram", "none")
        ]  # fmt: skip
        (name, arguments), *rest = told(found[0].message.tool_calls)
        assert not rest and name in names and found[0].finish_reason == "tool_calls"
        assert name == "clock" or arguments["city"] in ("Rome", "Oslo")
        assert told(found[1].message.tool_calls) == [(name, arguments)]


def test_strict_calls_follow_their_schema() -> None:
    """The model wants a city that the schema forbids; the grammar lets it say words first."""
    wrong = 'Well. <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    with client_of(wrong) as client:
        loose = ask(client).choices[0].message
        held = ask(client, tools=[strict], max_tokens=400).choices[0].message
    assert told(loose.tool_calls) == [("weather", {"city": "Paris"})]
    assert held.content.startswith("Well. ") and len(held.tool_calls) == 1
    assert told(held.tool_calls)[0][1]["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"tools": []}, "tools", "at least 1"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
        ({"tool_choice": "maybe"}, "tool_choice", "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "no tool is called x",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format", "tools may be called"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}
                ],
            },
            "tools",
            "can be read",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "1", "function": {"name": "clock", "arguments": "[]"}}
                        ],
                    }
                ]
            },
            "messages",
            "not a JSON object",
        ),
    ],
)
def test_what_is_wrong_is_named(
    babbler: openai.OpenAI, options: dict, param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        ask(babbler, **options)
    assert caught.value.param == param


def nested(levels: int) -> dict:
    value: dict = {"type": "string"}
    for _ in range(levels // 2):
        value = {"properties": {"a": value}}
    return value


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (nested(600), "nested more than 100 levels deep"),
        ({"description": "\ud800"}, "half a surrogate pair"),
        ({"properties": {"\udc00": {}}}, "half a surrogate pair"),
        ({"enum": ["\ud800"]}, "half a surrogate pair"),
    ],
)
def test_parameters_that_nothing_can_take_are_refused(
    babbler: openai.OpenAI, parameters: dict, words: str, choice: str
) -> None:
    """They would break the template or the grammar. Sent as bytes: clients refuse some."""
    function = {"name": "f", "parameters": parameters}
    body = {"messages": ASKED, "tools": [{"type": "function", "function": function}]}
    status, told = send(babbler, body | {"tool_choice": choice})
    assert status == 400 and words in told["error"]["message"], told
    assert told["error"]["param"] == "tools"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (json.dumps(nested(600)), "nested more than 100 levels deep"),
        (json.dumps({"a": "\ud800"}), "half a surrogate pair"),
    ],
)
def test_arguments_that_no_template_can_take_are_refused(
    babbler: openai.OpenAI, arguments: str, words: str
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*ASKED, {"role": "assistant", "tool_calls": [call]}]
    status, told = send(babbler, {"messages": messages})
    assert status == 400 and words in told["error"]["message"], told


def test_a_schema_that_nothing_can_take_is_refused(babbler: openai.OpenAI) -> None:
    for schema in (nested(600), {"enum": ["\ud800"]}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        status, told = send(babbler, {"messages": ASKED, "response_format": form})
        assert status == 400 and told["error"]["param"] == "response_format"


def test_what_is_deep_but_not_too_deep_is_taken(babbler: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(90)}}
    assert ask(babbler, tools=[tool], tool_choice="required", max_tokens=5).choices


def send(client: openai.OpenAI, body: dict) -> tuple[int, dict]:
    """Whatever it is, as JSON in ASCII."""
    data = json.dumps(body).encode()
    where = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=20)
    where.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
    reply = where.getresponse()
    told = json.loads(reply.read())
    where.close()
    return reply.status, told


def test_a_template_without_tools_says_so() -> None:
    result = {"role": "tool", "content": "x", "tool_call_id": "1"}
    with client_of(template=PLAIN) as client:
        with pytest.raises(openai.BadRequestError, match="chat template has no tools") as caught:
            ask(client)
        assert caught.value.param == "tools"
        with pytest.raises(openai.BadRequestError, match="chat template has no tools"):
            client.chat.completions.create(model="tiny", messages=[*ASKED, result])
    with (
        client_of(template="{{ tools }}" + PLAIN) as client,
        pytest.raises(openai.BadRequestError, match="how this model writes calls is not known"),
    ):
        ask(client)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    "shape", ["<tool_call>\\n<function=name>", "<tool_call>name\\n<arg_key>", "[TOOL_CALLS]x[ARGS]"]
)
def test_calls_that_are_no_json_are_not_forced_to_be(shape: str, choice: str) -> None:
    template = "{% if tools %}{{ '" + shape + "' }}{% endif %}" + PLAIN
    with (
        client_of(template=template) as client,
        pytest.raises(openai.BadRequestError, match="how this model writes calls is not known"),
    ):
        ask(client, tool_choice=choice)


LISTS_PROPERTIES = (  # as templates do that write tools in words of their own
    "{% for tool in tools or [] %}<tool_call>{% for key in tool.function.parameters.properties %}"
    "{{ key.strip() }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("properties", [5, [7]])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_that_break_the_template_are_named(properties: object, choice: str) -> None:
    """As a 400 with what the template said: the same messages without them are answered."""
    function = {"name": "f", "parameters": {"properties": properties}}
    tools = [{"type": "function", "function": function}]
    with client_of("Hi.", template=LISTS_PROPERTIES + PLAIN) as client:
        status, reply = send(client, {"messages": ASKED, "tools": tools, "tool_choice": choice})
        assert send(client, {"messages": ASKED})[0] == 200
    assert status == 400 and reply["error"]["param"] == "tools", reply
    assert "refused by the model's chat template (" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("refuses", "words"),
    [
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ messages[1]['content'] }}", "UndefinedError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ],
)
@pytest.mark.parametrize("has_tools", [True, False])
def test_messages_that_break_the_template_are_named(
    refuses: str, words: str, has_tools: bool
) -> None:
    with client_of(template=refuses + TOOLS) as client:
        body = {"messages": ASKED} | ({"tools": [WEATHER]} if has_tools else {})
        status, reply = send(client, body)
    assert status == 400 and words in reply["error"]["message"], reply
    assert reply["error"]["param"] == "messages"
