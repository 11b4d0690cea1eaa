"""`slipstream report`: result files as one HTML page that opens offline.

Sources are told apart by what is in them: bench results, tune results, traces. Everything is
inside the page; text from prompts and answers is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.bench import results
from slipstream.bench.specs import PLAIN
from slipstream.errors import DataError
from slipstream.report import drafting_figures, figures, trace
from slipstream.report.figures import Figure
from slipstream.report.page import Picture, asset, fill, picture
from slipstream.report.trace import Trace
from slipstream.types import Step

TUNE = "slipstream tune"
MOST_DRAWN = 40  # drafted nodes of one picture


@dataclass(slots=True)
class Sources:
    """What the files held, each with its file's name.

    Args:
        benches: results of `slipstream bench`.
        tunes: results of `slipstream tune`.
        traces: of `--trace`, all files in a row.
    """

    benches: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    tunes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Part:
    """One result file on the page.

    Args:
        name: of the file.
        facts: its conditions, name and value.
        notes: warnings first.
        headings: of the table.
        table: rows of cells, as text.
        latency: likewise, percentiles; empty for results of older versions.
        pictures: its figures.
        tiles: its headline, value and words.
    """

    name: str
    facts: Sequence[tuple[str, str]]
    notes: Sequence[str]
    headings: Sequence[str]
    table: Sequence[Sequence[str]]
    latency: Sequence[Sequence[str]] = ()
    pictures: Sequence[Figure] = ()
    tiles: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Viewer:
    """One trace, ready to be stepped through."""

    trace: Trace
    frames: Sequence[Picture]


def read_sources(paths: Sequence[Path]) -> Sources:
    """Read every file and sort it by what it is.

    Raises:
        DataError: a file cannot be read, or is none of the known kinds.
    """
    sources = Sources()
    for path in paths:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as JSON: {error}") from error
        kind = value.get("kind") if isinstance(value, dict) else None
        if kind == results.KIND:
            sources.benches.append((path.name, results.read(path)))
        elif kind == trace.KIND:
            sources.traces += trace.loads(value, str(path))
        elif kind == TUNE:
            sources.tunes.append((path.name, value))
        else:
            raise DataError(
                f"{path} is of no kind that a report shows, expected a result of bench or tune, "
                "or a trace",
                "slipstream bench --output FILE.json, slipstream generate --trace FILE.json",
            )
    return sources


def render(sources: Sources, *, title: str = "What was measured") -> str:
    """The page as one HTML document."""
    return fill(
        "report.html.j2",
        title=title,
        parts=[_bench(name, value) for name, value in sources.benches],
        tunes=[_tune(name, value) for name, value in sources.tunes],
        confidence=_confidence(sources.traces),
        viewers=[_viewer(one) for one in sources.traces],
        script=asset("viewer.js"),
    )


def _bench(name: str, value: Mapping[str, Any]) -> Part:
    """A bench file's part of the page."""
    headings = [
        "task", "method", "T", "rows", "τ, tokens/pass", "speed-up", "tokens/s",
        "draft / model / rest, %", "same / tie / different", "prompts",
    ]  # fmt: skip
    return Part(
        name=name,
        facts=_facts(value),
        notes=value.get("notes", ()),
        headings=headings,
        table=[_cells(row) for row in value["rows"]],
        latency=[_latency(row) for row in value["rows"] if row.get("token_latency")],
        pictures=figures.of_bench(value),
        tiles=_tiles(value),
    )


def _tiles(value: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The best row and how many answers are equal; nothing where nothing drafts."""
    rows = [row for row in value["rows"] if row["method"] != PLAIN.name]
    judged = [row for row in rows if row["identical"] is not None]
    found = []
    # A method whose every answer differs has no speed-up, and counts below all the more.
    if fair := [row for row in rows if row["speedup"]]:
        best = max(fair, key=lambda row: row["speedup"])
        place = figures.place_of(value, best) or best["task"]
        found += [
            (f"{best['speedup']:.2f}×", f"best speed-up: {figures.shown(best)} · {place}"),
            (f"{best['tau']:.2f}", "its tokens per pass, τ"),
        ]
    if judged:
        same = sum(row["identical"] for row in judged)
        total = sum(row["num_prompts"] for row in judged)
        found.append((f"{same}/{total}", "answers that are plain decoding's, token for token"))
    return found


def _cells(row: Mapping[str, Any]) -> list[str]:
    spent = [row[f"{part}_seconds"] for part in ("draft", "target", "other")]
    whole = sum(spent)
    same = [row[key] for key in ("identical", "ties", "different")]
    return [
        row["task"],
        figures.shown(row),
        f"{row['temperature']:g}",
        str(row["num_rows"]),
        _number(row["tau"], row["tau_ci"]),
        _number(row["speedup"], row["speedup_ci"]),
        _number(row["decode_tokens_per_second"], digits=1),
        " / ".join(f"{100 * part / whole:.0f}" for part in spent) if whole else "",
        "in law only" if None in same else " / ".join(map(str, same)),
        str(row["num_prompts"]),
    ]


def _latency(row: Mapping[str, Any]) -> list[str]:
    """Milliseconds of both latencies."""
    found = [row["task"], figures.shown(row), f"{row['temperature']:g}", str(row["num_rows"])]
    for name in ("prefill_latency", "token_latency"):
        spread = row[name] or {}
        found += [f"{1000 * spread[p]:.1f}" if p in spread else "" for p in ("p50", "p90", "p99")]
    return found


def _number(value: float | None, ends: Sequence[float] | None = None, *, digits: int = 2) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" + (f" ({ends[0]:.2f}–{ends[1]:.2f})" if ends else "")


def _facts(value: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Conditions of a bench, as name and text."""
    place, settings = value["environment"], value["settings"]
    busy = place.get("busy_share")
    facts = [
        ("model", f"{place.get('model')}, {place.get('dtype')}"),
        ("machine", f"{figures.machine(place)}, {place.get('platform')}"),
        ("threads", f"{place.get('num_threads')} of {place.get('num_cores')} cores"),
        ("others' share of the CPU", "unknown" if busy is None else f"{busy:.0%}"),
        ("answers", f"up to {settings.get('max_new_tokens')} tokens"),
        ("versions", ", ".join(f"{k} {v}" for k, v in place.get("versions", {}).items())),
        ("commit", str(place.get("revision"))),
    ]
    counts = (f"{p['task']} {p['num_prompts']}" for p in value.get("prompts", ()))
    return [*facts, ("prompts", ", ".join(counts))]


def _tune(name: str, value: Mapping[str, Any]) -> Part:
    """A tune file's part of the page."""
    best = value.get("best") or {}
    tiles = [
        (f"{value[key]:.2f}×", words)
        for key, words in (
            ("predicted_speedup", "speed-up predicted for the best setting"),
            ("measured_speedup", "speed-up measured on other prompts"),
        )
        if value.get(key) is not None
    ]
    advice = value.get("advice") or ()
    return Part(
        name=name,
        facts=[(key, str(setting)) for key, setting in best.items()],
        notes=[advice] if isinstance(advice, str) else list(advice),
        headings=(),
        table=(),
        pictures=drafting_figures.of_tune(value),
        tiles=tiles,
    )


def _confidence(traces: Sequence[Trace]) -> list[Figure]:
    """What the steps of each method tell about its drafter, trace by trace."""
    steps: dict[str, dict[str, Sequence[Step]]] = {}
    for number, one in enumerate(traces):
        name = one.method + (f" at temperature {one.temperature:g}" if one.temperature else "")
        steps.setdefault(name, {})[f"{one.title} {number}"] = one.steps
    return [
        replace(figure, name=f"{figure.name}-{number}")
        for number, (name, taken) in enumerate(steps.items(), start=1)
        for figure in drafting_figures.of_steps(taken, name)
    ]


def _viewer(one: Trace) -> Viewer:
    frames = []
    for index, step in enumerate(one.steps):
        title = f"Step {index + 1} of {len(one.steps)}"
        frames.append(picture(step, one.piece, title=title, max_nodes=MOST_DRAWN))
    return Viewer(one, frames)
