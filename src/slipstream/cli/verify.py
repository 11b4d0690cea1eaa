"""`slipstream verify`: is this setup lossless on this machine? Token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.checks import DEFAULT_MODEL, check_at_least_one
from slipstream.cli.output import json_output, quiet_libraries
from slipstream.cli.progress import progress_bar
from slipstream.cli.tasks import TaskLimitOption, TasksOption, encode_tasks, read_texts, twin_of
from slipstream.errors import SettingError

if TYPE_CHECKING:
    from slipstream.bench.lossless import LosslessReport

NOT_LOSSLESS = 1


def verify(
    method: o.MethodOption = "eagle3",
    tasks: TasksOption = None,
    prompts: o.PromptsOption = None,
    limit: TaskLimitOption = 8,
    model: o.ModelOption = DEFAULT_MODEL,
    drafter: o.DrafterOption = None,
    tree: o.TreeOption = None,
    verifier: o.VerifierOption = None,
    budget: o.BudgetOption = None,
    depth: o.DepthOption = None,
    topk: o.ChildrenOption = None,
    width: o.WidthOption = None,
    lookup: o.LookupOption = False,
    rows: Annotated[
        int, typer.Option("--rows", "--num-rows", help="Batch size of the method.")
    ] = 1,
    max_new_tokens: o.MaxNewTokensOption = 128,
    temperature: o.TemperatureOption = 0.0,
    top_p: o.TopPOption = 1.0,
    top_k: o.TopKOption = 0,
    seed: o.SeedOption = 0,
    raw: o.RawOption = False,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    json: o.JsonOption = False,
) -> None:
    """Compare a method's tokens with plain decoding's, greedy or sampled with keyed noise.

    Every difference is put to the target again: a true tie (two tokens that rounding cannot
    tell apart) is allowed, anything else is not. Exit status 0: lossless or ties; 1: different
    or inconclusive.
    """
    setup = o.Setup(
        model, method, drafter, tree, verifier, budget, depth, topk, lookup, dtype, device, threads,
        width=width,
    )  # fmt: skip
    decoding = o.Decoding(max_new_tokens, temperature, top_k, top_p, seed)
    check_at_least_one("rows", rows)
    if temperature > 0 and verifier not in (None, "walk"):
        raise SettingError(
            "verifier",
            verifier,
            "walk above temperature 0: other rules draw noise of their own, and equal plain "
            "decoding in law at best, not token for token",
            "use --temperature 0 or --verifier walk",
        )
    with json_output(json) as writer:
        texts = read_texts(tasks, prompts, limit)
        quiet_libraries()
        report, engine = _run(setup, decoding, texts, rows, raw)
        if json:
            value = report.to_dict()
            writer.write(value | {**engine.describe(), "temperature": temperature, "rows": rows})
        else:
            _show(report, engine)
    if not report.is_lossless:
        raise typer.Exit(NOT_LOSSLESS)


def _run(
    setup: o.Setup, decoding: o.Decoding, texts: dict[str, list[Any]], rows: int, raw: bool
) -> tuple[LosslessReport, Any]:
    """Answer with plain decoding one by one and with the method in batches, and compare."""
    from slipstream.bench.equality import judge_for
    from slipstream.bench.lossless import answers, compare_answers
    from slipstream.types import Sampling

    engine = setup.load()
    target = engine.target
    plain = o.Setup(setup.model, "none").load(model=target)
    encoded = encode_tasks(target, texts, raw=raw)
    ids = [prompt.ids for group in encoded.values() for prompt in group]
    arguments, done = decoding.arguments(), 0
    with progress_bar("decoding") as on_progress:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            on_progress(done, 2 * len(ids))

        reference = answers(plain, ids, arguments | {"num_rows": 1}, on_done=advance)
        results = answers(engine, ids, arguments | {"num_rows": rows}, on_done=advance)
    sampling = Sampling(decoding.temperature, decoding.top_k, decoding.top_p, decoding.seed)
    judge = judge_for(
        target,
        sampling,
        load_twin=twin_of(target),
        plain=lambda: (ids, [result.token_ids for result in reference]),
    )
    return compare_answers(ids, reference, results, judge), engine


def _show(report: LosslessReport, engine: Any) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    screen, setting = Console(highlight=False), engine.describe()
    colour = "green" if report.is_lossless else "red"
    tau = "" if report.tau is None else f", τ {report.tau:.2f} tokens/pass"
    name = f"{setting['method']} on {escape(str(setting['model']))}"
    screen.print(f"[bold {colour}]{report.verdict}[/]: {name} ({setting['weights']}, {report.mode})")
    screen.print(
        f"{report.num_prompts} prompts, {report.num_tokens} tokens compared, "
        f"{report.num_divergent} answers differ{tau}"
    )
    if not setting.get("lossless", True):
        screen.print(f"verifier {setting['verifier']} is lossy above temperature 0")
    if report.num_errors:
        screen.print(f"{report.num_errors} answers ended in an error", style="red")
    if not report.divergences:
        return
    screen.print(f"a true tie has a margin of at most {report.tie_margin:.3g}")
    table = Table("prompt", "position", "margin", "plain", "method", "tie", box=None)
    for each in report.divergences:
        table.add_row(
            str(each.prompt_index),
            str(each.position),
            f"{each.margin:.3g}",
            _token(engine, each.target_token),
            _token(engine, each.emitted_token),
            "yes" if each.is_tie else "no",
        )
    screen.print(table)


def _token(engine: Any, token: int | None) -> str:
    from rich.markup import escape

    if token is None:
        return "(ended)"
    return escape(f"{token} {engine.target.tokenizer.decode([token])!r}")
