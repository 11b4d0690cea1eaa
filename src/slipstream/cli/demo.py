"""`slipstream demo`: one prompt, several methods, the same tokens, a page of draft trees."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream import assemble, methods
from slipstream.cli import options as o
from slipstream.cli.checks import DEFAULT_MODEL, check_model, check_name, check_output_file
from slipstream.cli.output import JsonWriter, console, json_output, quiet_libraries
from slipstream.errors import CheckpointError, DataError
from slipstream.report import MARK

if TYPE_CHECKING:
    from slipstream.cli.tour import Tour
    from slipstream.report.page import SpeedRow

PROMPT = "Name three animals that live in the sea, and say one thing about each of them."
PAGE = Path("slipstream-demo.html")
# The table's lines: name, method, united with prompt lookup.
CONTENDERS = (
    ("none", "none", False),
    ("ngram", "ngram", False),
    ("eagle3", "eagle3", False),
    ("eagle3+lookup", "eagle3", True),
)


def demo(
    prompt: Annotated[str, typer.Option("--prompt", help="The question to answer.")] = PROMPT,
    model: o.ModelOption = DEFAULT_MODEL,
    drafter: o.DrafterOption = None,
    max_new_tokens: o.MaxNewTokensOption = 128,
    output: Annotated[Path, typer.Option("--output", help="The page to write.")] = PAGE,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE.svg", help="Write the best step's tree there."),
    ] = None,
    raw: o.RawOption = False,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    json: o.JsonOption = False,
) -> None:
    """The first-run tour: a real model answers plainly and speculatively, with the same tokens.

    Streams the plain answer, checks the others against it, prints a speed table and writes a
    page with the draft trees that opens offline.
    """
    decoding = o.Decoding(max_new_tokens)
    if not prompt:
        raise DataError("the prompt is empty, expected text", 'use --prompt "your question"')
    check_model(model)
    check_name("dtype", dtype, o.DTYPES)
    check_output_file(output, own_mark=MARK)
    if picture is not None:
        check_output_file(picture, own_mark='class="tv"')
    contenders, missing = _present(model, drafter)
    screen = console()
    with json_output(json) as writer:
        quiet_libraries()
        screen.print(f"loading {model} (half a minute the first time) ...", style="dim")
        from slipstream.cli.tour import Tour
        from slipstream.report.page import render, write_page
        from slipstream.target.hf import load_target

        target = load_target(model, dtype=dtype, device=device, threads=threads)
        tour = Tour(target, drafter, prompt, decoding, raw, missing=missing)
        _stream(tour, screen)
        with screen.status("answering again with each method, timed ..."):
            tour.run(contenders)
        rows = tour.rows()
        page, best = tour.page()
        write_page(output, render(page))
        if picture is not None and best is not None:
            write_page(picture, best)
        if json:
            _write(rows, output, missing, writer)
        else:
            _show(rows, output, missing, screen)
    if any(run.is_different for run in tour.runs):
        raise typer.Exit(1)


def _present(model: str, drafter: str | None) -> tuple[list[tuple[str, str, bool]], list[str]]:
    """Who can run here, and a line about those who cannot.

    Raises:
        CheckpointError: the user named a drafter that is not there.
    """
    found, missing = [], []
    for contender in CONTENDERS:
        name, method, is_united = contender
        if methods.get(method).needs_checkpoint:
            try:
                assemble.locate(drafter, method, model)
            except CheckpointError as error:
                if drafter is not None:
                    raise
                if not is_united:
                    missing.append(f"{name} is left out: {error}")
                continue
        found.append(contender)
    return found, missing


def _stream(tour: Tour, screen: Any) -> None:
    """Print the plain answer as it grows; this also warms the machine up."""
    screen.print()
    screen.print(tour.prompt, style="bold", markup=False)
    screen.print()
    for piece in tour.plain_pieces():
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    screen.print()


def _write(rows: Sequence[SpeedRow], output: Path, missing: Sequence[str], to: JsonWriter) -> None:
    keys = ("method", "tau", "tokens_per_second", "speedup", "identical", "note")
    to.write(
        {
            "rows": [{key: getattr(row, key) for key in keys} for row in rows],
            "page": str(output.resolve()),
            "missing": list(missing),
        }
    )


def _show(rows: Sequence[SpeedRow], output: Path, missing: Sequence[str], screen: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("method")
    for heading in ("τ tokens/pass", "tokens/s", "speed-up", "same tokens"):
        table.add_column(heading, justify="right")
    for row in rows:
        same = "[green]yes[/]" if row.identical else f"[bold]no[/] {row.note}"
        speed, times = f"{row.tokens_per_second:.1f}", f"{row.speedup:.2f}x"
        table.add_row(row.method, f"{row.tau:.2f}", speed, times, same)
    Console(highlight=False).print(table)
    for line in missing:
        screen.print(line, style="yellow", markup=False)
    screen.print()
    screen.print(f"the draft trees, drawn: {output} (opens in any browser, offline)", markup=False)
