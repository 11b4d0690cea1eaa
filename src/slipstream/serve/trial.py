"""Rules are compiled in a process of its own first: what takes too long there can be killed.

llguidance has limits for most of what a grammar may cost, but not for all: intersections of
patterns and large `multipleOf` take time that grows exponentially, inside one call that holds a
thread for good. So rules come here before the server compiles them: a child process reads them,
makes the mask of the answer's first token, and says what was wrong. One that needs more time or
memory than allowed is killed and started again with the next rules.

Run as a program, this file is the child. It imports nothing of the package.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from typing import Any

START_SECONDS = 60.0  # for the child to import and read the vocabulary
MEMORY = 4 << 30  # bytes of address space
ALONE = {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1"}
"""For the child: on many cores, threads alone would reserve more address space than that."""
CPU_SECONDS = 3600  # of one child in all, should nobody be left to kill it
KNOWN = 256  # rules whose outcome is remembered


class Trial:
    """Tries rules; any thread may ask, one at a time is served.

    Args:
        tokenizer: JSON of the tokenizer, as llguidance reads it.
        vocab_size: V.
        eos_ids: ids that end an answer.
        seconds: that rules may take.
    """

    def __init__(
        self, tokenizer: str, vocab_size: int, eos_ids: tuple[int, ...], seconds: float
    ) -> None:
        self._about = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eos_ids": list(eos_ids)}
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[bytes, str | None] = OrderedDict()

    def fault(self, rules: str) -> str | None:
        """What is wrong with the rules; None when they can be compiled here as well."""
        key = hashlib.sha256(rules.encode()).digest()
        with self._lock:
            if key not in self._known:
                self._known[key] = self._ask(rules)
                if len(self._known) > KNOWN:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return self._known[key]

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def _ask(self, rules: str) -> str | None:
        if self._child is None or self._child.poll() is not None:
            self._start()
        try:
            return self._tell({"rules": rules}, self._seconds)["fault"]
        except TimeoutError:
            fault = f"it takes longer than {self._seconds:g} s to compile"
        except (OSError, ValueError):  # it has died
            fault = "it takes too much memory to compile"
        self._end()
        return fault

    def _start(self) -> None:
        """A child that has read the vocabulary.

        Raises:
            OSError, TimeoutError, ValueError: there is none: nothing can be tried.
        """
        child = subprocess.Popen(
            [sys.executable, "-m", "slipstream.serve.trial"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=os.environ | ALONE,
            start_new_session=True,  # an interrupt of the server is not its business
        )  # fmt: skip
        self._child = child
        weakref.finalize(self, _kill, child)
        self._tell(self._about, START_SECONDS)

    def _tell(self, value: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The child's answer.

        Raises:
            TimeoutError: there is none in time.
            OSError, ValueError: it has died.
        """
        child = self._child
        assert child is not None
        child.stdin.write(json.dumps(value).encode() + b"\n")
        child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], seconds)
        if not ready:
            raise TimeoutError
        return json.loads(child.stdout.readline())

    def _end(self) -> None:
        if self._child is not None:
            _kill(self._child)
            self._child = None


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for stream in (child.stdin, child.stdout):
        with suppress(OSError):
            stream.close()
    child.wait()


def main() -> None:
    """The child: a vocabulary, then rules, a line of JSON each; an answer for each line."""
    from llguidance import LLMatcher, LLTokenizer

    _limit()
    about = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(
        about["tokenizer"], n_vocab=about["vocab_size"], eos_token=about["eos_ids"]
    )
    _say({"fault": None})
    for line in sys.stdin:
        matcher = LLMatcher(tokenizer, json.loads(line)["rules"], log_level=0)
        if not matcher.is_error():
            with suppress(Exception):  # the matcher says what it was
                matcher.compute_bitmask()
        _say({"fault": reason(matcher) if matcher.is_error() else None})


def reason(matcher: Any) -> str:
    """Why a parser gave up, without the state it was in."""
    return " ".join(matcher.get_error().partition("<state>")[0].split())[:300]


def _limit() -> None:
    """Bound memory and time, where the system can."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
