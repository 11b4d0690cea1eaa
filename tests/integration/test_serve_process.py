"""The server as a process of its own: a termination drains it, a full disk does not stop it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

FULL = Path("/dev/full")  # every write to it fails: no space left on device
WORDS = {"prompt": "ab", "max_tokens": 150, "temperature": 0, "stream": True}


def start(model: str, log: object) -> tuple[subprocess.Popen, int]:
    """The process and its port, once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            sys.executable, "-m", "slipstream", "serve", "--model", model, "--method", "ngram",
            "--port", str(port), "--num-rows", "1", "--served-name", "tiny",
        ],
        stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return process, port
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"no server; exit status {process.wait()}")


def ask(port: int, body: dict) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body))
    return connection.getresponse()


@pytest.mark.skipif(not FULL.exists(), reason="this system has no full device")
def test_a_full_disk_under_the_log_and_a_termination_amid_a_stream(model: str) -> None:
    with FULL.open("w") as log:
        process, port = start(model, log)
        try:
            for _ in range(3):
                whole = ask(port, WORDS | {"stream": False, "max_tokens": 5})
                assert whole.status == 200 and json.loads(whole.read())["choices"]
            stream = ask(port, WORDS)
            stream.read(10)
            process.send_signal(signal.SIGTERM)
            text = stream.read().decode()
            assert text.endswith("data: [DONE]\n\n") and '"finish_reason": null' in text
            assert process.wait(30) in (0, -signal.SIGTERM)
        finally:
            process.kill()
            process.wait()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_its_log_is_a_line_of_json_for_each_request(model: str, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        process, port = start(model, log)
        ask(port, WORDS | {"prompt": "a secret", "max_tokens": 5}).read()
        process.terminate()
        process.wait(30)
    lines = (tmp_path / "log").read_text("utf-8").splitlines()
    told = [json.loads(line) for line in lines if line.startswith("{")]
    assert [row["completion_tokens"] for row in told] == [5] and told[0]["id"].startswith("cmpl-")
    text = "".join(lines)
    assert f"127.0.0.1:{port}" in text and "secret" not in text and "Traceback" not in text
