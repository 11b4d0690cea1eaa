"""Requests made up from the server's OpenAPI document, and what must be true of every reply."""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings

from chats import TOOLS
from serving import Running, plain_twin, running, tiny_engine

POSTS = ("/v1/chat/completions", "/v1/completions")
GETS = ("/", "/health", "/metrics", "/v1/models")
SECONDS = 30  # longest reply


class Neighbour(threading.Thread):
    """Another user: asks the same all the time and must be told the same, whatever others do."""

    def __init__(self, served: Running) -> None:
        super().__init__(daemon=True)
        self._served, self._is_over = served, threading.Event()
        engine = plain_twin(served.server.engine)
        self._expected = engine.generate(
            "abc", max_new_tokens=20, temperature=1.0, seed=9, raw=True
        )
        self.num_asked, self.wrong = 0, ""

    def run(self) -> None:
        asked = {"prompt": "abc", "max_tokens": 20, "temperature": 1.0, "seed": 9}
        while not self._is_over.is_set() and not self.wrong:
            status, text = post(self._served, "/v1/completions", json.dumps(asked).encode())
            self.num_asked += 1
            if status != 200 or json.loads(text)["choices"][0]["text"] != self._expected.text:
                self.wrong = text

    def stop(self) -> None:
        self._is_over.set()
        self.join(SECONDS)
        assert not self.is_alive() and self.wrong == "" and self.num_asked > 0


def post(served: Running, path: str, data: bytes) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=SECONDS)
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    text = reply.read().decode("utf-8")
    connection.close()
    return reply.status, text


def aimed(body: Any) -> Any:
    """A body for this server's model; a made-up name would only ever be a 404."""
    if not isinstance(body, dict):
        return body
    method = {"method": "none"} if body.get("method") else {}
    return body | method | {"model": "tiny"}


def encoded(body: Any) -> bytes:
    """As it is sent: some made-up bodies are bytes that are no JSON, some are not there."""
    if isinstance(body, schemathesis.core.NotSet):
        return b""
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def fuzz(num_requests: int) -> Counter:
    """Send so many requests, valid and not; the statuses that came back.

    Raises:
        AssertionError: a reply was a 5xx, hung, or was not what its type says; a row was leaked;
            or a neighbour was told something else than when alone.
    """
    seen: Counter = Counter()
    engine = tiny_engine(max_length=160, template=TOOLS)
    with running(engine, num_rows=3, max_waiting=64, cache_tokens=320) as served:
        document = schemathesis.openapi.from_dict(served.server.app.openapi())
        neighbour = Neighbour(served)
        neighbour.start()
        try:
            for path in POSTS:
                for mode in schemathesis.GenerationMode:
                    _fuzz_one(served, document[path]["POST"], mode, num_requests // 4, seen)
            for path in GETS:
                seen[document[path]["GET"].Case().call(base_url=served.url).status_code] += 1
        finally:
            neighbour.stop()
        assert served.server.service.drain(SECONDS) and served.server.service.leaks() == ""
    return seen


def _fuzz_one(served: Running, operation: Any, mode: Any, count: int, seen: Counter) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode))
    def send(case: Any) -> None:
        if mode == schemathesis.GenerationMode.POSITIVE:
            case.body = aimed(case.body)
        data = encoded(case.body)
        status, text = post(served, operation.path, data)  # the library's own hangs up on streams
        seen[status] += 1
        assert status < 500 and "server_error" not in text, (status, text[-1000:], data)
        if text.startswith("data: "):
            assert text.endswith("data: [DONE]\n\n"), (text[-1000:], data)
        elif status != 200:
            assert json.loads(text)["error"]["message"]

    send()
