"""`slipstream bench`: methods x prompts under one ruler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.checks import DEFAULT_MODEL, check_at_least_one
from slipstream.cli.output import console, json_output, quiet_libraries
from slipstream.cli.progress import progress_bar
from slipstream.cli.tasks import (
    TaskLimitOption,
    TasksOption,
    encode_tasks,
    load_engines,
    prompt_mode,
    read_texts,
    setups_of,
    twin_of,
)
from slipstream.errors import SettingError

if TYPE_CHECKING:
    from slipstream.bench.results import BenchReport, Row
    from slipstream.bench.tasks import BenchPrompt

METHODS_HELP = (
    "Separated by commas; none is always measured. A method may carry settings: eagle3+lookup, "
    "eagle3:chain, eagle3:budget=16,depth=5,topk=6, eagle3:drafter=FOLDER."
)
MethodsOption = Annotated[str, typer.Option("--methods", metavar="A,B", help=METHODS_HELP)]


def bench(
    methods: MethodsOption = "ngram,eagle3,eagle3+lookup",
    tasks: TasksOption = None,
    prompts: o.PromptsOption = None,
    limit: TaskLimitOption = 16,
    model: o.ModelOption = DEFAULT_MODEL,
    drafter: o.DrafterOption = None,
    max_new_tokens: o.MaxNewTokensOption = 128,
    temperature: Annotated[
        str, typer.Option("--temperature", help="One, or several separated by commas; 0 is greedy.")
    ] = "0",
    rows: Annotated[
        str, typer.Option("--rows", "--num-rows", help="Batch sizes, separated by commas.")
    ] = "1",
    top_p: o.TopPOption = 1.0,
    top_k: o.TopKOption = 0,
    seed: o.SeedOption = 0,
    raw: o.RawOption = False,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE.json", help="Write results there, a chart beside."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --output.")] = False,
    json: o.JsonOption = False,
) -> None:
    """Measure accepted length and speed of methods against plain decoding, interleaved.

    Every answer is compared with plain decoding's. An interrupt keeps what every method finished.
    """
    from slipstream.bench.specs import parse_specs

    specs = parse_specs(methods)
    temperatures = tuple(_numbers("temperature", temperature, float))
    sizes = tuple(_numbers("rows", rows, int))
    for size in sizes:
        check_at_least_one("rows", size)
    for each in temperatures:
        o.Decoding(max_new_tokens, each, top_k, top_p, seed)
    setup = o.Setup(model, "none", None, dtype=dtype, device=device, threads=threads)
    setups = setups_of(setup, specs, drafter)
    with json_output(json) as writer:
        if output is not None:
            _check_output(output, overwrite)
        texts = read_texts(tasks, prompts, limit)
        quiet_libraries()
        from slipstream.bench import runner

        engines = load_engines(setups)
        target = engines["none"].target
        encoded = encode_tasks(target, texts, raw=raw)
        settings = runner.RunSettings(max_new_tokens, temperatures, sizes, top_k, top_p, seed)
        if not json:
            _announce(target, encoded, raw)
        with progress_bar("measuring") as on_progress:
            report = runner.run(
                engines, encoded, settings, load_twin=twin_of(target), on_progress=on_progress
            )
        report.settings |= {
            "methods": {spec.name: engines[spec.name].describe() for spec in specs},
            "prompt_mode": prompt_mode(target, raw),
        }
        if output is not None:
            _write(report, output)
        if json:
            writer.write(report.to_dict())
        else:
            _show(report, output)
    if report.is_partial:
        raise KeyboardInterrupt


def _numbers(name: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        found = [kind(piece) for piece in text.split(",")]
    except ValueError:
        raise SettingError(name, f"'{text}'", "numbers separated by commas") from None
    for number in found:
        if found.count(number) > 1:
            raise SettingError(name, f"{number} twice", "each number once")
    return found


def _check_output(output: Path, overwrite: bool) -> None:
    from slipstream.bench.results import check_output

    check_output(output, overwrite=overwrite)
    if output.suffix != ".json":
        raise SettingError("output", output, "a file name that ends in .json")
    chart = output.with_suffix(".svg")
    check_output(chart, overwrite=overwrite)


def _announce(target: Any, encoded: dict[str, list[BenchPrompt]], raw: bool) -> None:
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


def _write(report: BenchReport, output: Path) -> None:
    from slipstream.bench.results import dumps, write_whole

    write_whole(output, dumps(report.to_dict()))
    write_whole(output.with_suffix(".svg"), chart(report))


def chart(report: BenchReport) -> str:
    """Speed-up of every method, one bar per row of the table."""
    from slipstream.report.charts import bar_chart

    rows = [row for row in report.rows if row.speedup is not None]
    place = report.environment
    where = f"{place['model']}, {place['dtype']}, {place['num_threads']} threads"
    return bar_chart(
        [_label(report, row) for row in rows],
        [row.speedup for row in rows if row.speedup is not None],
        [row.speedup_ci for row in rows],
        title=f"Speed-up over plain decoding: {where}",
        unit="×",
        baseline=1.0,
    )


def _label(report: BenchReport, row: Row) -> str:
    """The method, and what else tells the rows apart."""
    return " · ".join([row.method, *_place(report, row)])


def _place(report: BenchReport, row: Row) -> list[str]:
    """Task, temperature and batch size, where the report has several."""
    parts = []
    if len({each.task for each in report.rows}) > 1:
        parts.append(row.task)
    if len({each.temperature for each in report.rows}) > 1:
        parts.append(f"T={row.temperature:g}")
    if len({each.num_rows for each in report.rows}) > 1:
        parts.append(f"{row.num_rows} rows")
    return parts


LEGEND = (
    "tokens/s: after prefill; time: draft/target/other, % of decoding; equal: answers like plain "
    "decoding's, + true ties, ! different; loops: answers that end in a repetition, and τ without "
    "them; eff: speed-up over what τ and the pass times allow; 95% intervals over prompts"
)


def _show(report: BenchReport, output: Path | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    screen = Console(highlight=False)
    table, last = None, None
    for row in report.rows:
        place = " · ".join(_place(report, row))
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
        table.add_row(escape(row.method), *_cells(row))
    if table is not None:
        screen.print(table)
    _footer(screen, report, output)


def _footer(screen: Any, report: BenchReport, output: Path | None) -> None:
    """Where it was measured, what the columns mean, and what a reader must know."""
    from rich.markup import escape

    place = report.environment
    where = f"{place['model']} {place['dtype']}, {place['cpu']}, {place['num_threads']} threads"
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
