"""How a comparison talks with a side: a JSON line asked, a JSON line back, over pipes.

A side is a process in the environment of whoever it speaks for; it loads once and then waits, so
that sides can take turns. This file is imported in every environment: standard
library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

Answer = Callable[..., dict[str, Any]]
"""What was asked to what is replied; both JSON."""

LAST_LINES = 3  # of what a side that failed wrote
TRACE = ("Traceback", "File ", "^", "~")  # how lines begin that say where, not what


class SideError(Exception):
    """A side cannot start or stopped answering; the text is the end of what it wrote."""


class Side:
    """A process that answers prompts; it is ready when this returns.

    Args:
        python: interpreter of its environment.
        script: what it runs.
        job: what it loads; JSON.
        threads: it may compute with.
        patience: seconds it may take to load, and to answer.

    Raises:
        SideError: it did not get ready.
    """

    def __init__(
        self, python: Path, script: Path, job: dict[str, Any], *, threads: int, patience: float
    ) -> None:
        self._patience = patience
        self._written = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the side)
        # Threads wait as the engine's own defaults have it; importing slipstream has set ours.
        place = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
        self._process = subprocess.Popen(
            [str(python), str(script), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._written,
            text=True,
            env=place | {"OMP_NUM_THREADS": str(threads)},
            start_new_session=True,
        )
        self.versions: dict[str, str] = self._read()["versions"]
        self._signal(signal.SIGSTOP)

    def ask(self, *asked: Any) -> dict[str, Any]:
        """The reply, with the `seconds` it took.

        Raises:
            SideError: it stopped, or took longer than its patience.
        """
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
        except OSError as error:
            raise SideError(self._why()) from error
        found = self._read()
        self._signal(signal.SIGSTOP)  # a side that waits must not spin beside the others
        return found

    def close(self) -> None:
        """End the process."""
        self._signal(signal.SIGKILL)
        self._process.communicate()
        self._written.close()

    def _read(self) -> dict[str, Any]:
        alarm = threading.Timer(self._patience, self._signal, (signal.SIGKILL,))
        alarm.start()
        line = self._process.stdout.readline()
        alarm.cancel()
        if not line:
            raise SideError(self._why())
        return json.loads(line)

    def _signal(self, number: int) -> None:
        """To the side and what it started; nothing where they have ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _why(self) -> str:
        """The end of what the process wrote, without where it ran."""
        code = self._process.wait()
        self._written.seek(0)
        lines = self._written.read().decode(errors="replace").strip().split("\n")
        said = [line.strip() for line in lines if line.strip() and not _is_trace(line)]
        text = " | ".join(said[-LAST_LINES:]).replace(str(Path.home()), "~")
        return f"exit status {code}: {text}" if text else f"exit status {code}"


def _is_trace(line: str) -> bool:
    return line.strip().startswith(TRACE) or line.startswith("    ")


def serve(make: Callable[[dict[str, Any]], Answer], *packages: str) -> None:
    """Be a side: load what the job says, then answer line by line until the pipe closes.

    Args:
        make: loads, and gives what answers.
        packages: whose versions are told.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    answer = make(json.loads(sys.argv[1]))

    def reply(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=replies, flush=True)

    reply({"versions": {name: metadata.version(name) for name in packages}})
    for line in sys.stdin:
        asked = json.loads(line)
        begun = time.perf_counter()
        found = answer(*asked)
        reply(found | {"seconds": time.perf_counter() - begun})
