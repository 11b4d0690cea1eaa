"""What many clients get at once: first-token and between-token times, and tokens per second.

    python benchmarks/load.py --out FILE.json     # 1, 4, 16 and 64 clients, 16 minutes
    python benchmarks/load.py --methods ngram,eagle3+lookup:budget=auto --clients 1,4 --seconds 20
    python benchmarks/load.py --beside vllm --out FILE.json     # and vLLM's CPU build, plainly
    python benchmarks/load.py --http --clients 1,16     # through `slipstream serve`, streamed

Each client asks, waits for its answer's end and asks again. At every number of clients methods take
turns, plain decoding among them, on one loaded target, each with a service of its own that
remembers from turn to turn what pays; prompts and settings are the same. Times are seen at the
engine's loop, without HTTP; with `--http` each method has a server in a process of its own, and
times are seen by clients that stream. Another engine runs in an environment of its own, with its
own defaults for a batch, and is stopped while ours runs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

sys.path.insert(0, str(HERE))

from catalogue import PEERS  # noqa: E402
from served import HttpClients, Served  # noqa: E402
from turns import start  # noqa: E402

from slipstream.bench.environment import busy_share, describe, physical_cores  # noqa: E402
from slipstream.bench.results import check_output, dumps, write_whole  # noqa: E402
from slipstream.bench.specs import PLAIN, MethodSpec, parse_specs  # noqa: E402
from slipstream.bench.tasks import read_task  # noqa: E402
from slipstream.cli.bench_scripts import on_one_target, split_counts  # noqa: E402
from slipstream.cli.main import exit_status  # noqa: E402
from slipstream.engine.engine import Engine  # noqa: E402
from slipstream.engine.request import Piece, Request, Result  # noqa: E402
from slipstream.errors import OutputError  # noqa: E402
from slipstream.target.embedded import cache_root  # noqa: E402
from slipstream.target.hf import write_dequantised  # noqa: E402
from slipstream.target.source import resolve  # noqa: E402

TASKS = ("mt_bench", "gsm8k_test", "humaneval")
BESIDE = ("vllm",)
"""Peers with a side for many clients, `peers/NAME_load_side.py`."""


@dataclass(frozen=True)
class Row:
    """One method under so many clients; times in seconds, each p50, p95 and p99."""

    method: str
    clients: int
    seconds: float
    requests: int
    errors: int
    tokens_per_second: float
    first_token: tuple[float, float, float]
    between_tokens: tuple[float, float, float]
    tau: float


@dataclass(slots=True)
class Heard:
    """What clients heard, added up over turns; requests are those that ended in a turn."""

    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    requests: int = 0
    errors: int = 0
    num_passes: int = 0
    num_accepted: int = 0

    def add(self, result: Result) -> None:
        """Count a finished request."""
        self.requests += 1
        self.errors += result.finish_reason == "error"
        self.num_passes += result.num_target_passes
        self.num_accepted += result.num_accepted

    def row(self, method: str, clients: int) -> Row:
        """As the table has it."""
        return Row(
            method=method,
            clients=clients,
            seconds=round(self.seconds, 1),
            requests=self.requests,
            errors=self.errors,
            tokens_per_second=(len(self.between) + len(self.first)) / self.seconds,
            first_token=percentiles(self.first),
            between_tokens=percentiles(self.between),
            tau=1 + self.num_accepted / self.num_passes if self.num_passes else 1.0,
        )


class Clients:
    """Clients that ask again as soon as they are answered.

    Args:
        engine: checks the prompts.
        num_rows: decoded together.
        count: how many clients.
        prompts: taken in turn.
        max_new_tokens: per answer.
    """

    def __init__(
        self, engine: Engine, *, num_rows: int, count: int, prompts: Sequence[str],
        max_new_tokens: int,
    ) -> None:  # fmt: skip
        self._engine, self._count, self._limit = engine, count, max_new_tokens
        self._service = engine.serve(num_rows=min(num_rows, count), max_waiting=count)
        self._prompts = itertools.cycle(prompts)
        self._open: dict[int, Request] = {}
        self._is_over = threading.Event()

    def run(self, heard: Heard, seconds: float) -> None:
        """Let them ask for so long, then hang up; nothing after that is heard."""
        self._is_over.clear()
        begun = time.perf_counter()
        for _ in range(self._count):
            self._ask(heard)
        time.sleep(seconds)
        self._is_over.set()
        heard.seconds += time.perf_counter() - begun
        for request in list(self._open.values()):
            self._service.abort(request)
        while self._open:
            time.sleep(0.01)

    def close(self) -> None:
        """End the service.

        Raises:
            SystemExit: it still holds something.
        """
        self._service.close()
        if leak := self._service.leaks():
            raise SystemExit(f"leak: {leak}")

    def _ask(self, heard: Heard) -> None:
        """One more request; its end asks for the next."""
        request = self._engine.request(next(self._prompts), max_new_tokens=self._limit)
        self._open[request.key] = request
        last = asked = time.perf_counter()

        def hear(piece: Piece) -> None:
            nonlocal last
            if not self._is_over.is_set():
                now = time.perf_counter()
                if last == asked:
                    heard.first.append(now - asked)
                elif piece.token_ids:
                    heard.between += [(now - last) / len(piece.token_ids)] * len(piece.token_ids)
                last = now
                if piece.result is not None:
                    heard.add(piece.result)
                    self._ask(heard)
            if piece.result is not None:
                del self._open[request.key]  # after the next one is there: `run` waits for all

        self._service.submit(request, hear)


class Peer:
    """Another engine's plain decoding, asked the same.

    Args:
        side: loaded and waiting.
        count: how many clients.
    """

    def __init__(self, side: Any, count: int) -> None:
        self._side, self._count = side, count

    def run(self, heard: Heard, seconds: float) -> None:
        """Let them ask for so long."""
        said = self._side.ask(self._count, seconds)
        heard.seconds += said["took"]
        heard.first += said["first"]
        heard.between += said["between"]
        heard.requests += said["num_answers"]

    def close(self) -> None:
        """It stays for the next number of clients."""


def beside(
    name: str, target: Any, prompts: Sequence[str], asked: argparse.Namespace, closing: ExitStack
) -> Any:
    """Another engine, loaded and waiting.

    Raises:
        OutputError: it cannot run here.
    """
    peer, errors = PEERS[name], {}
    texts = [target.tokenizer.encode_chat([{"role": "user", "content": p}]) for p in prompts]
    job = {
        "model": resolve(asked.model, write_dequantised),
        "dtype": str(target.spec.dtype).removeprefix("torch."),
        "prompts": texts,
        "max_new_tokens": asked.max_new_tokens,
        "max_length": 2048,
        "threads": physical_cores(),
    }
    sides = start(
        {(f"{name}_load", "plain"): peer}, job, errors,
        environments=asked.environments, threads=physical_cores(),
    )  # fmt: skip
    for error in errors.values():
        raise OutputError(f"{name} cannot run here: {error}", "leave out --beside")
    (side,) = sides.values()
    closing.callback(side.close)
    return side


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """p50, p95 and p99 of values; zeros of none.

    Example:
        >>> percentiles([float(n) for n in range(101)])
        (50.0, 95.0, 99.0)
    """
    ranked = sorted(values)
    if not ranked:
        return 0.0, 0.0, 0.0
    at = (round(share * (len(ranked) - 1)) for share in (0.5, 0.95, 0.99))
    p50, p95, p99 = (ranked[place] for place in at)
    return p50, p95, p99


def _times(seconds: Sequence[float]) -> str:
    return "/".join(f"{value:.3f}" for value in seconds)


def main() -> None:
    """Measure and print; --out keeps every row at once, with the conditions they hold under."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", default="eagle3", help="as for `slipstream bench`")
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="of a line, all turns together"
    )
    parser.add_argument("--turns", type=int, default=4, help="of each method")
    parser.add_argument("--num-rows", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--http", action="store_true", help="through servers, streamed")
    parser.add_argument("--beside", choices=BESIDE, help="another engine under the same load")
    parser.add_argument("--environments", type=Path, default=cache_root() / "peers")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.out is not None:
        check_output(asked.out, overwrite=True)
    counts = split_counts("clients", asked.clients)
    prompts = [row.text for task in TASKS for row in read_task(task)[:20]]
    specs = parse_specs(asked.methods)  # plain decoding comes first
    wanted = [(spec.method, {"max_length": 2048, **spec.settings}) for spec in specs]
    made = on_one_target(asked.model, wanted, dtype=asked.dtype)
    engines = dict(zip((spec.name for spec in specs), made, strict=True))
    target, rows = engines[PLAIN.name].target, []
    about = {"environment": describe(target), "busy_share": busy_share()}
    unsaid = ("out", "environments")
    about["settings"] = {name: value for name, value in vars(asked).items() if name not in unsaid}
    with ExitStack() as closing:
        side = None
        if asked.beside is not None:
            side = beside(asked.beside, target, prompts, asked, closing)
            about["versions"] = side.versions
        makers = clients_of(engines, specs, prompts, asked, closing)
        if side is not None:
            makers[asked.beside] = lambda count: Peer(side, count)
        print("tokens/s; seconds to the first token and between tokens as p50/p95/p99")
        for row in lines(makers, counts, asked):
            rows.append(row)
            if asked.out is not None:
                write_whole(asked.out, dumps(about | {"rows": rows}))


def clients_of(
    engines: dict[str, Engine],
    specs: Sequence[MethodSpec],
    prompts: Sequence[str],
    asked: argparse.Namespace,
    closing: ExitStack,
) -> dict[str, Callable[[int], Any]]:
    """By method, what makes so many clients of it.

    Args:
        engines: by method, on one target.
        specs: the methods, in order.
        prompts: that clients ask.
        asked: the rest.
        closing: ends servers.

    Raises:
        OutputError: a server does not start.
    """
    given = {"prompts": prompts, "max_new_tokens": asked.max_new_tokens}
    if not asked.http:
        return {
            name: partial(_in_process, engine, asked.num_rows, given)
            for name, engine in engines.items()
        }
    options = ["--model", asked.model, "--dtype", asked.dtype, "--max-length", "2048"]
    options += ["--num-rows", str(asked.num_rows), "--max-waiting", "256"]
    makers: dict[str, Callable[[int], Any]] = {}
    for spec in specs:
        served = Served(spec, options)
        closing.callback(served.close)
        makers[spec.name] = partial(_over_http, served, given)
    return makers


def _in_process(engine: Engine, num_rows: int, given: dict[str, Any], count: int) -> Clients:
    return Clients(engine, num_rows=num_rows, count=count, **given)


def _over_http(served: Served, given: dict[str, Any], count: int) -> HttpClients:
    return HttpClients(served, count=count, **given)


def lines(
    makers: dict[str, Callable[[int], Any]], counts: Sequence[int], asked: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Every method at every number of clients, printed; plain decoding comes first."""
    for count in counts:
        sides = {name: make(count) for name, make in makers.items()}
        heard = {name: Heard() for name in sides}
        for _ in range(asked.turns):
            for name, clients in sides.items():
                clients.run(heard[name], asked.seconds / asked.turns)
        for clients in sides.values():
            clients.close()
        rows = [each.row(name, count) for name, each in heard.items()]
        plain = rows[0].tokens_per_second
        for row in rows:
            over = row.tokens_per_second / max(plain, 1e-9)
            print(
                f"{count:3} clients  {row.method:26} {row.tokens_per_second:7.1f} tokens/s  "
                f"{over:.2f} times plain  τ {row.tau:.2f}  "
                f"first {_times(row.first_token)}  between {_times(row.between_tokens)}  "
                f"{row.requests} answers, {row.errors} errors",
                flush=True,
            )
            yield asdict(row) | {"over_plain": over}


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
