"""Two servers, or a server and our model: stub servers that say what they are told to."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slipstream.bench.servers import Server, compare
from slipstream.errors import DataError

WORDS = [f"w{i} " for i in range(60)]


class Stub(ThreadingHTTPServer):
    """Answers every request with fixed words and the log-probabilities of two tokens each."""

    def __init__(self, answer, *, names_tokens=True, status=200):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.names_tokens, self.status = answer, names_tokens, status
        self.requests: list[dict] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply({"data": [{"id": "stub"}]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        words, tops = self.server.answer(request, len(self.server.requests))
        entries = [
            {"token": word, "top_logprobs": [{"token": t, "logprob": p} for t, p in top.items()]}
            for word, top in zip(words, tops, strict=True)
        ]
        choice = {"message": {"content": "".join(words)}, "finish_reason": "length"}
        if "prompt" in request:
            choice = {"text": "".join(words), "finish_reason": "length"}
            entries = {"tokens": list(words), "top_logprobs": list(tops)}
        else:
            entries = {"content": entries}
        if self.server.names_tokens:
            choice["logprobs"] = entries
        self.reply({"choices": [choice]}, self.server.status)

    def reply(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def says(words, other="x ", gap=3.0):
    """The words, each with a runner-up `gap` nats below."""
    tops = [{word: -0.1, other: -0.1 - gap} for word in words]
    return lambda request, number: (words, tops)


@pytest.fixture
def start():
    stubs = []

    def begin(answer, **options):
        stubs.append(Stub(answer, **options))
        return stubs[-1]

    yield begin
    for stub in stubs:
        stub.shutdown()
        stub.server_close()


def compared(one, other, **options):
    return compare(Server(one.url), Server(other.url + "/v1/"), ["a", "b"], max_new_tokens=60,
                   **options)  # fmt: skip


def changed(at, word="x "):
    return [*WORDS[:at], word, *WORDS[at + 1 :]]


@pytest.mark.parametrize("raw", [False, True])
def test_equal_answers_are_lossless(start, raw):
    one, other = start(says(WORDS)), start(says(WORDS))
    found = compared(one, other, raw=raw)
    assert (found.verdict, found.num_tokens, found.divergences) == ("lossless", 120, ())
    assert all(("prompt" in request) == raw for request in one.requests)
    assert all(request["temperature"] == 0 for request in one.requests)


@pytest.mark.parametrize(("gap", "verdict"), [(3.0, "different"), (0.01, "ties")])
def test_a_difference_is_judged_by_the_references_margin(start, gap, verdict):
    found = compared(start(says(changed(7))), start(says(WORDS, gap=gap)))
    assert found.verdict == verdict and found.is_lossless == (verdict == "ties")
    first = found.divergences[0]
    assert (first.position, first.target_token, first.emitted_token) == (7, "w7 ", "x ")
    assert first.margin == pytest.approx(gap) and not first.without_drafting


def test_without_named_tokens_characters_are_compared(start):
    found = compared(start(says(changed(7)), names_tokens=False), start(says(WORDS)))
    first = found.divergences[0]
    assert found.verdict == "different" and first.margin is None
    assert "".join(WORDS)[first.position] == first.target_token


def test_a_reference_that_wavers_under_load_explains_the_difference(start):
    def wavers(request, number):
        return says(WORDS if number <= 1 else changed(7))(request, number)

    found = compared(start(says(changed(7))), start(wavers))
    assert found.divergences[0].without_drafting and found.verdict == "ties"


def test_an_answer_that_ends_early_differs(start):
    found = compared(start(says(WORDS[:20])), start(says(WORDS)))
    assert found.divergences[0].emitted_token is None and found.verdict == "different"


def test_a_few_tokens_say_nothing(start):
    assert compared(start(says(WORDS[:3])), start(says(WORDS[:3]))).verdict == "inconclusive"


def test_servers_that_fail_are_one_error(start):
    broken = start(says(WORDS), status=500)
    with pytest.raises(DataError, match="says 500"):
        Server(broken.url).ask("a", max_new_tokens=4)
    with pytest.raises(DataError, match="does not answer"):
        Server("http://127.0.0.1:9")
    with pytest.raises(DataError, match="does not answer: unknown url type"):
        Server("localhost")


def test_a_reply_that_is_not_http_is_one_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def babble():
            client, _ = listener.accept()
            client.recv(4096)
            client.sendall(b"SSH-2.0-x\r\n")
            client.close()

        threading.Thread(target=babble, daemon=True).start()
        with pytest.raises(DataError, match="does not answer"):
            Server(f"http://127.0.0.1:{listener.getsockname()[1]}")


def test_a_chat_goes_out_whole(start):
    one, other = start(says(WORDS)), start(says(WORDS))
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    compare(Server(one.url), Server(other.url), [chat], max_new_tokens=60)
    assert one.requests[0]["messages"] == other.requests[0]["messages"] == chat
