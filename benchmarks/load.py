"""What many clients get at once: first-token and between-token times, and tokens per second.

    python benchmarks/load.py --out FILE.json     # eagle3; 1, 4, 16 and 64 clients, 16 minutes
    python benchmarks/load.py --methods ngram,eagle3+lookup:budget=auto --clients 1,4 --seconds 20
    python benchmarks/load.py --beside vllm --out FILE.json     # and vLLM's CPU build, plainly

Each client asks, waits for its answer's end and asks again. Methods take turns at every number of
clients, plain decoding among them, on one loaded target; prompts and settings are the same. Times
are seen at the engine's loop, without HTTP. Another engine runs in an environment of its own, with
its own defaults for a batch, and is stopped while ours runs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from catalogue import PEERS  # noqa: E402
from turns import start  # noqa: E402

from slipstream.bench.environment import busy_share, describe, physical_cores  # noqa: E402
from slipstream.bench.results import check_output, dumps, write_whole  # noqa: E402
from slipstream.bench.specs import PLAIN, parse_specs  # noqa: E402
from slipstream.bench.tasks import read_task  # noqa: E402
from slipstream.cli.bench_scripts import on_one_target, split_counts  # noqa: E402
from slipstream.cli.main import exit_status  # noqa: E402
from slipstream.engine.engine import Engine  # noqa: E402
from slipstream.engine.request import Piece  # noqa: E402
from slipstream.engine.service import Service  # noqa: E402
from slipstream.errors import BusyError, OutputError  # noqa: E402
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


class Clients:
    """Clients that ask again as soon as they are answered.

    Args:
        engine: checks the prompts.
        service: answers them.
        prompts: taken in turn.
        max_new_tokens: per answer.
    """

    def __init__(
        self, engine: Engine, service: Service, prompts: Sequence[str], max_new_tokens: int
    ) -> None:
        self._engine, self._service, self._limit = engine, service, max_new_tokens
        self._prompts = itertools.cycle(prompts)
        self._is_over = threading.Event()
        self.first: list[float] = []
        self.between: list[float] = []
        self.results: list = []

    def ask(self) -> None:
        """One more request; its end asks for the next."""
        request = self._engine.request(next(self._prompts), max_new_tokens=self._limit)
        last = asked = time.perf_counter()

        def hear(piece: Piece) -> None:
            nonlocal last
            now = time.perf_counter()
            if last == asked:
                self.first.append(now - asked)
            elif piece.token_ids:
                self.between += [(now - last) / len(piece.token_ids)] * len(piece.token_ids)
            last = now
            if piece.result is not None and not self._is_over.is_set():
                self.results.append(piece.result)
                self.ask()

        with suppress(BusyError):  # the last answers end as the service shuts down
            self._service.submit(request, hear)

    def run(self, count: int, seconds: float) -> float:
        """Let so many of them ask for so long; the seconds it took."""
        begun = time.perf_counter()
        for _ in range(count):
            self.ask()
        time.sleep(seconds)
        self._is_over.set()
        return time.perf_counter() - begun


def measure(
    name: str,
    engine: Engine,
    count: int,
    *,
    seconds: float,
    num_rows: int,
    prompts: Sequence[str],
    limit: int,
) -> Row:
    """One method under one number of clients; answers that were not finished are not counted."""
    service = engine.serve(num_rows=min(num_rows, count), max_waiting=count)
    clients = Clients(engine, service, prompts, limit)
    took = clients.run(count, seconds)
    done = list(clients.results)
    service.close()
    if leak := service.leaks():
        raise SystemExit(f"leak: {leak}")
    passes = sum(result.num_target_passes for result in done)
    accepted = sum(result.num_accepted for result in done)
    return Row(
        method=name,
        clients=count,
        seconds=round(took, 1),
        requests=len(done),
        errors=sum(result.finish_reason == "error" for result in done),
        tokens_per_second=(len(clients.between) + len(clients.first)) / took,
        first_token=percentiles(clients.first),
        between_tokens=percentiles(clients.between),
        tau=1 + accepted / passes if passes else 1.0,
    )


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


def measure_beside(name: str, side: Any, count: int, seconds: float) -> Row:
    """Another engine's plain decoding under one number of clients."""
    said = side.ask(count, seconds)
    return Row(
        method=name,
        clients=count,
        seconds=round(said["took"], 1),
        requests=said["num_answers"],
        errors=0,
        tokens_per_second=(len(said["between"]) + len(said["first"])) / said["took"],
        first_token=percentiles(said["first"]),
        between_tokens=percentiles(said["between"]),
        tau=1.0,
    )


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
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--num-rows", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
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
        print("tokens/s; seconds to the first token and between tokens as p50/p95/p99")
        for row in lines(engines, side, counts, prompts, asked):
            rows.append(row)
            if asked.out is not None:
                write_whole(asked.out, dumps(about | {"rows": rows}))


def lines(
    engines: dict[str, Engine],
    side: Any,
    counts: Sequence[int],
    prompts: Sequence[str],
    asked: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Every method at every number of clients, printed; plain decoding comes first."""
    for count in counts:
        plain = 0.0
        for name in (*engines, *([asked.beside] if side else [])):
            if name in engines:
                row = measure(
                    name,
                    engines[name],
                    count,
                    seconds=asked.seconds,
                    num_rows=asked.num_rows,
                    prompts=prompts,
                    limit=asked.max_new_tokens,
                )
            else:
                row = measure_beside(name, side, count, asked.seconds)
            if name == PLAIN.name:
                plain = row.tokens_per_second
            over = row.tokens_per_second / max(plain, 1e-9)
            print(
                f"{count:3} clients  {name:26} {row.tokens_per_second:7.1f} tokens/s  "
                f"{over:.2f} times plain  τ {row.tau:.2f}  "
                f"first {_times(row.first_token)}  between {_times(row.between_tokens)}  "
                f"{row.requests} answers, {row.errors} errors",
                flush=True,
            )
            yield asdict(row) | {"over_plain": over}


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
