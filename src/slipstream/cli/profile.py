"""`slipstream profile`: where a pass spends its time, against the machine's limit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.checks import DEFAULT_MODEL, check_at_least_one, check_model, check_name
from slipstream.cli.output import json_output, quiet_libraries
from slipstream.errors import SettingError

if TYPE_CHECKING:
    from slipstream.bench.profile import Part

DEFAULT_SIZES = "1,8,16,32,64"


def profile(
    model: o.ModelOption = DEFAULT_MODEL,
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="N,N,...", help="Tokens in a pass, root included.")
    ] = DEFAULT_SIZES,
    context: Annotated[int, typer.Option("--context", help="Committed tokens of each row.")] = 256,
    num_rows: Annotated[int, typer.Option("--num-rows", help="Rows in a pass.")] = 1,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE.svg", help="Draw the first size.")
    ] = None,
    json: o.JsonOption = False,
) -> None:
    """Time every part of a target pass beside the least that bandwidth and rate allow.

    Both limits are measured first. JSON has the parts of the first size as `components`, and all
    sizes under `passes`.
    """
    counts = _sizes(sizes)
    check_name("dtype", dtype, o.DTYPES)
    check_at_least_one("context", context)
    check_at_least_one("num-rows", num_rows)
    check_model(model)
    if output is not None and output.suffix != ".svg":
        raise SettingError("output", output, "a file name that ends in .svg")
    with json_output(json) as writer:
        quiet_libraries()
        from slipstream.bench import environment
        from slipstream.bench.profile import measure_machine
        from slipstream.bench.profile import profile as measure
        from slipstream.target.hf import load_target

        target = load_target(model, dtype=dtype, device=device, threads=threads)
        longest = context + max(counts)
        if longest > target.spec.max_length:
            raise SettingError("context", context, f"at most {target.spec.max_length} with a pass")
        watch = environment.Watch()
        machine = measure_machine(target.spec.dtype, target.spec.device)
        passes = {
            n: measure(target, machine, n=n, context=context, num_rows=num_rows) for n in counts
        }
        o.note_busy(watch.others())
        place = environment.describe(target)
        if output is not None:
            from slipstream.bench.results import write_whole

            write_whole(output, _chart(passes[counts[0]], counts[0], place))
        if json:
            components = [asdict(part) for part in passes[counts[0]]]
            writer.write(
                {
                    "environment": place,
                    "bandwidth": machine.bandwidth,
                    "rate": machine.rate,
                    "n": counts[0],
                    "context": context,
                    "num_rows": num_rows,
                    "components": components,
                    "passes": [
                        {"n": n, "components": [asdict(part) for part in parts]}
                        for n, parts in passes.items()
                    ],
                }
            )
        else:
            _show(passes, machine, place, target.spec)


def _sizes(text: str) -> list[int]:
    try:
        counts = [int(piece) for piece in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise SettingError("sizes", f"'{text}'", "numbers of 1 or more, separated by commas")
    return counts


def _show(passes: dict[int, list[Part]], machine: Any, place: Any, spec: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    screen = Console(highlight=False)
    table = Table(box=None, pad_edge=False, title="milliseconds (times the limit)")
    table.add_column("part")
    for n in passes:
        table.add_column(f"n = {n}", justify="right")
    names = [part.name for part in next(iter(passes.values()))]
    for index, name in enumerate(names):
        table.add_row(name, *(_cell(parts[index]) for parts in passes.values()))
    screen.print(table)
    screen.print(
        f"{place['model']}, {spec.decoder} decoder, weights {spec.weights or place['dtype']}, "
        f"{place['cpu']}, {place['num_threads']} threads; "
        f"reads {machine.bandwidth / 1e9:.1f} GB/s, multiplies {machine.rate / 1e9:.0f} Gop/s",
        style="dim",
    )


def _cell(part: Part) -> str:
    times = f" ({part.seconds / part.limit_seconds:.1f})" if part.limit_seconds else ""
    return f"{1e3 * part.seconds:.2f}{times}"


def _chart(parts: list[Part], n: int, place: dict[str, Any]) -> str:
    from slipstream.report.bars import Bar, bar_chart

    return bar_chart(
        {
            part.name: [
                Bar("measured", 1e3 * part.seconds, series="measured"),
                Bar("limit", 1e3 * part.limit_seconds, series="limit"),
            ]
            for part in parts
        },
        title=f"A pass of {n} tokens: {place['model']}, {place['dtype']}, "
        f"{place['num_threads']} threads",
        unit=" ms",
    )
