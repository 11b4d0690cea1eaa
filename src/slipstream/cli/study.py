"""`slipstream study`: one claim of the field as an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.checks import DEFAULT_MODEL
from slipstream.cli.output import json_output, quiet_libraries
from slipstream.cli.progress import progress_bar
from slipstream.cli.tasks import (
    encode_tasks,
    load_engines,
    read_texts,
    refuse_idle,
    setups_of,
    twin_of,
)
from slipstream.errors import SettingError

if TYPE_CHECKING:
    from slipstream.bench.studies import Study

LIMIT, MAX_NEW_TOKENS = 20, 96  # of the result that ships
RUNS_ONLY = (
    "model", "tasks", "limit", "max_new_tokens", "temperature", "dtype", "device", "threads",
    "output", "overwrite", "better", "worse",
)  # fmt: skip


def study(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The claim; all are listed without it.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the result that ships, run nothing.")
    ] = False,
    model: o.ModelOption = DEFAULT_MODEL,
    better: Annotated[
        str | None,
        typer.Option(
            "--better",
            metavar="SETUP",
            help="In place of the study's first setup, as bench takes it: "
            "eagle3:budget=11,depth=4,topk=4,drafter=FOLDER.",
        ),
    ] = None,
    worse: Annotated[
        str | None, typer.Option("--worse", metavar="SETUP", help="In place of its second.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", metavar="X,Y", help="Prompt sets; the four of the shipped result."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", help="Prompts per task.")] = LIMIT,
    max_new_tokens: o.MaxNewTokensOption = MAX_NEW_TOKENS,
    temperature: o.TemperatureOption = 0.0,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE.svg", help="The figure; study-NAME.svg without it."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the figure.")] = False,
    json: o.JsonOption = False,
) -> None:
    """Test a claim on your model: two setups, the same prompts, a paired 95% interval.

    Exit status 1 where the claim does not hold or is undecided.
    """
    from slipstream.bench import studies

    if name is None:
        refuse_idle(context, (*RUNS_ONLY, "show"), "without a study's name")
        with json_output(json) as writer:
            found = [studies.committed(each) for each in studies.STUDIES.values()]
            if json:
                writer.write(found)
            else:
                for one in found:
                    typer.echo(f"{one['name']:<14}{one['claim']:<38}{one['verdict']}")
        return
    asked = _with_setups(studies.get(name), better, worse)
    with json_output(json) as writer:
        if show:
            refuse_idle(context, RUNS_ONLY, "with --show")
            found = studies.committed(asked)
        else:
            path = output or Path(f"study-{name}.svg")
            _check(asked, path, tasks, overwrite)
            decoding = o.Decoding(max_new_tokens, temperature, 0, 1.0, 0)
            setup = o.Setup(model, "none", None, dtype=dtype, device=device, threads=threads)
            found = _run(asked, setup, decoding, tasks or ",".join(studies.TASKS), limit, path)
        if json:
            writer.write(found)
        else:
            _tell(asked, found)
    if found["verdict"] != studies.HOLDS:
        raise typer.Exit(1)


def _with_setups(asked: Study, better: str | None, worse: str | None) -> Study:
    """The study of other setups, such as of the user's own drafters."""
    from dataclasses import replace

    from slipstream.bench.specs import parse_spec

    given = [better, worse][: len(asked.methods)]
    if worse is not None and len(asked.methods) == 1:
        raise SettingError("worse", f"'{worse}'", "nothing: this study has one setup")
    pairs = zip(given, asked.methods, strict=True)
    methods = tuple(theirs if ours is None else parse_spec(ours).name for ours, theirs in pairs)
    if len(set(methods)) < len(methods):
        raise SettingError("better", f"'{methods[0]}'", "another setup than the second one")
    return replace(asked, methods=methods)


def _check(asked: Study, path: Path, tasks: str | None, overwrite: bool) -> None:
    """Refuse what would fail after measuring."""
    from slipstream.bench.results import check_output
    from slipstream.bench.studies import missing

    if path.suffix != ".svg":
        raise SettingError("output", path, "a file name that ends in .svg")
    check_output(path, overwrite=overwrite)
    lacking = None if tasks is None else missing(asked, [t.strip() for t in tasks.split(",")])
    if lacking:
        raise SettingError("tasks", f"'{tasks}'", f"{lacking}: the claim is about tasks")


def _run(
    asked: Study, setup: o.Setup, decoding: o.Decoding, tasks: str, limit: int, path: Path
) -> dict[str, Any]:
    from slipstream.bench.results import write_whole
    from slipstream.bench.specs import parse_specs
    from slipstream.bench.studies import judge, rows_of
    from slipstream.report.figures import accepted_lengths

    setups = setups_of(setup, parse_specs(",".join(asked.methods)), None)
    texts = read_texts(tasks, None, limit)
    quiet_libraries()
    from slipstream.bench import runner

    engines = load_engines(setups)
    encoded = encode_tasks(engines["none"].target, texts, raw=False)
    settings = runner.RunSettings(
        decoding.max_new_tokens, (decoding.temperature,), (1,), 0, 1.0, decoding.seed
    )
    with progress_bar("measuring") as on_progress:
        report = runner.run(
            engines,
            encoded,
            settings,
            load_twin=twin_of(engines["none"].target),
            on_progress=on_progress,
        )
    if report.is_partial:
        raise KeyboardInterrupt  # some of the prompts are no verdict
    result = report.to_dict()
    write_whole(path, accepted_lengths(rows_of(asked, result)))
    return judge(asked, result) | {"figure": str(path)}


def _tell(asked: Study, found: dict[str, Any]) -> None:
    result = found["result"]
    where = result["environment"]
    typer.echo(f"{found['claim']} (arXiv:{asked.paper}): {found['verdict']}")
    if result["interval"] is None:
        typer.echo("  too few answers for an interval")
    else:
        low, high = result["interval"]
        ratio = f"{result['ratio']:.3f}, 95% interval {low:.3f} to {high:.3f}"
        typer.echo(f"  tokens a pass, ratio {ratio}")
    for name, tau in result["tau"].items():
        typer.echo(f"  {name:<36}" + ("-" if tau is None else f"{tau:.2f}"))
    typer.echo(
        f"  {result['num_prompts']} prompts of {', '.join(result['tasks'])}; "
        f"{where['model']}, {where['dtype']}"
    )
    typer.echo(f"figure: {found['figure']}")
