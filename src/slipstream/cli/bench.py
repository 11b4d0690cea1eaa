"""`slipstream bench`: methods x prompts under one ruler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.bench_tables import announce, show, show_comparison
from slipstream.cli.checks import DEFAULT_MODEL, check_at_least_one
from slipstream.cli.output import json_output, quiet_libraries
from slipstream.cli.progress import progress_bar
from slipstream.cli.tasks import (
    TaskLimitOption,
    TasksOption,
    encode_tasks,
    load_engines,
    prompt_mode,
    read_texts,
    refuse_idle,
    setups_of,
    twin_of,
)
from slipstream.errors import DataError, SettingError

if TYPE_CHECKING:
    from slipstream.bench.against import Comparison
    from slipstream.bench.results import BenchReport
    from slipstream.bench.runner import RunSettings
    from slipstream.bench.specs import MethodSpec
    from slipstream.bench.tasks import BenchPrompt
    from slipstream.report.trace import Trace

METHODS_HELP = (
    "Separated by commas; none is always measured. A method may carry settings: eagle3+lookup, "
    "eagle3:chain, eagle3:budget=16,depth=5,topk=6, eagle3:drafter=FOLDER."
)
MethodsOption = Annotated[str, typer.Option("--methods", metavar="A,B", help=METHODS_HELP)]


def bench(
    context: typer.Context,
    methods: MethodsOption = "ngram,eagle3,eagle3+lookup",
    tasks: TasksOption = None,
    prompts: o.PromptsOption = None,
    limit: TaskLimitOption = 16,
    model: o.ModelOption = DEFAULT_MODEL,
    drafter: o.DrafterOption = None,
    max_new_tokens: o.MaxNewTokensOption = 128,
    temperature: Annotated[
        str,
        typer.Option(
            "--temperatures",
            "--temperature",
            metavar="T,T",
            help="One, or several separated by commas; 0 is greedy.",
        ),
    ] = "0",
    rows: Annotated[
        str,
        typer.Option("--rows", "--num-rows", metavar="N,N", help="Batch sizes, likewise."),
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
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace --output and --trace.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="OLD.json",
            help="Compare with an earlier result; exit 1 when tau or speed fell beyond noise.",
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", help="With --against: share by which times may drift."),
    ] = 0.05,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.json",
            help="Afterwards decode each task's first prompt again and keep every step there, "
            "for `slipstream report`.",
        ),
    ] = None,
    json: o.JsonOption = False,
) -> None:
    """Measure accepted length and speed of methods against plain decoding, interleaved.

    Every answer is compared with plain decoding's. An interrupt keeps what every method finished.
    """
    from slipstream.bench.specs import parse_specs

    if against is None:
        refuse_idle(context, ("tolerance",), "without --against")
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
        _check_outputs(output, trace, overwrite)
        old = _read_old(against, tolerance)
        texts = read_texts(tasks, prompts, limit)
        quiet_libraries()
        from slipstream.bench import runner

        engines = load_engines(setups)
        target = engines["none"].target
        encoded = encode_tasks(target, texts, raw=raw)
        settings = runner.RunSettings(max_new_tokens, temperatures, sizes, top_k, top_p, seed)
        if old is not None:
            _check_comparable(old, target, settings)
            _check_shared(old, specs, encoded, settings)
        if not json:
            announce(target, encoded, raw)
        about = {
            "methods": {spec.name: engines[spec.name].describe() for spec in specs},
            "prompt_mode": prompt_mode(target, raw),
        }
        with progress_bar("measuring") as on_progress:
            report = runner.run(
                engines,
                encoded,
                settings,
                load_twin=twin_of(target),
                on_progress=on_progress,
                on_rows=lambda grown: _keep(grown, about, output),
            )
        report.settings |= about
        if output is not None:
            _write(report, output)
        if trace is not None and not report.is_partial:
            asked = [(rows[0], texts[task][0][1].turns[0]) for task, rows in encoded.items()]
            _write_traces(trace, engines, asked, settings)
        comparison, problem = None, None
        try:
            comparison = _compare(old, report, tolerance)
        except DataError as error:
            problem = error  # told when the report is out
        if json:
            extra = {} if comparison is None else {"against": comparison.to_dict()}
            writer.write(report.to_dict() | extra)
        else:
            show(report, output)
            if comparison is not None and against is not None:
                show_comparison(comparison, against)
    if report.is_partial:
        raise KeyboardInterrupt
    if problem is not None:
        raise problem
    if comparison is not None and comparison.is_worse:
        raise typer.Exit(1)


def _numbers(name: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        found = [kind(piece) for piece in text.split(",")]
    except ValueError:
        raise SettingError(name, f"'{text}'", "numbers separated by commas") from None
    for number in found:
        if found.count(number) > 1:
            raise SettingError(name, f"{number} twice", "each number once")
    return found


def _check_outputs(output: Path | None, trace: Path | None, overwrite: bool) -> None:
    """Refuse files that cannot or must not be written, before anything is measured."""
    from slipstream.bench.results import check_output

    for name, path in (("output", output), ("trace", trace)):
        if path is not None:
            check_output(path, overwrite=overwrite)
            if path.suffix != ".json":
                raise SettingError(name, path, "a file name that ends in .json")
    if output is not None:
        check_output(output.with_suffix(".svg"), overwrite=overwrite)
    if output is not None and trace is not None and output.resolve() == trace.resolve():
        raise SettingError("trace", trace, "another file than --output")


def _read_old(against: Path | None, tolerance: float) -> dict[str, Any] | None:
    """The earlier result, read before anything is measured."""
    if not 0 <= tolerance < 1:
        raise SettingError("tolerance", tolerance, "in [0, 1)", "0.05 allows 5%")
    if against is None:
        return None
    from slipstream.bench.results import read

    return read(against)


def _check_comparable(old: dict[str, Any], target: Any, settings: RunSettings) -> None:
    """Refuse an earlier result that asked another question, before anything is measured."""
    from dataclasses import asdict

    from slipstream.bench.against import check_same_question
    from slipstream.bench.environment import describe

    new = {"environment": describe(target), "settings": asdict(settings)}
    check_same_question(old, new)


def _check_shared(
    old: dict[str, Any],
    specs: list[MethodSpec],
    encoded: dict[str, list[BenchPrompt]],
    settings: RunSettings,
) -> None:
    """Refuse an earlier result of which nothing is measured again, before anything is measured."""
    from slipstream.bench.against import check_shared

    keys = [
        (task, spec.name, temperature, rows)
        for task in encoded
        for spec in specs
        for temperature in settings.temperatures
        for rows in settings.rows
    ]
    prompts = [(task, p.id, len(p.ids)) for task, group in encoded.items() for p in group]
    check_shared(old, keys, prompts)


def _compare(
    old: dict[str, Any] | None, report: BenchReport, tolerance: float
) -> Comparison | None:
    if old is None or not report.rows:
        return None
    from slipstream.bench.against import compare

    return compare(old, report.to_dict(), tolerance=tolerance)


def _keep(grown: BenchReport, about: dict[str, Any], output: Path | None) -> None:
    """Write what there is so far, so that a run that is killed keeps it."""
    if output is not None:
        _write(replace(grown, settings=grown.settings | about, is_partial=True), output)


def _write(report: BenchReport, output: Path) -> None:
    from slipstream.bench.results import dumps, write_whole
    from slipstream.report.figures import speedups

    value = report.to_dict()
    write_whole(output, dumps(value))
    write_whole(output.with_suffix(".svg"), speedups(value))


def _write_traces(
    path: Path,
    engines: dict[str, Any],
    asked: list[tuple[BenchPrompt, str]],
    settings: RunSettings,
) -> None:
    """Decode a prompt of each task with every method that drafts, keeping every step."""
    from slipstream.report.trace import write

    traces = [
        _traced(engine, name, prompt, text, settings)
        for prompt, text in asked
        for name, engine in engines.items()
        if name != "none"
    ]
    write(path, traces, engines["none"].describe())


def _traced(engine: Any, name: str, prompt: BenchPrompt, text: str, settings: RunSettings) -> Trace:
    from slipstream.report.trace import trace_of

    temperature = settings.temperatures[0]
    sampling = {"top_k": settings.top_k, "top_p": settings.top_p, "seed": settings.seed}
    result = engine.generate(
        list(prompt.ids),
        max_new_tokens=settings.max_new_tokens,
        temperature=temperature,
        trace=True,
        **sampling,
    )
    return trace_of(
        result,
        engine.target.tokenizer,
        title=f"{name} on {prompt.task} {prompt.id}",
        method=name,
        prompt=text,
        temperature=temperature,
    )
