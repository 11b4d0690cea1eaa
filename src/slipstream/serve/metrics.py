"""Counters for Prometheus, under the names that vLLM's dashboards read.

A draft may be a tree here: `num_draft_tokens` counts verified nodes, `num_accepted_tokens` those
that were kept, so that 1 + accepted / drafts is the mean accepted length, as there.
"""

from __future__ import annotations

import json
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from slipstream.engine.request import Piece, Request, Result

log = logging.getLogger("slipstream.serve")

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Counts of values at most each edge.

    Args:
        edges: ascending.
    """

    def __init__(self, edges: tuple[float, ...] = SECONDS) -> None:
        self._edges, self._counts = edges, [0] * (len(edges) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._edges, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Prometheus' text: cumulated buckets, sum and count."""
        total = 0
        for edge, count in zip((*self._edges, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{edge}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum:g}"
        yield f"{name}_count{{{labels}}} {total}"


class Metrics:
    """What a server has done since it started. Used from one thread, the event loop's.

    Args:
        model: the served name, a label of every series.
    """

    def __init__(self, model: str) -> None:
        escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._labels = f'model_name="{escaped}"'
        self._counters: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._accepted_at: Counter[int] = Counter()
        self._first = Histogram()
        self._between = Histogram()
        self._whole = Histogram()

    def note_first(self, seconds: float) -> None:
        """Time to a first token."""
        self._first.add(seconds)

    def note_between(self, seconds: float, num_tokens: int) -> None:
        """A piece of so many tokens came so long after the one before it."""
        for _ in range(num_tokens):
            self._between.add(seconds / num_tokens)

    def note_result(self, result: Result, seconds: float) -> None:
        """A request is over, so long after it came."""
        self._finished[result.finish_reason] += 1
        self._whole.add(seconds)
        self._counters["prompt_tokens"] += len(result.prompt_ids)
        self._counters["generation_tokens"] += result.num_tokens
        self._counters["spec_decode_num_drafts"] += result.num_draft_steps
        self._counters["spec_decode_num_draft_tokens"] += result.num_draft_nodes
        self._counters["spec_decode_num_accepted_tokens"] += result.num_accepted
        for depth, share in enumerate(result.reach):
            self._accepted_at[depth] += round(share * result.num_target_passes)

    def text(self, gauges: dict[str, float], *, num_put_off: int) -> str:
        """The whole page, with these present values by name.

        Args:
            gauges: values that go up and down.
            num_put_off: times a running request had to give way so far.
        """
        self._counters["num_preemptions"] = num_put_off
        return "\n".join(self._lines(gauges)) + "\n"

    def _lines(self, gauges: dict[str, float]) -> Iterator[str]:
        for name, value in gauges.items():
            yield f"# TYPE vllm:{name} gauge"
            yield f"vllm:{name}{{{self._labels}}} {value:g}"
        for name in (
            "prompt_tokens",
            "generation_tokens",
            "num_preemptions",
            "spec_decode_num_drafts",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
        ):
            yield f"# TYPE vllm:{name}_total counter"
            yield f"vllm:{name}_total{{{self._labels}}} {self._counters[name]}"
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        yield f"# TYPE {name} counter"
        for depth, count in sorted(self._accepted_at.items()):
            yield f'{name}{{{self._labels},position="{depth}"}} {count}'
        yield "# TYPE vllm:request_success_total counter"
        for reason, count in sorted(self._finished.items()):
            labels = f'{self._labels},finished_reason="{reason}"'
            yield f"vllm:request_success_total{{{labels}}} {count}"
        for name, histogram in (
            ("time_to_first_token_seconds", self._first),
            ("inter_token_latency_seconds", self._between),
            ("e2e_request_latency_seconds", self._whole),
        ):
            yield f"# TYPE vllm:{name} histogram"
            yield from histogram.lines(f"vllm:{name}", self._labels)


class Watch:
    """Counts the pieces of one HTTP request as they come; one line of log when all rows are over.

    It hears of answers that a deadline or a client ended too, since their rows' last pieces come
    whether or not they are read.

    Args:
        metrics: where they count.
        id_: of the answer.
        rows: its choices.
        begun: when it was asked for, by `time.monotonic`.
    """

    def __init__(self, metrics: Metrics, id_: str, rows: Sequence[Request], begun: float) -> None:
        self._metrics, self._id, self._rows, self._begun = metrics, id_, rows, begun
        self._before: dict[int, float] = {}  # by choice, when its last piece came
        self._results: list[Result] = []

    def hear(self, index: int, piece: Piece) -> None:
        """A choice has a new piece."""
        now = time.monotonic()
        if piece.token_ids and index in self._before:
            self._metrics.note_between(now - self._before[index], len(piece.token_ids))
        elif piece.token_ids:
            self._metrics.note_first(now - self._begun)
        self._before[index] = now
        if piece.result is not None:
            self._metrics.note_result(piece.result, now - self._begun)
            self._results.append(piece.result)
            if len(self._results) == len(self._rows):
                self._tell(now - self._begun)

    def _tell(self, seconds: float) -> None:
        told = {
            "id": self._id,
            "choices": len(self._rows),
            "finished": [result.finish_reason for result in self._results],
            "prompt_tokens": self._rows[0].num_prompt,
            "completion_tokens": sum(result.num_tokens for result in self._results),
            "tau": [round(result.tau, 3) for result in self._results],
            "seconds": round(seconds, 3),
        }
        log.info("%s", json.dumps(told))
