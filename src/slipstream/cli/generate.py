"""`slipstream generate`: decode prompts; text streams to people, JSON goes to programs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.answering import Answering, totals
from slipstream.cli.checks import DEFAULT_MODEL, check_at_least_one, check_output_file
from slipstream.cli.output import JsonWriter, console, json_output
from slipstream.cli.prompts import Prompt, read_prompts
from slipstream.errors import SettingError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.engine.request import Result


def generate(
    prompt: o.PromptOption = None,
    prompts: o.PromptsOption = None,
    model: o.ModelOption = DEFAULT_MODEL,
    method: o.MethodOption = "eagle3",
    drafter: o.DrafterOption = None,
    max_new_tokens: o.MaxNewTokensOption = 128,
    temperature: o.TemperatureOption = 0.0,
    top_p: o.TopPOption = 1.0,
    top_k: o.TopKOption = 0,
    seed: o.SeedOption = 0,
    tree: o.TreeOption = None,
    verifier: o.VerifierOption = None,
    budget: o.BudgetOption = None,
    depth: o.DepthOption = None,
    topk: o.ChildrenOption = None,
    width: o.WidthOption = None,
    lookup: o.LookupOption = False,
    raw: o.RawOption = False,
    limit: o.LimitOption = None,
    all_turns: o.AllTurnsOption = False,
    num_rows: o.NumRowsOption = 1,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.json",
            help="Keep every step there: trees, probabilities, verdicts; see `slipstream report`.",
        ),
    ] = None,
    json: o.JsonOption = False,
) -> None:
    """Decode prompts with a method; the tokens are those of plain decoding.

    Text streams to standard output, a summary (accepted length τ, tokens per second) to standard
    error. An interrupt keeps what is done.
    """
    setup = o.Setup(
        model, method, drafter, tree, verifier, budget, depth, topk, lookup, dtype, device, threads,
        width=width,
    )  # fmt: skip
    decoding = o.Decoding(max_new_tokens, temperature, top_k, top_p, seed)
    check_at_least_one("num-rows", num_rows)
    if num_rows > 1 and all_turns:
        raise SettingError("num-rows", num_rows, "1 with --all-turns", "drop one of the two")
    asked = read_prompts(prompt, prompts, limit=limit, all_turns=all_turns, raw=raw)
    if trace is not None:
        check_output_file(trace)
    with json_output(json) as writer:
        engine = setup.load()
        answering = Answering(engine, decoding, raw, num_rows, trace=trace is not None)
        answering.check(asked)
        try:
            if json:
                _for_programs(answering, asked, setup, writer)
            else:
                _for_people(answering, asked)
        finally:
            if trace is not None and answering.results:
                _write_traces(trace, answering, asked)
    if any(result.finish_reason == "error" for result in answering.results):
        raise typer.Exit(1)


def _for_programs(
    answering: Answering, asked: Sequence[Prompt], setup: o.Setup, writer: JsonWriter
) -> None:
    """Answer everything, then write one JSON value; if something stops it, what is done."""
    try:
        for _ in answering.fragments(asked):
            pass
    except (KeyboardInterrupt, SlipstreamError):
        if answering.outputs:
            writer.write(_report(answering, setup) | {"interrupted": True})
        raise
    writer.write(_report(answering, setup))


def _report(answering: Answering, setup: o.Setup) -> dict[str, Any]:
    """The JSON value of the verb."""
    return {
        **answering.engine.describe(),
        "checkpoint": setup.drafter,
        "lookup": setup.lookup,
        **answering.decoding.arguments(),
        "raw": answering.raw,
        "num_rows": answering.num_rows,
        "outputs": answering.outputs,
        **totals(answering.results),
    }


def _for_people(answering: Answering, asked: Sequence[Prompt]) -> None:
    """Stream the text; headings and the summary stay off standard output."""
    screen = console()
    is_many = len(asked) > 1 or len(asked[0].turns) > 1
    try:
        for fragment in answering.fragments(asked):
            if fragment.text:
                sys.stdout.write(fragment.text)
            elif is_many:
                if fragment.prompt_index or fragment.turn_index:
                    sys.stdout.write("\n\n")
                sys.stdout.flush()
                _heading(screen, asked, fragment.prompt_index, fragment.turn_index)
            sys.stdout.flush()
        sys.stdout.write("\n")
        for result in answering.results:
            if result.error is not None:
                screen.print(f"prompt {result.prompt_index}: {result.error}", markup=False)
    finally:
        _summary(screen, answering.results)
        if answering.decoding.temperature > 0 and not answering.engine.describe().get(
            "lossless", True
        ):
            screen.print("lossy: these answers do not have the model's distribution", style="dim")


def _write_traces(path: Path, answering: Answering, asked: Sequence[Prompt]) -> None:
    """The steps of every finished answer, in the order of the prompts."""
    from slipstream.report.trace import trace_of, write

    about = answering.engine.describe()
    turns: Counter[int] = Counter()
    traces = []
    for result in sorted(answering.results, key=lambda result: result.prompt_index):
        index = result.prompt_index
        question = asked[index].turns[turns[index]]
        turns[index] += 1
        traces.append(
            trace_of(
                result,
                answering.engine.tokenizer,
                title=f"{about['method']}, prompt {index + 1}",
                method=str(about["method"]),
                prompt=question,
                temperature=answering.decoding.temperature,
            )
        )
    write(path, traces, about)


def _heading(screen: Any, asked: Sequence[Prompt], index: int, turn: int) -> None:
    """A rule with the prompt's first words before its answer."""
    from rich.text import Text

    words = " ".join(asked[index].turns[turn].split())
    label = f"{index + 1}/{len(asked)} {words[:60]}{'…' if len(words) > 60 else ''}"
    screen.rule(Text(label), align="left", style="dim")


def _summary(screen: Any, results: Sequence[Result]) -> None:
    """One dim line with the figures of the run."""
    if not results:
        return
    whole = totals(results)
    tokens = sum(r.num_tokens for r in results)
    passes = sum(r.num_target_passes for r in results)
    parts = [f"{tokens} tokens", f"{passes} target passes"]
    if whole["tau"] is not None:
        parts.append(f"τ {whole['tau']:.2f} tokens/pass")
    if whole["decode_tokens_per_second"] is not None:
        parts.append(f"{whole['decode_tokens_per_second']:.1f} tokens/s after prefill")
    screen.print(" · ".join(parts), style="dim")
