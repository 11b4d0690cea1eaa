"""`slipstream data`: regenerate answers, extract features, inspect what a mask covers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import inspection
from slipstream.cli import options as o
from slipstream.cli.checks import (
    DEFAULT_MODEL,
    check_at_least_one,
    check_model,
    check_name,
    check_output_folder,
    set_thinking,
)
from slipstream.cli.output import console, json_output, quiet_libraries
from slipstream.cli.progress import progress_bar
from slipstream.cli.taps import wanted_taps
from slipstream.errors import DataError, OutputError, SettingError

if TYPE_CHECKING:
    from slipstream.data.regenerate import Progress, Regenerated
    from slipstream.data.server import ServerAnswerer
    from slipstream.target.hf import HFTarget

app = typer.Typer(
    help="Regenerate answers, extract features, inspect what a mask covers.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="JSONL rows, any dialect.")]
DataOption = Annotated[Path, typer.Option("--data", metavar="FILE", help="JSONL with answers.")]
OutputOption = Annotated[Path, typer.Option("--output", metavar="PATH", help="What to write.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on in an existing output.")]
MaxLengthOption = Annotated[
    int, typer.Option("--max-length", help="Tokens kept of a row; longer rows lose their end.")
]
LastTurnOption = Annotated[
    bool, typer.Option("--last-turn-only", help="Learn from the last answer of a row only.")
]
ShardOption = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Only rows I, I+N, I+2N, ...: one of N machines."),
]


@app.command()
def regenerate(
    prompts: Annotated[
        Path, typer.Option("--prompts", metavar="FILE", help="JSONL rows; answers are ignored.")
    ],
    output: OutputOption,
    model: o.ModelOption = DEFAULT_MODEL,
    method: o.MethodOption = "none",
    drafter: o.DrafterOption = None,
    max_new_tokens: o.MaxNewTokensOption = 384,
    num_rows: o.NumRowsOption = 8,
    temperature: o.TemperatureOption = 0.0,
    top_p: o.TopPOption = 1.0,
    top_k: o.TopKOption = 0,
    seed: o.SeedOption = 0,
    thinking: o.ThinkingOption = None,
    limit: o.LimitOption = None,
    shard: ShardOption = None,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="Ask this OpenAI-compatible server instead."),
    ] = None,
    server_model: Annotated[
        str | None, typer.Option("--server-model", help="The server's name for the model.")
    ] = None,
    keep_history: Annotated[
        bool,
        typer.Option(
            "--keep-history", help="Answer the last user turn only, after the row's own dialogue."
        ),
    ] = False,
    resume: ResumeOption = False,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    json: o.JsonOption = False,
) -> None:
    """Let the target answer prompts: the text a drafter should learn from.

    Every finished answer is in the file at once; an interrupted run goes on with --resume. With
    --server a cluster's engine answers; only the model's tokenizer is loaded here.
    """
    setup = o.Setup(model, method, drafter, dtype=dtype, device=device, threads=threads)
    part = _shard(shard)
    _check_thinking(thinking)
    if server is None and server_model is not None:
        raise SettingError("server-model", server_model, "nothing without --server", "leave it out")
    if server is not None and (method != "none" or drafter is not None):
        raise SettingError(
            "method", method, "nothing with --server, which decodes as it likes", "leave it out"
        )
    decoding = o.Decoding(max_new_tokens, temperature, top_k, top_p, seed)
    check_at_least_one("num-rows", num_rows)
    check_at_least_one("limit", limit)
    _check_answers_file(output, resume=resume)
    from slipstream.data.conversations import read_rows
    from slipstream.data.regenerate import regenerate as run
    from slipstream.types import Sampling

    rows = list(read_rows(prompts, limit=limit))[part]
    with json_output(json) as writer, progress_bar("answering") as update:
        engine = setup.load() if server is None else _served(server, model, server_model)
        set_thinking(engine.target.tokenizer, thinking)
        try:
            report = run(
                engine,
                rows,
                output,
                max_new_tokens=decoding.max_new_tokens,
                num_rows=num_rows,
                sampling=Sampling(temperature, top_k, top_p, seed),
                resume=resume,
                keep_history=keep_history,
                on_progress=_bar(update),
            )
        except KeyboardInterrupt:
            console().print(f"{output} keeps what was answered; go on with --resume")
            raise
        if json:
            writer.write(_summary(report) | engine.describe() | {"counts": dict(report.counts)})
    if not json:
        _tell(report)


@app.command()
def extract(
    data: DataOption,
    output: OutputOption,
    model: o.ModelOption = DEFAULT_MODEL,
    method: o.MethodOption = "eagle3",
    taps: Annotated[
        str | None,
        typer.Option(
            "--taps", metavar="2,15,...", help="Hidden states to store, in place of the method's."
        ),
    ] = None,
    max_length: MaxLengthOption = 1024,
    max_prompt: Annotated[
        int | None, typer.Option("--max-prompt", help="Skip rows with longer prompts, tokens.")
    ] = None,
    loops: Annotated[
        str, typer.Option("--loops", help="Repetition loops at an answer's end: keep, cut, drop.")
    ] = "cut",
    last_turn_only: LastTurnOption = False,
    bits: Annotated[
        int, typer.Option("--bits", help="Of a stored hidden value: 16, or 8 for half the disk.")
    ] = 16,
    skip: Annotated[int, typer.Option("--skip", help="Leave out this many rows first.")] = 0,
    shard: ShardOption = None,
    thinking: o.ThinkingOption = None,
    limit: o.LimitOption = None,
    resume: ResumeOption = False,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    json: o.JsonOption = False,
) -> None:
    """Write the target's features of a data file to disk; the size is estimated first."""
    check_name("dtype", dtype, o.DTYPES)
    _check_thinking(thinking)
    check_name("loops", loops, ("cut", "drop", "keep"))
    for name, value in (("limit", limit), ("max-prompt", max_prompt), ("threads", threads)):
        check_at_least_one(name, value)
    _shard(shard)
    if bits not in (8, 16):
        raise SettingError("bits", bits, "8 or 16")
    if skip < 0:
        raise SettingError("skip", skip, "0 or more")
    if max_length < 2:
        raise SettingError("max-length", max_length, "2 or more")
    check_model(model)
    _check_file(data)
    check_output_folder(output, resume=resume)
    taps_of = wanted_taps(method, taps)
    from slipstream.data.extract import extract_shards
    from slipstream.models.readout import Readout

    with json_output(json) as writer, progress_bar("extracting") as update:
        target = _target(model, dtype, device, threads, thinking)
        done = extract_shards(
            target,
            Readout(target.embedding(), target.head()),
            data,
            output,
            name=target.spec.name,
            tokenizer=target.tokenizer,
            taps=taps_of(target.spec.num_layers),
            max_length=max_length,
            max_prompt=max_prompt,
            limit=limit,
            skip=skip,
            loops=loops,
            last_turn_only=last_turn_only,
            shard=shard,
            bits=bits,
            resume=resume,
            on_estimate=lambda plan: console().print(inspection.tell_estimate(plan, output)),
            on_progress=lambda rows, total, _tokens, _seconds: update(rows, total),
        )
        if json:
            writer.write(_summary(done) | {"counts": done.counts})
    if not json:
        _tell(done)


@app.command()
def merge(
    stores: Annotated[
        list[Path], typer.Argument(metavar="STORE...", help="Feature stores of one data file.")
    ],
    output: OutputOption,
    json: o.JsonOption = False,
) -> None:
    """Make one feature store of the shards that several machines extracted."""
    from slipstream.data.merge import merge as run

    with json_output(json) as writer:
        made = run(stores, output)
        size = sum(path.stat().st_size for path in output.iterdir())
        if json:
            writer.write(
                {
                    "path": str(output), "rows": made.num_rows, "tokens": made.num_tokens,
                    "bytes": size, "counts": made.counts,
                }
            )  # fmt: skip
    if not json:
        console().print(f"{output}: {made.num_rows:,} rows, {made.num_tokens:,} tokens")


@app.command()
def inspect(
    file: FileArgument,
    model: o.ModelOption = DEFAULT_MODEL,
    max_length: MaxLengthOption = 1024,
    last_turn_only: LastTurnOption = False,
    show: Annotated[int, typer.Option("--show", help="Rows to print.")] = 3,
    likelihood: Annotated[
        bool,
        typer.Option(help="Ask the model whether the shown answers could be its own."),
    ] = True,
    thinking: o.ThinkingOption = None,
    limit: o.LimitOption = None,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    json: o.JsonOption = False,
) -> None:
    """Show what a mask really covers: supervised text in colour, shares and counts."""
    check_name("dtype", dtype, o.DTYPES)
    _check_thinking(thinking)
    check_at_least_one("limit", limit)
    check_model(model)
    if show < 0:
        raise SettingError("show", show, "0 or more")
    if max_length < 2:
        raise SettingError("max-length", max_length, "2 or more")
    from time import perf_counter

    from slipstream.data.conversations import read_rows
    from slipstream.data.coverage import survey
    from slipstream.data.likelihood import answer_likelihood

    rows = list(read_rows(file, limit=limit))
    with json_output(json) as writer:
        target = _target(model, dtype, device, threads, thinking)
        started = perf_counter()
        coverage = survey(
            rows,
            target.tokenizer,
            max_length=max_length,
            last_turn_only=last_turn_only,
            num_shown=show,
        )
        seconds = perf_counter() - started
        shown = [made for _, made in coverage.shown]
        judged = answer_likelihood(target, shown) if likelihood else None
        if json:
            writer.write(inspection.as_json(file, target.tokenizer, coverage, judged, seconds))
    if not json:
        inspection.show(target.tokenizer, coverage, judged)


def _check_thinking(wish: str | None) -> None:
    if wish is not None:
        check_name("thinking", wish, ("on", "off"))


def _shard(text: str | None) -> slice:
    """Which rows "1/4" stands for."""
    from slipstream.data.extract import shard_of

    return shard_of(text)


def _served(url: str, model: str, served_name: str | None) -> ServerAnswerer:
    """A server that stands in for the engine."""
    quiet_libraries()
    from slipstream.data.server import ServerAnswerer
    from slipstream.target.hf import load_tokenizer

    tokenizer, max_length = load_tokenizer(model)
    return ServerAnswerer(
        url, tokenizer, name=model, max_length=max_length, served_name=served_name
    )


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"{path}: no such file", "give the path of a JSONL file")


def _check_answers_file(path: Path, *, resume: bool) -> None:
    """Before the model loads: the same refusals the writer makes."""
    if path.is_dir():
        raise OutputError(f"output {path} is a folder, expected a file", "choose another --output")
    if path.exists() and not resume:
        raise OutputError(
            f"output {path} exists", "go on with --resume, or choose another --output"
        )


def _target(
    model: str, dtype: str, device: str, threads: int | None, thinking: str | None
) -> HFTarget:
    quiet_libraries()
    from slipstream.target.hf import load_target

    target = load_target(model, dtype=dtype, device=device, threads=threads)
    set_thinking(target.tokenizer, thinking)
    return target


def _bar(update: Callable[[int, int], None]) -> Callable[[Progress], None]:
    return lambda progress: update(progress.done, progress.total)


def _summary(report: Regenerated | Any) -> dict[str, Any]:
    seconds = report.seconds
    return {
        "path": str(report.path),
        "rows": report.rows,
        "tokens": report.tokens,
        "seconds": seconds,
        "tokens_per_second": report.tokens / seconds if seconds else None,
        "bytes": report.bytes,
    }


def _tell(report: Regenerated | Any) -> None:
    summary = _summary(report)
    speed = summary["tokens_per_second"] or 0.0
    lines = [
        f"{report.path}: {report.rows:,} rows, {report.tokens:,} tokens "
        f"({speed:,.0f} tokens/s), {report.bytes / 1e6:,.1f} MB"
    ]
    lines += [f"  {name.replace('_', ' ')}: {n:,}" for name, n in report.counts.items() if n]
    from rich.console import Console

    Console(highlight=False).print("\n".join(lines), markup=False)
