"""Answers prompts and files each answer as it is done, so that an interrupt loses nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slipstream.cli.options import Decoding
from slipstream.cli.prompts import Prompt, user

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.engine.request import Result


TOLD_AT_THE_END = (
    "num_target_passes", "tau", "seconds", "prefill_seconds", "draft_seconds", "target_seconds",
    "other_seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fragment:
    """Some text of one answer; an empty one announces that the answer begins.

    Args:
        prompt_index: position of the prompt.
        turn_index: position of the user turn in it.
        text: what became certain.
    """

    prompt_index: int
    turn_index: int
    text: str = ""


@dataclass(slots=True)
class Answering:
    """Answers under way and done.

    Args:
        engine: what answers.
        decoding: how.
        raw: prompts go without the chat template.
        num_rows: prompts decoded together.
        trace: keep every step in the results.
        results: finished answers.
        outputs: the same for `--json`, and the answer an interrupt cut.
    """

    engine: Engine
    decoding: Decoding
    raw: bool
    num_rows: int = 1
    trace: bool = False
    results: list[Result] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)

    def check(self, asked: Sequence[Prompt]) -> None:
        """Encode every first turn, so that a prompt that does not fit is told before any work.

        Raises:
            PromptTooLongError: a prompt leaves no room for an answer.
        """
        for index, prompt in enumerate(asked):
            first = prompt.first(raw=self.raw)
            self.engine.request(first, index, raw=self.raw, **self.decoding.arguments())

    def fragments(self, asked: Sequence[Prompt]) -> Iterator[Fragment]:
        """Every answer, turn by turn; one by one as it grows, or whole when rows share a batch."""
        if self.num_rows > 1:
            yield from self._together(asked)
            return
        for index, prompt in enumerate(asked):
            messages = prompt.opening()
            for turn, text in enumerate(prompt.turns):
                messages.append(user(text))
                yield Fragment(index, turn)
                yield from self._one(index, turn, text if self.raw else list(messages))
                messages.append({"role": "assistant", "content": self.results[-1].text})

    def _one(self, index: int, turn: int, prompt: str | list[dict[str, str]]) -> Iterator[Fragment]:
        begun: list[int] = []
        try:
            settings = {"raw": self.raw, "trace": self.trace, **self.decoding.arguments()}
            for piece in self.engine.stream(prompt, **settings):
                begun.extend(piece.token_ids)
                if piece.result is not None:
                    self._file(replace(piece.result, prompt_index=index), turn)
                if piece.text:
                    yield Fragment(index, turn, piece.text)
        except KeyboardInterrupt:
            if begun:
                self.outputs.append(self._cut_short(index, turn, begun))
            raise

    def _together(self, asked: Sequence[Prompt]) -> Iterator[Fragment]:
        try:
            self.engine.generate(
                [prompt.first(raw=self.raw) for prompt in asked],
                num_rows=self.num_rows,
                raw=self.raw,
                on_result=self._file,
                trace=self.trace,
                **self.decoding.arguments(),
            )
        finally:
            self.outputs.sort(key=lambda output: output["prompt_index"])
        for output in self.outputs:
            yield Fragment(output["prompt_index"], 0)
            yield Fragment(output["prompt_index"], 0, output["text"])

    def _file(self, result: Result, turn: int = 0) -> None:
        self.results.append(result)
        self.outputs.append(describe(result, turn))

    def _cut_short(self, index: int, turn: int, begun: list[int]) -> dict[str, Any]:
        """The output of an answer that an interrupt cut; what only its end tells is None."""
        return {
            "prompt_index": index,
            "turn_index": turn,
            "text": self.engine.target.tokenizer.decode(begun),  # type: ignore[attr-defined]
            "token_ids": begun,
            "num_tokens": len(begun),
            **dict.fromkeys(TOLD_AT_THE_END),
            "finish_reason": "interrupted",
        }


def describe(result: Result, turn: int = 0) -> dict[str, Any]:
    """One finished answer in the glossary's names."""
    return {
        "prompt_index": result.prompt_index,
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
        **({} if result.error is None else {"error": result.error}),
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
