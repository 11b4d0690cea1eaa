"""`slipstream serve` in a process of its own, and clients that stream from it over HTTP.

The side of `load.py --http`. Clients share the machine with the server, as on a laptop, so what
they and HTTP take is in the numbers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from slipstream.bench.specs import MethodSpec
from slipstream.errors import OutputError

PATIENCE = 300.0  # seconds for a server to load its model and compile
EVENT = b"data: {"


class Served:
    """A server that answers; it waits without work between turns.

    Args:
        spec: the method it serves.
        options: of `slipstream serve` besides.

    Raises:
        OutputError: it ended before it answered, or did not answer in time.
    """

    def __init__(self, spec: MethodSpec, options: Sequence[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        words = ["--method", spec.method, "--port", str(self.port), *options]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", "serve", *words, *flags(spec)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.close()
                raise OutputError(
                    f"{spec.name} is not served: {' '.join(words)} ended or did not answer",
                    f"try slipstream serve {' '.join([*words, *flags(spec)])}",
                )
            time.sleep(0.2)

    def read(self, path: str) -> str:
        """What stands at an address."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
            return reply.read().decode()

    def wait_until_idle(self) -> None:
        """Return when no request runs or waits; that a client hung up is seen in half a second."""
        while any(
            float(line.rpartition(" ")[2])
            for line in self.read("/metrics").splitlines()
            if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
        ):
            time.sleep(0.05)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            return json.loads(self.read("/health"))["status"] == "ok"
        except (OSError, ValueError):
            return False


def flags(spec: MethodSpec) -> list[str]:
    """A method's settings as options of `slipstream serve`.

    Example:
        >>> from slipstream.bench.specs import parse_spec
        >>> flags(parse_spec("ddtree+lookup:budget=7"))
        ['--lookup', '--budget', '7']
    """
    words = []
    for name, value in spec.settings.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


class HttpClients:
    """Clients that ask again as soon as they are answered, each with a connection of its own.

    Args:
        served: the server.
        count: how many clients.
        prompts: taken in turn.
        max_new_tokens: per answer.
    """

    def __init__(
        self, served: Served, *, count: int, prompts: Sequence[str], max_new_tokens: int
    ) -> None:
        self._served, self._count, self._limit = served, count, max_new_tokens
        self._prompts: Iterator[str] = itertools.cycle(prompts)

    def run(self, heard: Any, seconds: float) -> None:
        """Let them ask for so long, then hang up.

        Args:
            heard: a `Heard` of `load.py`, which is added to.
            seconds: of this turn.
        """
        begun = time.perf_counter()
        asyncio.run(self._turn(heard, seconds))
        heard.seconds += time.perf_counter() - begun
        self._served.wait_until_idle()

    def close(self) -> None:
        """The server stays for the next number of clients."""

    async def _turn(self, heard: Any, seconds: float) -> None:
        clients = [asyncio.create_task(self._client(heard)) for _ in range(self._count)]
        await asyncio.wait(clients, timeout=seconds)  # none ends before, but for a fault
        for client in clients:
            client.cancel()
        for outcome in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _client(self, heard: Any) -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._served.port)
            try:
                writer.write(self._request())
                await self._listen(reader, heard)
            finally:
                writer.close()

    async def _listen(self, reader: asyncio.StreamReader, heard: Any) -> None:
        """One answer, event by event."""
        last, has_begun, is_whole = time.perf_counter(), False, False
        async for line in reader:
            if not line.startswith(EVENT):
                continue
            chunk = json.loads(line[len(EVENT) - 1 :])
            now = time.perf_counter()
            for choice in chunk.get("choices", ()):
                ids = choice.get("token_ids")
                if ids and has_begun:
                    heard.between += [(now - last) / len(ids)] * len(ids)
                elif ids:
                    heard.first.append(now - last)  # prefill gives one token
                has_begun, last = has_begun or bool(ids), now if ids else last
            if "usage" in chunk:
                is_whole = True
                self._count_answer(chunk, heard)
        if not is_whole:
            heard.requests += 1
            heard.errors += 1

    def _count_answer(self, chunk: dict[str, Any], heard: Any) -> None:
        drafted = chunk["metrics"]["speculative_decoding"] or {}
        accepted = drafted.get("num_accepted_draft_tokens", 0)
        heard.requests += 1
        heard.num_accepted += accepted
        heard.num_passes += chunk["usage"]["completion_tokens"] - 1 - accepted  # prefill gave one

    def _request(self) -> bytes:
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": next(self._prompts)}],
                "max_tokens": self._limit,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body
