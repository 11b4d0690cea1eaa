"""The figures of bench results: what is drawn, from the JSON values as they are.

The report page, the chart beside a bench file and the docs all draw with these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from slipstream.bench import measures
from slipstream.bench.specs import PLAIN
from slipstream.report.bars import Bar, bar_chart, stacked_chart
from slipstream.report.charts import Curve, line_chart
from slipstream.report.svg import Point

Row = Mapping[str, Any]
Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """One picture of a report.

    Args:
        name: for file names and anchors, unique in a report.
        svg: the picture.
        caption: how to read it, one or two sentences.
    """

    name: str
    svg: str
    caption: str


def of_bench(result: Result) -> list[Figure]:
    """Every figure that a bench result has the numbers for."""
    made = [
        Figure(
            "speedup",
            speedups(result),
            "Decoding rate over plain decoding's in the same run; whiskers are 95% intervals over "
            "prompts, methods paired. The dashed line is plain decoding.",
        ),
        Figure(
            "tau",
            accepted_lengths(result),
            "τ: tokens that one pass of the model yields, its own token included. It depends on "
            "drafter and text, not on the machine.",
        ),
        Figure(
            "time",
            _time_of_a_pass(result),
            "Where the time of one pass goes: drafting, the model's pass over the drafted tree, "
            "and everything else (a row's share, where rows share a pass). More tokens a pass pay "
            "only if the bar grows less.",
        ),
        Figure(
            "reach",
            _by_position(result, "reach", "Accepted at each depth, share of all passes"),
            "Reach: how often the node at a depth was accepted at all; τ is 1 plus their sum.",
        ),
        Figure(
            "alpha",
            _by_position(result, "alpha", "Accepted at each depth, given the depth before"),
            "α: acceptance of a depth among the passes that accepted the depth before. Flat means "
            "the drafter stays as good as it goes deeper.",
        ),
        Figure(
            "latency",
            _token_latency(result),
            "Mean time per token after the first: half of the answers are faster than the bar "
            "(p50), one in a hundred is slower than the whisker's end (p99).",
        ),
    ]
    return [figure for figure in made if "<rect" in figure.svg or "<polyline" in figure.svg]


def speedups(result: Result) -> str:
    """Speed-up of every method by task, with intervals: the chart beside a bench file."""
    where = conditions(result["environment"])
    title = f"Speed-up over plain decoding: {where}"
    return _bars(result, "speedup", "speedup_ci", title=title, unit="×")


def accepted_lengths(result: Result) -> str:
    """Tokens per target pass of every method by task, with intervals."""
    where = conditions(result["environment"])
    return _bars(result, "tau", "tau_ci", title=f"Accepted length by task: {where}", unit="")


def machine(environment: Mapping[str, Any]) -> str:
    """A processor or accelerator, with what its passes were made of where that is known."""
    name = str(environment.get("accelerator") or environment.get("cpu"))
    found = environment.get("instructions")
    return f"{name} ({found})" if found else name


def conditions(environment: Mapping[str, Any]) -> str:
    """Model, number type and threads in a few words."""
    device = environment.get("accelerator")
    count = environment.get("num_threads")
    place = device or f"{count} thread{'s' * (count != 1)}"
    return f"{environment.get('model')}, {environment.get('dtype')}, {place}"


def place_of(result: Result, row: Row, *, with_task: bool = True) -> str:
    """Task, temperature and batch size of a row, where the result has several; possibly empty."""
    rows, parts = result["rows"], []
    if with_task and len({each["task"] for each in rows}) > 1:
        parts.append(row["task"])
    if len({each["temperature"] for each in rows}) > 1:
        parts.append(f"T={row['temperature']:g}")
    if len({each["num_rows"] for each in rows}) > 1:
        parts.append(f"{row['num_rows']} row{'s' * (row['num_rows'] > 1)}")
    return " · ".join(parts)


def shown(row: Row) -> str:
    """The method's name, marked where its rule gives the model's law up."""
    return row["method"] + ("" if row.get("lossless", True) else " (lossy)")


def _drafting(result: Result) -> list[Row]:
    return [row for row in result["rows"] if row["method"] != PLAIN.name]


def _bars(result: Result, key: str, interval: str, *, title: str, unit: str) -> str:
    """One bar per row but plain decoding's, grouped by task, temperature and batch size."""
    groups: dict[str, list[Bar]] = {}
    for row in _drafting(result):
        if row[key] is not None:
            ends = tuple(row[interval]) if row[interval] else None
            bar = Bar(shown(row), row[key], ends, series=row["method"])
            groups.setdefault(place_of(result, row), []).append(bar)
    return bar_chart(groups, title=title, unit=unit, decimals=2, baseline=1.0)


def _time_of_a_pass(result: Result) -> str:
    """Milliseconds of one pass by what they are spent on, plain decoding's pass among them."""
    bars = {}
    for row in result["rows"]:
        passes = _passes(row)
        if passes:
            label = " · ".join(filter(None, (place_of(result, row), shown(row))))
            bars[label] = {
                name: row[f"{name}_seconds"] / passes for name in ("draft", "target", "other")
            }
    title = "Time of one pass: drafting, the model, the rest"
    return stacked_chart(bars, title=title, unit="ms", scale=1000)


def _passes(row: Row) -> float:
    """Target passes after prefill: decoded tokens over tau."""
    decoded = row["num_tokens"] - row["num_prompts"]
    return decoded / row["tau"] if row["tau"] else 0.0


def _by_position(result: Result, key: str, title: str) -> str:
    """One curve per method and temperature, all tasks and batch sizes pooled by passes."""
    pooled: dict[str, list[Row]] = {}
    for row in _drafting(result):
        several = len({each["temperature"] for each in result["rows"]}) > 1
        label = shown(row) + (f" · T={row['temperature']:g}" if several else "")
        pooled.setdefault(label, []).append(row)
    curves: dict[str, Curve | Sequence[Point]] = {}
    for label, rows in pooled.items():
        passes = sum(_passes(row) for row in rows)
        reached = [
            sum(_passes(row) * share for row, share in zip(rows, shares, strict=True)) / passes
            for shares in zip_longest(*(row["reach"] for row in rows), fillvalue=0.0)
        ]
        shares = reached if key == "reach" else measures.alpha(reached)
        points = [(depth + 1, share) for depth, share in enumerate(shares)]
        if points:
            bands = [share_interval(share, passes) for share in shares] if key == "reach" else ()
            curves[label] = Curve(points, bands)
    return line_chart(curves, title=title, x_label="depth of the drafted node", y_label="share")


def share_interval(share: float, count: float) -> tuple[float, float]:
    """Wilson's 95% interval of a share of `count` passes."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def _token_latency(result: Result) -> str:
    """p50 of the time per token, up to p99; results of older versions have none."""
    groups: dict[str, list[Bar]] = {}
    for row in result["rows"]:
        spread = row.get("token_latency")
        if spread:
            half, most = 1000 * spread["p50"], 1000 * spread["p99"]
            bar = Bar(shown(row), half, (half, most), series=row["method"])
            groups.setdefault(place_of(result, row), []).append(bar)
    return bar_chart(groups, title="Time per token after the first, by answer", unit="ms")
