"""How `slipstream bench` speaks to people: the prompts, the table, what changed since."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.output import console
from slipstream.cli.tasks import prompt_mode

if TYPE_CHECKING:
    from slipstream.bench.against import Comparison
    from slipstream.bench.results import BenchReport, Row
    from slipstream.bench.tasks import BenchPrompt


def announce(target: Any, encoded: dict[str, list[BenchPrompt]], raw: bool) -> None:
    """How many prompts there are, and what the first one looks like to the model."""
    from rich.markup import escape

    from slipstream.bench.tasks import ids_hash

    screen, mode = console(), prompt_mode(target, raw)
    for task, rows in encoded.items():
        text = target.tokenizer.decode(rows[0].ids, skip_special=False)
        screen.print(
            f"{escape(task)}: {len(rows)} prompts, mode {mode['mode']} "
            f"{escape(str(mode.get('template') or ''))}, ids {ids_hash(rows)}, first one:"
        )
        screen.print(
            f"  {escape(repr(text if len(text) < 160 else text[:80] + ' … ' + text[-70:]))}",
            style="dim",
        )


MEASURES = {"tau": "τ", "speedup": "speed-up", "decode_tokens_per_second": "tokens/s"}
LEGEND = (
    "tokens/s: after prefill; time: draft/target/other, % of decoding; equal: answers like plain "
    "decoding's, + true ties, ! different; loops: answers that end in a repetition, and τ without "
    "them; eff: speed-up over what τ and the pass times allow; 95% intervals over prompts"
)


def show(report: BenchReport, output: Path | None) -> None:
    """One table per task, temperature and batch size, then what a reader must know."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from slipstream.report.figures import place_of, shown

    screen, value = Console(highlight=False), report.to_dict()
    table, last = None, None
    for row, fields in zip(report.rows, value["rows"], strict=True):
        place = place_of(value, fields)
        if table is None or place != last:
            if table is not None:
                screen.print(table)
            names = ("τ", "speed-up", "tokens/s", "time", "equal", "loops", "eff")
            title = escape(place) if place else None
            table = Table(title=title, title_justify="left", box=None, pad_edge=False)
            table.add_column("method", overflow="fold", min_width=8)
            for name in names:
                table.add_column(name, no_wrap=True)
            last = place
        table.add_row(escape(shown(fields)), *_cells(row))
    if table is not None:
        screen.print(table)
    _footer(screen, report, output)


def _footer(screen: Any, report: BenchReport, output: Path | None) -> None:
    """Where it was measured, what the columns mean, and what a reader must know."""
    from rich.markup import escape

    from slipstream.report.figures import machine

    place = report.environment
    where = f"{place['model']} {place['dtype']}, {machine(place)}, {place['num_threads']} threads"
    screen.print(f"{escape(where)}\n{LEGEND}", style="dim")
    for note in report.notes:
        screen.print(f"note: {escape(note)}", style="yellow")
    if output is not None:
        beside = output.with_suffix(".svg").name
        screen.print(f"written: {escape(str(output))} and {escape(beside)}")


def _cells(row: Row) -> list[str]:
    parts = (row.draft_seconds, row.target_seconds, row.other_seconds)
    total = sum(parts)
    loops = f"{row.loops:.0%}"
    if row.loops:
        loops += f" ({_number(row.tau_without_loops) or '-'})"
    return [
        _number(row.tau),
        _number(row.speedup, row.speedup_ci),
        _number(row.decode_tokens_per_second, digits=1),
        "/".join(f"{100 * part / total:.0f}" for part in parts) if total else "",
        _equal(row),
        loops,
        _number(row.efficiency),
    ]


def _equal(row: Row) -> str:
    if row.identical is None:
        return "not promised"
    text = f"{row.identical}/{row.num_prompts}"
    return (
        text + (f" +{row.ties}" if row.ties else "") + (f" !{row.different}" * bool(row.different))
    )


def _number(
    value: float | None, interval: tuple[float, float] | None = None, *, digits: int = 2
) -> str:
    if value is None:
        return ""
    ends = "" if interval is None else f" ({interval[0]:.2f}–{interval[1]:.2f})"
    return f"{value:.{digits}f}{ends}"


def show_comparison(comparison: Comparison, old: Path) -> None:
    """What changed since the old result, worst first, and whether the gate holds."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from slipstream.bench.against import UNJUDGED

    screen = Console(highlight=False)
    table = Table(title=f"against {escape(str(old))}", title_justify="left", box=None)
    table.add_column("")
    table.add_column("row", overflow="fold", min_width=12)
    for name in ("measure", "old", "new", "new/old"):
        table.add_column(name, no_wrap=True)
    for change in sorted(comparison.changes, key=lambda change: change.ratio):
        colour = {"worse": "red", "better": "green", UNJUDGED: "yellow"}.get(
            change.verdict, "default"
        )
        place = f"{change.method} on {change.task}"
        if change.temperature or change.num_rows > 1:
            place += f", T={change.temperature:g}, {change.num_rows} rows"
        table.add_row(
            f"[{colour}]{change.verdict}[/]",
            escape(place),
            MEASURES[change.measure],
            _number(change.old),
            _number(change.new),
            _number(change.ratio, change.ratio_ci),
        )
    screen.print(table)
    for name in comparison.missing:
        screen.print(f"note: {escape(name)} was not measured this time", style="yellow")
    for note in comparison.notes:
        screen.print(f"note: {escape(note)}", style="yellow")
    word = "[red]worse beyond noise[/]" if comparison.is_worse else "[green]no worse[/]"
    screen.print(f"{word} than {escape(str(old))}")
