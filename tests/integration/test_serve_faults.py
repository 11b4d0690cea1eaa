"""What clients get wrong is a 4xx that names it; what goes away frees its row; nothing hangs."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from torch import Tensor

from serving import Running, running, tiny_engine
from slipstream.engine.shaping import FormError
from slipstream.errors import BusyError, SettingError
from slipstream.serve import grammar
from slipstream.serve.app import Server, _Stream
from slipstream.serve.exchange import Exchange

CHAT = {"messages": [{"role": "user", "content": "ab"}], "model": "tiny", "max_tokens": 4}
NEVER_ENDS = {"logit_bias": {"257": -100}}  # the end token


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(tiny_engine(), num_rows=2, max_waiting=40, body_bytes=20_000) as found:
        yield found


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    """Half a minute for an answer of 100 tokens, one second allowed."""
    engine = tiny_engine(seconds=0.03)
    with running(engine, num_rows=1, max_waiting=1, seconds=1.0) as found:
        yield found


@pytest.fixture(scope="module")
def patient() -> Iterator[Running]:
    """Half a minute for an answer of 250 tokens, and nobody is in a hurry."""
    with running(tiny_engine(seconds=0.1), num_rows=1, max_waiting=1, seconds=600.0) as found:
        yield found


def post(
    served: Running,
    body: object,
    *,
    path: str = "/v1/chat/completions",
    headers: dict | None = None,
) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})
    reply = connection.getresponse()
    told = json.loads(reply.read() or b"{}")
    connection.close()
    return reply.status, told


def wait_until_idle(served: Running, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    service = served.server.service
    while service.num_running or service.num_waiting:
        assert time.monotonic() < end, "a row is still held"
        time.sleep(0.01)
    assert service.leaks() == ""


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"audio": {}}, "audio"),
        ({"tools": []}, "tools"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -3}, "max_completion_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"method": "eagle3"}, "method"),
        ({"stream_options": {"x": 1}}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}}, "stream_options"),
        ({"mark_drafted": True}, "mark_drafted"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(served: Running, change: dict, param: str) -> None:
    status, told = post(served, CHAT | change)
    assert status == 400
    assert told["error"]["param"] == param and told["error"]["type"] == "invalid_request_error"
    assert param in told["error"]["message"]


def test_a_null_is_a_field_that_was_left_out(served: Running) -> None:
    """Clients send them for OpenAI's nullable fields, and send answers back with theirs."""
    names = [
        "temperature", "top_p", "n", "stream", "logprobs", "top_logprobs", "presence_penalty",
        "frequency_penalty", "logit_bias", "seed", "stop", "max_completion_tokens", "tools",
        "tool_choice", "response_format", "stream_options", "user", "parallel_tool_calls", "store",
    ]  # fmt: skip
    turn = {"content": "b", "role": "assistant", "refusal": None, "tool_calls": None, "audio": None}
    messages = [*CHAT["messages"], turn, *CHAT["messages"]]
    status, told = post(served, CHAT | dict.fromkeys(names) | {"messages": messages})
    assert status == 200, told
    nulls = dict.fromkeys(["suffix", "echo", "logprobs", "max_tokens", "temperature"])
    assert post(served, {"prompt": "ab"} | nulls, path="/v1/completions")[0] == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"messages": "\xc3"}', "not UTF-8"),
        (b"[" * 15_000, "not JSON"),
        (b"[]", "the body"),
        (b"null", "the body"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "\\ud800": 1}', "the body"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
    ],
)
def test_a_body_that_is_none(served: Running, body: bytes, words: str) -> None:
    status, told = post(served, body)
    assert status == 400 and words in told["error"]["message"]


def test_what_the_model_cannot_take(served: Running) -> None:
    asked = [
        ({"messages": [{"role": "user", "content": "a" * 400}]}, "context 300"),
        ({"logit_bias": {"99999": 1}}, "biased token is 99999"),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}},
            "response_format",
        ),
    ]
    for change, words in asked:
        status, told = post(served, CHAT | change)
        assert status == 400 and words in told["error"]["message"], told
    for prompt in ("", [], [[]], [99999]):
        status, told = post(served, {"prompt": prompt}, path="/v1/completions")
        assert status == 400 and "prompt" in told["error"]["message"]


def test_addresses_methods_models_and_sizes(served: Running) -> None:
    assert post(served, CHAT | {"model": "gpt-9"})[0] == 404
    assert post(served, CHAT, path="/v1/nothing")[0] == 404
    assert post(served, CHAT, path="/health")[0] == 405
    status, told = post(served, CHAT | {"user": "x" * 30_000})
    assert status == 413 and "20000 bytes" in told["error"]["message"]


def test_a_key_opens_the_api_and_nothing_else_needs_it() -> None:
    with running(tiny_engine(), api_keys=("secret",), num_rows=1) as served:
        assert post(served, CHAT)[0] == 401
        assert post(served, CHAT, headers={"Authorization": "Bearer wrong"})[0] == 401
        assert post(served, CHAT, headers={"Authorization": "Bearer secret"})[0] == 200
        for path, status in (("/health", 200), ("/metrics", 200), ("/", 200), ("/v1/models", 401)):
            assert get(served, path)[0] == status


def get(served: Running, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("GET", path)
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text


def metrics(served: Running) -> dict[str, float]:
    """Every series of /metrics."""
    lines = get(served, "/metrics")[1].splitlines()
    told = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in told}


def test_metrics_count_under_vllms_names() -> None:
    with running(tiny_engine(), num_rows=1) as served:
        told = post(served, CHAT | {"max_tokens": 60, "temperature": 0})[1]
        values = metrics(served)
    label = '{model_name="tiny"}'
    speculation = told["metrics"]["speculative_decoding"]
    expected = {
        "generation_tokens_total": told["usage"]["completion_tokens"],
        "prompt_tokens_total": told["usage"]["prompt_tokens"],
        "spec_decode_num_draft_tokens_total": speculation["num_draft_tokens"],
        "spec_decode_num_accepted_tokens_total": speculation["num_accepted_draft_tokens"],
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": told["usage"]["completion_tokens"] - 1,
        "e2e_request_latency_seconds_count": 1,
    }
    for name, value in expected.items():
        assert values[f"vllm:{name}{label}"] == value, name
    per_position = [
        value for name, value in values.items() if "accepted_tokens_per_pos_total" in name
    ]
    assert sum(per_position) == speculation["num_accepted_draft_tokens"]
    assert values['vllm:request_success_total{model_name="tiny",finished_reason="length"}']


def test_a_deadline_ends_an_answer_and_frees_its_row(slow: Running) -> None:
    long = CHAT | {"max_tokens": 250, "method": "none", "logit_bias": {}, "temperature": 0}
    status, told = post(slow, long)
    assert status == 504 and "1 s" in told["error"]["message"]
    wait_until_idle(slow)
    connection = http.client.HTTPConnection("127.0.0.1", slow.port, timeout=20)
    connection.request("POST", "/v1/chat/completions", json.dumps(long | {"stream": True}))
    text = connection.getresponse().read().decode()
    assert '"type": "timeout_error"' in text and text.endswith("data: [DONE]\n\n")
    wait_until_idle(slow)


def hang_up(served: Running, body: dict) -> None:
    """Ask, and go away while the answer is under way."""
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
            + str(len(data)).encode() + b"\r\n\r\n" + data
        )  # fmt: skip
        if body["stream"]:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        else:
            time.sleep(0.3)


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_hang_up_leak_nothing(patient: Running, stream: bool) -> None:
    """No deadline helps: their answers would take ten times as long as the row is held."""
    for _ in range(10 if stream else 3):
        hang_up(
            patient, CHAT | {"max_tokens": 250, "stream": stream, "method": "none"} | NEVER_ENDS
        )
        wait_until_idle(patient, 3)
    assert post(patient, CHAT)[0] == 200


def test_what_was_not_finished_counts_too(patient: Running) -> None:
    """Tokens of an answer that nobody waited for, and why it ended."""
    before = metrics(patient)
    hang_up(patient, CHAT | {"max_tokens": 250, "stream": False, "method": "none"} | NEVER_ENDS)
    wait_until_idle(patient, 3)
    after = metrics(patient)
    label = '{model_name="tiny"}'
    for name, least in (
        ("generation_tokens_total" + label, 5),
        ("prompt_tokens_total" + label, 5),
        ("e2e_request_latency_seconds_count" + label, 1),
        ('request_success_total{model_name="tiny",finished_reason="abort"}', 1),
    ):
        assert after[f"vllm:{name}"] >= before.get(f"vllm:{name}", 0) + least, name


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the sending up, not the server; its rows have long been over."""
    monkeypatch.setattr("slipstream.serve.app.SENDING_SECONDS", 0.2)
    cut = []

    class Ended(Exchange):
        def stop(self) -> None:
            cut.append(True)

    async def send(message: dict) -> None:
        if message["type"] != "http.response.start":
            await asyncio.Event().wait()

    async def receive() -> dict:
        await asyncio.Event().wait()

    async def events() -> AsyncIterator[str]:
        for _ in range(3):
            yield "data: {}\n\n"

    async def answer() -> None:
        stream = _Stream(events(), Ended(None, [], seconds=0.1), headers={})
        await stream({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)

    asyncio.run(asyncio.wait_for(answer(), 10))
    assert cut


@pytest.mark.parametrize("keys", [("",), ("secret", ""), (" ",)])
def test_an_empty_key_is_none(keys: tuple[str, ...]) -> None:
    """It would open /v1 to everybody."""
    with pytest.raises(SettingError, match="api-key is empty"):
        Server(tiny_engine(), api_keys=keys)


@pytest.mark.parametrize("stream", [True, False])
def test_a_choice_that_failed_does_not_end_as_if_finished(stream: bool) -> None:
    """The second choice loses its form at its fourth token; the first is whole."""
    engine = tiny_engine()
    request, made = engine.request, []

    def lose(logits: Tensor, tree: object, tokens: list[int]) -> Tensor:
        if len(tokens) >= made[1].num_prompt + 3:
            raise FormError("the parser lost its way")
        return logits

    def second_fails(*args: object, **options: object) -> object:
        made.append(request(*args, **options))
        if len(made) == 2:
            made[1].shapers = (lose,)
        return made[-1]

    engine.request = second_fails
    with running(engine, num_rows=2) as served:
        body = CHAT | NEVER_ENDS | {"n": 2, "max_tokens": 8, "temperature": 1.0, "seed": 1}
        if not stream:
            status, told = post(served, body)
            assert status == 400 and told["error"]["message"] == "the parser lost its way"
            return
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
        connection.request("POST", "/v1/chat/completions", json.dumps(body | {"stream": True}))
        *events, last = connection.getresponse().read().decode().strip().split("\n\n")
    told = [json.loads(event.removeprefix("data: ")) for event in events]
    ends = {
        choice["index"]: choice["finish_reason"]
        for chunk in told if "choices" in chunk for choice in chunk["choices"]
    }  # fmt: skip
    errors = [chunk["error"] for chunk in told if "error" in chunk]
    assert ends == {0: "length", 1: None} and last == "data: [DONE]"
    assert [(e["message"], e["param"]) for e in errors] == [
        ("the parser lost its way", "choices.1")
    ]


def test_a_full_queue_is_told_before_the_prompt_is_read(served: Running) -> None:
    service, engine = served.server.service, served.server.engine
    most, service._max_requests = service._max_requests, 0
    encode, engine.target.tokenizer.encode_chat = engine.target.tokenizer.encode_chat, None
    try:
        assert post(served, CHAT)[0] == 429
    finally:
        service._max_requests, engine.target.tokenizer.encode_chat = most, encode


def test_whoever_comes_when_the_queue_is_full_is_told(slow: Running) -> None:
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(post(slow, CHAT | {"max_tokens": 6, "method": "none"})[0])

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429} and statuses.count(200) >= 2
    wait_until_idle(slow)


def test_a_termination_lets_streams_finish() -> None:
    with running(tiny_engine(seconds=0.02), num_rows=1) as served:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
        body = CHAT | {"max_tokens": 30, "stream": True, "temperature": 0, "method": "none"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        reply = connection.getresponse()
        reply.read(10)
        served.http.handle_exit(signal.SIGTERM, None)
        served.http._captured_signals.clear()  # this thread's process is not the server's alone
        text = reply.read().decode()
        assert text.endswith("data: [DONE]\n\n") and '"finish_reason": "length"' in text
    service = served.server.service
    assert not service.is_alive and service.leaks() == ""
    with pytest.raises(BusyError, match="shutting down"):
        service.submit(served.server.engine.request([1]), print)


def test_a_fault_of_the_loop_spares_the_next_request() -> None:
    engine = tiny_engine()
    propose, broken = engine.drafter.propose, [True]

    def fail_once(rows: list) -> list:
        if broken:
            broken.clear()
            raise RuntimeError("out of memory, say")
        return propose(rows)

    engine.drafter.propose = fail_once
    with running(engine, num_rows=1) as served:
        status, told = post(served, CHAT | {"temperature": 0})
        assert status == 500 and told["error"]["message"] == "internal error"
        assert post(served, CHAT | {"temperature": 0})[0] == 200
        wait_until_idle(served)


def test_random_bodies_are_answered_and_never_with_a_500(served: Running) -> None:
    chance = random.Random(0)
    values = [
        None, True, -1, 0, 1, 7, 1.5, 1e400, 2**80, "", "ab", "\u0000", "\ud83d\ude00", [], {},
        ["a"], [1], [[1, 2]], {"type": "text"}, {"1": 5}, [{"role": "user", "content": "a"}],
        {"type": "json_object"}, [{"role": "system", "content": [{"type": "text", "text": "b"}]}],
    ]  # fmt: skip
    names = [
        "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed",
        "stream", "logprobs", "top_logprobs", "logit_bias", "max_tokens", "response_format",
        "stream_options", "method", "budget", "presence_penalty", "stop_token_ids", "unknown",
    ]  # fmt: skip
    seen = set()
    for _ in range(300):
        path, body = chance.choice([
            ("/v1/chat/completions", {"messages": CHAT["messages"], "max_tokens": 3}),
            ("/v1/completions", {"prompt": "ab", "max_tokens": 3}),
        ])  # fmt: skip
        changes = {chance.choice(names): chance.choice(values) for _ in range(chance.randint(0, 2))}
        data = json.dumps(body | changes).encode()
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
        connection.request("POST", path, data)
        reply = connection.getresponse()
        reply.read()
        connection.close()
        assert reply.status in (200, 400), (reply.status, body | changes)
        seen.add(reply.status)
    assert seen == {200, 400}
    wait_until_idle(served)


HOSTILE = {"allOf": [{"type": "string", "pattern": f"a.*b{n}.*c"} for n in range(40)]}


def formed(schema: object) -> dict:
    wish = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return CHAT | {"response_format": wish}


@pytest.mark.parametrize(
    "wish",
    [
        {"type": "regex", "regex": r"[^\s\S]"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}},
    ],
)
def test_a_form_that_no_answer_can_have_is_a_400(served: Running, wish: dict) -> None:
    status, told = post(served, CHAT | {"response_format": wish})
    assert status == 400 and told["error"]["param"] == "response_format", told


def test_forms_that_never_compile_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are killed one by one; who asks for no form is answered meanwhile."""
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 2.0)
    with running(tiny_engine(), num_rows=2) as served:
        done: list[int] = []

        def ask(n: int) -> None:
            done.append(post(served, formed(HOSTILE | {"title": str(n)}))[0])

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        assert post(served, CHAT)[0] == 200 and not done
        for thread in threads:
            thread.join()
        assert done == [400] * 3
        assert post(served, formed({"type": "object"}))[0] == 200


def test_a_form_is_given_up_with_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the form makes impossible in the middle of an answer is not the server's fault."""

    def give_up(self: object, *_arguments: object) -> Tensor:
        raise FormError("the answer cannot be held to its form any further")

    monkeypatch.setattr(grammar.GrammarShaper, "__call__", give_up)
    with running(tiny_engine(), num_rows=1) as served:
        status, told = post(served, formed({"type": "object"}))
        assert status == 400 and told["error"]["param"] == "response_format"
        assert told["error"]["type"] == "invalid_request_error"


def test_refusals_are_named_in_header_and_log(
    served: Running, caplog: pytest.LogCaptureFixture
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    with caplog.at_level("INFO", "slipstream.serve"):
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT | {"audio": "secret"}))
        reply = connection.getresponse()
        assert reply.status == 400 and b"audio" in reply.read()
    (line,) = [record.getMessage() for record in caplog.records if "audio" in record.getMessage()]
    told = json.loads(line)
    assert told == {"id": reply.headers["X-Request-Id"], "status": 400, "param": "audio"}
    assert told["id"].startswith("chatcmpl-")
    connection.close()


def test_a_field_of_a_long_name_makes_no_long_line_of_log(
    served: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "slipstream.serve"):
        assert post(served, CHAT | {"x" * 9000: 1})[0] == 400
    lines = [record.getMessage() for record in caplog.records if "xxx" in record.getMessage()]
    assert len(lines) == 1 and len(lines[0]) < 250


def test_more_answers_than_could_ever_wait_are_a_400() -> None:
    """A 429 would be asked again, in vain."""
    with running(tiny_engine(), num_rows=1, max_waiting=2) as served:
        assert post(served, CHAT | {"n": 3})[0] == 200
        status, told = post(served, CHAT | {"n": 4})
        assert status == 400 and told["error"]["param"] == "n"
        body = {"prompt": ["ab"] * 4, "max_tokens": 1}
        status, told = post(served, body, path="/v1/completions")
        assert status == 400 and told["error"]["param"] == "prompt"


def test_the_engines_complaints_name_the_field(served: Running) -> None:
    for change, param in (
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": "a" * 2000}]}, "messages"),
    ):
        status, told = post(served, CHAT | change)
        assert status == 400 and told["error"]["param"] == param, told
    status, told = post(served, {"prompt": [1] * 2000}, path="/v1/completions")
    assert status == 400 and told["error"]["param"] == "prompt"


def test_the_scheme_of_a_key_counts() -> None:
    with running(tiny_engine(), num_rows=1, api_keys=["secret"]) as served:
        for given, status in (
            ("Bearer secret", 200), ("bearer secret", 200), ("secret", 401), ("Basic secret", 401),
            ("Bearer", 401), ("Bearer wrong", 401),
        ):  # fmt: skip
            assert post(served, CHAT, headers={"Authorization": given})[0] == status, given


def test_the_developers_turn_is_the_systems(served: Running) -> None:
    both = [
        post(served, CHAT | {"messages": [{"role": role, "content": "be brief"}, *CHAT["messages"]],
                             "temperature": 0})[1]
        for role in ("system", "developer")
    ]  # fmt: skip
    assert both[0]["usage"] == both[1]["usage"]
    assert both[0]["choices"][0]["message"] == both[1]["choices"][0]["message"]
