"""From a checked body to the engine's requests, and from their pieces to the answer's JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

from slipstream.engine.engine import Engine
from slipstream.engine.request import Piece, Request, Result
from slipstream.errors import SettingError
from slipstream.serve import grammar
from slipstream.serve.replies import ChatScores, CompletionScores, Marks, speculation, usage
from slipstream.serve.schema import LARGEST_SEED, ChatAsked, CompletionAsked

FINISH = {"stop": "stop", "length": "length", "abort": "stop", "error": "stop"}


class Ask:
    """One HTTP request, as the engine will see it.

    Args:
        engine: answers.
        asked: the body.
        id_: of the HTTP request; without a seed it is the key of the noise.
    """

    def __init__(self, engine: Engine, asked: ChatAsked | CompletionAsked, id_: UUID) -> None:
        self.engine, self.asked, self.id = engine, asked, id_
        self.tokenizer = engine.tokenizer
        self.depth = int(engine.describe().get("depth") or 0)

    def rows(self) -> list[Request]:
        """A request per choice, n for each prompt; choice i of a prompt has the seed's i-th next.

        Raises:
            SettingError: a setting does not fit this model.
            PromptTooLongError: a prompt leaves no room for an answer.
        """
        asked = self.asked
        seed = self.id.int if asked.seed is None else asked.seed
        prompts: Sequence[Any]
        if isinstance(asked, ChatAsked):
            prompts = [[message.plain() for message in asked.messages]]
        else:
            prompts = asked.prompts()
        if not prompts or any(len(prompt) == 0 for prompt in prompts):
            raise SettingError("prompt", "empty", "at least one token")
        if len(prompts) * asked.n > 64:
            raise SettingError("choices", len(prompts) * asked.n, "64 or fewer")
        return [
            self._row(prompt, (seed + choice) % LARGEST_SEED)
            for prompt in prompts
            for choice in range(asked.n)
        ]

    def _row(self, prompt: Any, seed: int) -> Request:
        asked = self.asked
        rules = None
        if asked.response_format is not None:
            rules = grammar.make(asked.response_format, self.engine.target)
        return self.engine.request(
            prompt,
            max_new_tokens=asked.limit or self.engine.max_length,
            temperature=asked.temperature,
            top_k=max(0, asked.top_k),
            top_p=asked.top_p,
            seed=seed,
            stop=asked.stops(),
            raw=isinstance(asked, CompletionAsked),
            budget=0 if asked.method == "none" else asked.budget,
            penalties=asked.penalties(),
            grammar=rules,
            num_top=asked.num_top,
            skip_special=asked.skip_special_tokens,
        )


class Answer:
    """What an endpoint sends: add pieces and take the whole, or take chunks as they come.

    Args:
        ask: the HTTP request.
        rows: its choices.
        model: the served name.
    """

    prefix = kind = chunk_kind = ""

    def __init__(self, ask: Ask, rows: Sequence[Request], model: str) -> None:
        self.id = f"{self.prefix}-{ask.id.hex}"
        self._ask, self._rows = ask, rows
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._results: dict[int, Result] = {}
        self._options = ask.asked.stream_options

    def add(self, index: int, piece: Piece) -> None:
        """Take note of a piece."""
        if piece.result is not None:
            self._results[index] = piece.result

    def failure(self) -> str | None:
        """What went wrong in a choice, if anything did."""
        return next((r.error for r in self._results.values() if r.error is not None), None)

    def whole(self) -> dict[str, Any]:
        """The answer in one piece, once every choice has its result."""
        choices = []
        for index, _ in enumerate(self._rows):
            result = self._results[index]
            choice = self._choice(index, result)
            if self._ask.asked.return_token_ids:
                choice["token_ids"] = list(result.token_ids)
            choices.append(choice)
        return {**self._head, "object": self.kind, "choices": choices, **self._figures()}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Chunks before any text."""
        yield from ()

    def chunks(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """The chunks of a piece."""
        self.add(index, piece)
        finish = None if piece.result is None else FINISH[piece.result.finish_reason]
        choice = {**self._delta(index, piece), "index": index, "finish_reason": finish}
        if self._ask.asked.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        yield self._chunk([choice])

    def closing(self) -> Iterator[dict[str, Any]]:
        """Chunks after the last piece."""
        if self._options is not None and self._options.include_usage:
            yield {**self._chunk([]), **self._figures()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_kind, "choices": choices}

    def _figures(self) -> dict[str, Any]:
        """Usage and what speculation did."""
        results = list(self._results.values())
        asked = sum(row.num_prompt for row in self._rows[:: self._ask.asked.n])
        figures = usage(asked, sum(result.num_tokens for result in results))
        metrics = {"speculative_decoding": speculation(results, self._ask.depth)}
        return {"usage": figures, "metrics": metrics}

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        """A finished choice."""
        raise NotImplementedError

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        """What a piece adds to a choice."""
        raise NotImplementedError


class ChatAnswer(Answer):
    """`/v1/chat/completions`."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, ask: Ask, rows: Sequence[Request], model: str) -> None:
        super().__init__(ask, rows, model)
        self._scores = ChatScores(ask.tokenizer)
        self._marks = [Marks(ask.tokenizer) for _ in rows] if ask.asked.mark_drafted else []

    def opening(self) -> Iterator[dict[str, Any]]:
        """Who speaks."""
        for index, _ in enumerate(self._rows):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([{"index": index, "delta": delta, "finish_reason": None}])

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        wants = self._ask.asked.logprobs
        return {
            "index": index,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": self._scores(result.token_ids, result.scores) if wants else None,
            "finish_reason": FINISH[result.finish_reason],
        }

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"delta": {"content": piece.text} if piece.text else {}}
        if self._ask.asked.logprobs:
            delta["logprobs"] = self._scores(piece.token_ids, piece.scores)
        if self._marks:
            is_last = piece.result is not None
            delta["marks"] = self._marks[index](piece.token_ids, piece.drafted, is_last=is_last)
        return delta


class CompletionAnswer(Answer):
    """`/v1/completions`."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, ask: Ask, rows: Sequence[Request], model: str) -> None:
        super().__init__(ask, rows, model)
        self._scores = [CompletionScores(ask.tokenizer) for _ in rows]

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        wants = self._ask.asked.logprobs is not None
        return {
            "index": index,
            "text": result.text,
            "logprobs": self._scores[index](result.token_ids, result.scores) if wants else None,
            "finish_reason": FINISH[result.finish_reason],
        }

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"text": piece.text, "logprobs": None}
        if self._ask.asked.logprobs is not None:
            delta["logprobs"] = self._scores[index](piece.token_ids, piece.scores)
        return delta
