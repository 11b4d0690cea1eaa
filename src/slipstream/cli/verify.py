"""`slipstream verify`: is this setup lossless on this machine? By tokens, or by a score test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.checks import DEFAULT_MODEL, check_at_least_one
from slipstream.cli.output import json_output, quiet_libraries
from slipstream.cli.progress import progress_bar
from slipstream.cli.tasks import (
    TaskLimitOption,
    TasksOption,
    encode_tasks,
    read_texts,
    refuse_idle,
    twin_of,
)
from slipstream.errors import SettingError

if TYPE_CHECKING:
    from slipstream.bench.lossless import LosslessReport

NOT_LOSSLESS = 1
OURS = (
    "method", "drafter", "tree", "verifier", "budget", "depth", "topk", "width", "lookup", "rows",
)  # fmt: skip
"""Options of a method that decodes here."""
OF_OUR_MODEL = ("model", "dtype", "device", "threads", "top_p", "top_k", "seed")
"""Options of our model, and of how it samples."""
SAMPLED = 0.8  # temperature of the sampled half where none is given
NUCLEUS = 0.95  # its nucleus: a warp that is forgotten somewhere has to show


def verify(
    context: typer.Context,
    method: o.MethodOption = "eagle3",
    tasks: TasksOption = None,
    prompts: o.PromptsOption = None,
    limit: TaskLimitOption = 6,
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
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            help=f"0 is greedy; without it both greedy and sampled at {SAMPLED:g}, "
            f"top-p {NUCLEUS:g}.",
        ),
    ] = None,
    top_p: o.TopPOption = 1.0,
    top_k: o.TopKOption = 0,
    seed: o.SeedOption = 0,
    raw: o.RawOption = False,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server", metavar="URL", help="Verify what an OpenAI-compatible server says instead."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="URL", help="With --server: another server, not our model."
        ),
    ] = None,
    json: o.JsonOption = False,
) -> None:
    """Is this setup lossless here? Greedy and sampled tokens against plain decoding's.

    With keyed noise (verifier walk) sampled tokens are equal too; other rules are put to a score
    test, with its power and a negative control. Every difference is put to the target again: a
    true tie (two tokens that rounding cannot tell apart) is allowed, anything else is not. Exit
    status 0: lossless or ties; 1: different or inconclusive.
    """
    decodings = _decodings(max_new_tokens, temperature, top_k, top_p, seed)
    check_at_least_one("rows", rows)
    if server is not None:
        from slipstream.cli.verify_servers import verify_servers

        refuse_idle(context, OURS, "with --server, which drafts as it was started")
        if against is not None:
            refuse_idle(context, OF_OUR_MODEL, "between two servers, which are asked greedily")
        setup = o.Setup(model, "none", None, dtype=dtype, device=device, threads=threads)
        texts = read_texts(tasks, prompts, limit)
        is_good = verify_servers(server, against, setup, decodings, texts, raw=raw, json=json)
        if not is_good:
            raise typer.Exit(NOT_LOSSLESS)
        return
    if against is not None:
        raise SettingError("against", against, "nothing without --server", "add --server URL")
    setup = o.Setup(
        model, method, drafter, tree, verifier, budget, depth, topk, lookup, dtype, device, threads,
        width=width,
    )  # fmt: skip
    if _is_scored(setup, decodings) and rows > 1:
        raise SettingError(
            "rows", rows, f"1 for the score test of verifier {setup.rule()}", "leave --rows out"
        )
    with json_output(json) as writer:
        texts = read_texts(tasks, prompts, limit)
        quiet_libraries()
        report, engine = _run(setup, decodings, texts, rows, raw)
        if json:
            asked = [decoding.temperature for decoding in decodings]
            settings = {"temperature": asked[-1], "temperatures": asked, "rows": rows}
            writer.write(report.to_dict() | {**engine.describe(), **settings})
        else:
            _show(report, engine)
    if not report.is_lossless:
        raise typer.Exit(NOT_LOSSLESS)


def _decodings(
    max_new_tokens: int, temperature: float | None, top_k: int, top_p: float, seed: int
) -> list[o.Decoding]:
    """How answers are sampled: as asked, or both ways."""
    if temperature is not None:
        return [o.Decoding(max_new_tokens, temperature, top_k, top_p, seed)]
    nucleus = top_p if top_p < 1 or top_k else NUCLEUS
    return [
        o.Decoding(max_new_tokens, 0.0, top_k, top_p, seed),
        o.Decoding(max_new_tokens, SAMPLED, top_k, nucleus, seed),
    ]


def _is_scored(setup: o.Setup, decodings: list[o.Decoding]) -> bool:
    """True when tokens are not equal by promise, so that a score test has to do."""
    return setup.rule() != "walk" and any(decoding.temperature > 0 for decoding in decodings)


def _run(
    setup: o.Setup,
    decodings: list[o.Decoding],
    texts: dict[str, list[Any]],
    rows: int,
    raw: bool,
) -> tuple[LosslessReport, Any]:
    """Answer with plain decoding one by one and with the method in batches, and compare."""
    from slipstream.bench.lossless import examine

    engine = setup.load()
    encoded = encode_tasks(engine.target, texts, raw=raw)
    ids = [prompt.ids for group in encoded.values() for prompt in group]
    done, total = 0, 2 * len(ids) * len(decodings)
    with progress_bar("decoding") as on_progress:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            on_progress(done, total)

        report = examine(
            engine,
            ids,
            [decoding.arguments() for decoding in decodings],
            load_twin=twin_of(engine.target),
            num_rows=rows,
            on_done=advance,
        )
    return report, engine


def _show(report: LosslessReport, engine: Any) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    screen, setting = Console(highlight=False), engine.describe()
    colour = "green" if report.is_lossless else "red"
    tau = "" if report.tau is None else f", τ {report.tau:.2f} tokens/pass"
    name = f"{setting['method']} on {escape(str(setting['model']))}"
    screen.print(f"[bold {colour}]{report.verdict}[/]: {name} ({setting['dtype']}, {report.mode})")
    screen.print(
        f"{report.num_prompts} prompts, {report.num_tokens} tokens compared, "
        f"{report.num_divergent} answers differ{tau}"
    )
    if report.score is not None:
        show_score(screen, report.score)
    if not setting.get("lossless", True):
        screen.print(f"verifier {setting['verifier']} is lossy above temperature 0")
    if report.num_errors:
        screen.print(f"{report.num_errors} answers ended in an error", style="red")
    if not report.divergences:
        return
    screen.print(f"a true tie has a margin of at most {report.tie_margin:.3g}")
    headings = ("prompt", "position", "margin", "plain", "method", "tie", "wide passes alone")
    table = Table(*headings, box=None)
    for each in report.divergences:
        table.add_row(
            str(each.prompt_index),
            str(each.position),
            f"{each.margin:.3g}",
            _token(engine, each.target_token),
            _token(engine, each.emitted_token),
            "yes" if each.is_tie else "no",
            {True: "differ too", False: "agree", None: ""}[each.without_drafting],
        )
    screen.print(table)


def show_score(screen: Any, score: Any) -> None:
    """A score test for people."""
    favour = "" if score.z_favour is None else f", favour of the drafter {score.z_favour:+.1f}"
    screen.print(
        f"score test of {score.num_tokens} sampled tokens: p {score.p_value:.2g}; surprise "
        f"{score.z_surprise:+.1f} standard deviations{favour}"
    )
    screen.print(
        f"control (half the temperature): p {score.control_p_value:.2g}; power {score.power:.0%} "
        f"against {score.alternative}"
    )
    if score.num_impossible:
        screen.print(f"{score.num_impossible} tokens have probability 0", style="red")
    if score.verdict == "inconclusive":
        screen.print("too few tokens to tell: raise --limit or --max-new-tokens")


def _token(engine: Any, token: int | None) -> str:
    from rich.markup import escape

    if token is None:
        return "(ended)"
    return escape(f"{token} {engine.target.tokenizer.decode([token])!r}")
