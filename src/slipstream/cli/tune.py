"""`slipstream tune`: which method, tree and budget is fastest here, and why not faster?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.checks import DEFAULT_MODEL, check_at_least_one, check_output_folder
from slipstream.cli.output import json_output, quiet_libraries
from slipstream.cli.progress import progress_bar
from slipstream.cli.tasks import TaskLimitOption, TasksOption, encode_tasks, read_texts, refuse_idle
from slipstream.errors import CheckpointError, SettingError, UnknownNameError

if TYPE_CHECKING:
    from slipstream.tune.tuner import Found

ONLY = ("cost-curve", "draft-cost")
LENGTHS = "1,2,4,8"


def tune(
    context: typer.Context,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="A,B",
            help="To choose from; prompt lookup and what the zoo has for the model by default.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option("--method", metavar="NAME", help="One method besides prompt lookup."),
    ] = None,
    tasks: TasksOption = None,
    prompts: o.PromptsOption = None,
    limit: TaskLimitOption = 12,
    model: o.ModelOption = DEFAULT_MODEL,
    drafter: o.DrafterOption = None,
    max_new_tokens: o.MaxNewTokensOption = 96,
    temperature: o.TemperatureOption = 0.0,
    top_p: o.TopPOption = 1.0,
    top_k: o.TopKOption = 0,
    seed: o.SeedOption = 0,
    raw: o.RawOption = False,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="PART", help=f"Measure one part: {', '.join(ONLY)}."),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths", metavar="N,N", help="With --only draft-cost: drafted tokens of a chain."
        ),
    ] = LENGTHS,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="FOLDER", help="Write other engines' settings there."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE.json", help="Write the result there too."),
    ] = None,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    json: o.JsonOption = False,
) -> None:
    """Measure costs and acceptance here, choose a setting, say what to expect and why not more.

    Every second prompt tunes, the others judge the choice. "Do not speculate here" is an answer.
    """
    if only is not None and only not in ONLY:
        raise UnknownNameError("part", only, ONLY)
    decoding = o.Decoding(max_new_tokens, temperature, top_k, top_p, seed)
    depths = _depths(lengths)
    if only != "draft-cost":
        refuse_idle(context, ("lengths",), "without --only draft-cost")
    if only is not None:
        refuse_idle(context, ("export",), "with --only")
    setup = o.Setup(model, "none", None, dtype=dtype, device=device, threads=threads)
    names = _names(methods, method, model, drafter)
    if only == "draft-cost" and not names:
        raise SettingError("methods", f"'{methods}'", "one that drafts, for its cost", "try ngram")
    if export is not None:
        check_output_folder(export)
    if output is not None:
        from slipstream.bench.results import check_output

        check_output(output, overwrite=False)
    with json_output(json) as writer:
        texts = read_texts(tasks, prompts, limit)
        quiet_libraries()
        load = loader(setup, drafter)
        encoded = encode_tasks(load("none").target, texts, raw=raw)
        asked = [prompt for group in encoded.values() for prompt in group]
        if only is not None:
            value = _part(only, load, names, depths, asked, decoding)
            if output is not None:
                _write(value, output)
            writer.write(value) if json else _show_part(value)
            return
        from slipstream.tune.tuner import tune as run

        with progress_bar("tuning") as on_progress:
            found = run(load, names, asked, decoding.arguments(), on_progress=on_progress)
        value = found.to_dict() | {"exports": _export(found, export, drafter)}
        if output is not None:
            _write(value, output)
        writer.write(value) if json else _show(found, value)


def _names(
    several: str | None, one: str | None, model: str, drafter: str | None
) -> tuple[str, ...]:
    """Methods to consider, checked, prompt lookup first."""
    from slipstream import assemble
    from slipstream import methods as catalogue

    if several is not None and one is not None:
        raise SettingError("method", one, "nothing beside --methods", "give one of the two")
    asked = [name.strip() for name in (several or one or "").split(",") if name.strip()]
    for name in asked:
        record = catalogue.get(name)
        if record.needs_checkpoint:
            assemble.locate(drafter, name, model)
    if not asked and drafter is not None:
        raise SettingError(
            "drafter", drafter, "a method beside it", "say whose drafter it is with --method"
        )
    if not asked:
        for record in catalogue.all():
            if record.needs_checkpoint:
                try:
                    assemble.locate(None, record.name, model)
                except CheckpointError:
                    continue
                asked.append(record.name)
    wanted = ["ngram", *asked] if several is None else asked
    return tuple(name for name in dict.fromkeys(wanted) if name != "none")


def loader(setup: o.Setup, drafter: str | None) -> Callable[..., Any]:
    """Makes engines on one target; each setting is loaded once."""
    from dataclasses import replace

    from slipstream import methods as catalogue

    plain = setup.load()
    made: dict[tuple[Any, ...], Any] = {("none", None): plain}

    def load(name: str, drafter: str | None = drafter, **options: Any) -> Any:
        own = drafter if catalogue.get(name).needs_checkpoint else None
        key = (name, own, *sorted(options.items()))
        if key not in made:
            made[key] = replace(setup, method=name, drafter=own, **options).load(model=plain.target)
        return made[key]

    return load


def _depths(lengths: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(piece) for piece in lengths.split(",")}))
    except ValueError:
        raise SettingError("lengths", f"'{lengths}'", "numbers separated by commas") from None
    for depth in found:
        check_at_least_one("lengths", depth)
    return found


def _part(
    only: str,
    load: Callable[..., Any],
    names: tuple[str, ...],
    depths: tuple[int, ...],
    asked: list[Any],
    decoding: o.Decoding,
) -> dict[str, object]:
    """The cost curve alone, or the cost of drafting chains."""
    from slipstream.bench import environment
    from slipstream.target import passes
    from slipstream.tune import cost

    target = load("none").target
    value: dict[str, object] = {
        "kind": "slipstream tune",
        "environment": environment.describe(target),
    }
    if only == "cost-curve":
        curve = passes.measure(target)
        pairs = zip(curve.sizes, curve.seconds, strict=True)
        return value | {"cost_curve": [{"n": n, "seconds": s} for n, s in pairs]}
    sampling = {k: v for k, v in decoding.arguments().items() if k != "max_new_tokens"}
    found = {}
    for name in names:
        of_depth = lambda depth, name=name: load(name, **_chain(name, depth))  # noqa: E731
        ids = [prompt.ids for prompt in asked]
        found[name] = cost.draft_costs(of_depth, depths, ids, sampling).to_dict()
    return value | {"draft_cost": found[names[-1]], "draft_costs": found}


def _chain(name: str, depth: int) -> dict[str, object]:
    """Options of a chain of this depth, or of the nearest tree of a method without chains."""
    from slipstream import methods as catalogue

    record = catalogue.get(name)
    if "chain" in record.trees:
        return {"tree": "chain", "depth": depth}
    return {"depth": depth}


def _export(found: Found, folder: Path | None, drafter: str | None) -> list[str]:
    if folder is None:
        return []
    from slipstream.tune import exports
    from slipstream.tune.optimum import PLAIN

    setting = found.best.setting if found.best else PLAIN
    lengths = {rows: depth for rows, (depth, _) in found.lengths.items()}
    place = None if drafter is None or drafter.startswith("zoo:") else drafter
    return exports.write(folder, setting, lengths, place)


def _write(value: dict[str, Any], path: Path) -> None:
    from json import dumps

    from slipstream.bench.results import write_whole

    write_whole(path, dumps(value, indent=1, allow_nan=False) + "\n")


def _show_part(value: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "ms", box=None)
    for entry in value.get("cost_curve", ()):
        table.add_row(f"pass over {entry['n']} tokens", f"{1000 * entry['seconds']:.2f}")
    for name, costs in value.get("draft_costs", {}).items():
        for depth, seconds in costs.items():
            table.add_row(f"{name}: drafting a chain of {depth}", f"{1000 * seconds:.2f}")
    Console(highlight=False).print(table)


def _show(found: Found, value: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    screen = Console(highlight=False)
    for sentence in found.advice:
        screen.print(sentence)
    curve = ", ".join(
        f"{n}: {1000 * seconds:.1f}"
        for n, seconds in zip(found.curve.sizes, found.curve.seconds, strict=True)
    )
    screen.print(f"\nms of a pass by its tokens: {curve}")
    table = Table("best of each method", "tau", "measured", "speed-up", "measured", box=None)
    for row in value["judged"]:
        numbers = [
            row[key]
            for key in ("predicted_tau", "measured_tau", "predicted_speedup", "measured_speedup")
        ]
        cells = ["" if number is None else f"{number:.2f}" for number in numbers]
        table.add_row(row["name"], *cells)
    screen.print(table)
    for name, why in found.left_out.items():
        screen.print(f"{name} was left out: {why}")
    if value["exports"]:
        screen.print(f"written: {', '.join(value['exports'])}")
