"""`slipstream generate`: decode prompts; text streams to people, JSON goes to programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.cli import options as o
from slipstream.cli.checks import DEFAULT_MODEL
from slipstream.cli.output import JsonWriter, console, json_output
from slipstream.cli.prompts import Prompt, read_prompts, user

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
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
    lookup: o.LookupOption = False,
    raw: o.RawOption = False,
    limit: o.LimitOption = None,
    all_turns: o.AllTurnsOption = False,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    json: o.JsonOption = False,
) -> None:
    """Decode prompts with a method; the tokens are those of plain decoding.

    Text streams to standard output, a summary (accepted length τ, tokens per second) to standard
    error. An interrupt keeps what is done.
    """
    setup = o.Setup(
        model, method, drafter, tree, verifier, budget, depth, topk, lookup, dtype, device, threads
    )
    decoding = o.Decoding(max_new_tokens, temperature, top_k, top_p, seed)
    asked = read_prompts(prompt, prompts, limit=limit, all_turns=all_turns, raw=raw)
    with json_output(json) as writer:
        engine = setup.load()
        run = Run(engine, decoding, raw)
        if json:
            _for_programs(run, asked, setup, writer)
        else:
            _for_people(run, asked)


@dataclass(slots=True)
class Run:
    """Answers prompts one by one and remembers what is done, so that an interrupt keeps it."""

    engine: Engine
    decoding: o.Decoding
    raw: bool
    results: list[Result] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)  # tokens of the answer under way

    def pieces(self, asked: Sequence[Prompt]) -> Iterator[tuple[int, int, str]]:
        """(prompt index, turn index, text) as the text appears; "" begins each turn."""
        for index, prompt in enumerate(asked):
            messages = prompt.opening()
            for turn, text in enumerate(prompt.turns):
                yield index, turn, ""
                messages.append(user(text))
                for piece in self._answer(index, turn, text if self.raw else list(messages)):
                    yield index, turn, piece
                answer = self.results[-1].text
                messages.append({"role": "assistant", "content": answer})

    def _answer(self, index: int, turn: int, prompt: object) -> Iterator[str]:
        """The pieces of one answer; its output is filed at the end, or when interrupted."""
        self.begun.clear()
        try:
            for piece in self.engine.stream(prompt, raw=self.raw, **self.decoding.arguments()):
                self.begun.extend(piece.token_ids)
                if piece.result is not None:
                    self.results.append(piece.result)
                    self.outputs.append(_output(index, turn, piece.result))
                yield piece.text
        except KeyboardInterrupt:
            if self.begun:
                self.outputs.append(self._cut_short(index, turn))
            raise

    def _cut_short(self, index: int, turn: int) -> dict[str, Any]:
        """The output of an answer that an interrupt cut."""
        return {
            "prompt_index": index,
            "turn_index": turn,
            "text": self.engine.target.tokenizer.decode(self.begun),
            "token_ids": list(self.begun),
            "num_tokens": len(self.begun),
            "finish_reason": "interrupted",
        }


def _output(index: int, turn: int, result: Result) -> dict[str, Any]:
    """One finished answer, in the glossary's names."""
    return {
        "prompt_index": index,
        "turn_index": turn,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "num_tokens": result.num_tokens,
        "num_target_passes": result.num_target_passes,
        "tau": result.tau,
        "seconds": result.seconds,
        "prefill_seconds": result.prefill_seconds,
        "draft_seconds": result.draft_seconds,
        "target_seconds": result.target_seconds,
        "other_seconds": result.other_seconds,
        "finish_reason": result.finish_reason,
    }


def totals(results: Sequence[Result]) -> dict[str, float | None]:
    """τ (tokens/pass) and tokens per second over several answers; None where nothing ran."""
    tokens = sum(r.num_tokens for r in results)
    after_first = sum(max(0, r.num_tokens - 1) for r in results)
    passes = sum(r.num_target_passes for r in results)
    seconds = sum(r.seconds for r in results)
    decode_seconds = seconds - sum(r.prefill_seconds for r in results)
    return {
        "tau": after_first / passes if passes else None,
        "tokens_per_second": tokens / seconds if seconds > 0 else None,
        "decode_tokens_per_second": after_first / decode_seconds if decode_seconds > 0 else None,
    }


def _for_programs(run: Run, asked: Sequence[Prompt], setup: o.Setup, writer: JsonWriter) -> None:
    """Answer everything, then write one JSON value; an interrupt writes what is done."""
    try:
        for _ in run.pieces(asked):
            pass
    except KeyboardInterrupt:
        writer.write(_report(run, setup) | {"interrupted": True})
        raise
    writer.write(_report(run, setup))


def _report(run: Run, setup: o.Setup) -> dict[str, Any]:
    """The JSON value of the verb."""
    decoding = run.decoding
    return {
        "model": setup.model,
        "method": setup.method,
        "drafter": setup.drafter,
        "temperature": decoding.temperature,
        "top_p": decoding.top_p,
        "top_k": decoding.top_k,
        "seed": decoding.seed,
        "max_new_tokens": decoding.max_new_tokens,
        "dtype": str(run.engine.target.spec.dtype).removeprefix("torch."),
        **run.engine.describe(),
        "outputs": run.outputs,
        **totals(run.results),
    }


def _for_people(run: Run, asked: Sequence[Prompt]) -> None:
    """Stream the text; headings and the summary stay off standard output."""
    screen = console()
    is_many = len(asked) > 1 or len(asked[0].turns) > 1
    try:
        for index, turn, text in run.pieces(asked):
            if text:
                sys.stdout.write(text)
                sys.stdout.flush()
            elif is_many and len(run.begun) == 0:
                _heading(screen, asked, index, turn, is_first=not run.results)
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
        _summary(screen, run.results)


def _heading(
    screen: Any, asked: Sequence[Prompt], index: int, turn: int, *, is_first: bool
) -> None:
    """A rule with the prompt's first words before its answer."""
    from rich.text import Text

    if not is_first:
        sys.stdout.write("\n\n")
        sys.stdout.flush()
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
