"""From a checked body to the engine's requests, and from their pieces to the answer's JSON."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import UUID

from slipstream.engine.engine import Engine
from slipstream.engine.request import Piece, Request, Result
from slipstream.engine.text import Verbatim
from slipstream.errors import SettingError
from slipstream.serve import grammar, tools
from slipstream.serve.replies import (
    ChatScores,
    CompletionScores,
    Marks,
    Spelling,
    speculation,
    usage,
)
from slipstream.serve.schema import LARGEST_SEED, ChatAsked, CompletionAsked

FINISH = {"stop": "stop", "length": "length"}  # the others are failures


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
        self.dialect: tools.Dialect | None = None  # how calls are read, once the rows are made

    def rows(self) -> list[Request]:
        """A request per choice, n for each prompt.

        With a seed, choice i of every prompt has the seed's i-th next: the same prompt gives the
        same answers wherever it stands. Without one, no two answers share their noise.

        Raises:
            SettingError: a setting does not fit this model.
            PromptTooLongError: a prompt leaves no room for an answer.
        """
        asked = self.asked
        prompts: Sequence[Any]
        if isinstance(asked, ChatAsked):
            prompts = [self._chat(asked)]
        else:
            prompts = asked.prompts()
        if not prompts or any(len(prompt) == 0 for prompt in prompts):
            raise SettingError("prompt", "empty", "at least one token")
        foreign = [id for id in asked.stop_token_ids if id >= self.engine.target.spec.vocab_size]
        if foreign:
            most = self.engine.target.spec.vocab_size - 1
            raise SettingError("stop_token_ids", foreign[0], f"ids of 0..{most}")
        mark = self._mark()
        form = self._rules(mark)
        first, apart = (self.id.int, asked.n) if asked.seed is None else (asked.seed, 0)
        return [
            self._row(prompt, (first + place * apart + choice) % LARGEST_SEED, mark, form)
            for place, prompt in enumerate(prompts)
            for choice in range(asked.n)
        ]

    def reader(self) -> tools.CallReader | None:
        """Parts a choice's words from its calls; None where nothing can be called."""
        if self.dialect is None:
            return None
        names = [function.name for function in self.asked.callable]
        return tools.CallReader(self.dialect, names, self.asked.most_calls)

    def _chat(self, asked: ChatAsked) -> Sequence[Any]:
        """The messages, or their ids where the template has to show tools."""
        messages = [message.plain() for message in asked.messages]
        wants = "tools" if asked.tools else "messages"
        is_new = asked.tools or any("tool_calls" in m or m["role"] == "tool" for m in messages)
        template = getattr(self.tokenizer, "template_text", "")
        if is_new and not tools.takes_tools(template):
            raise SettingError(wants, "with tools", "none: the model's chat template has no tools")
        if not asked.callable:
            return messages
        self.dialect = tools.dialect_of(template)
        if self.dialect is None:
            raise SettingError("tools", "given", "none: how this model writes calls is not known")
        shown = [tool.model_dump(exclude_none=True) for tool in asked.tools]
        return self.tokenizer.encode_chat(messages, tools=shown)

    def _row(
        self, prompt: Any, seed: int, mark: int | None, form: grammar.GrammarShaper | None
    ) -> Request:
        asked = self.asked
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
            grammar=None if form is None else form.fresh(),
            num_top=asked.num_top,
            skip_special=asked.skip_special_tokens and mark is None,
            is_over=self._watch(),
        )

    def _watch(self) -> Callable[[str], bool] | None:
        """Ends a row once it has made all the calls it may; None where they are not counted.

        It reads the text as the answer does, so a mark that closes no call of a given tool ends
        nothing, and an answer ends with the same token however it is drafted or sent.
        """
        reader = self.reader()
        if reader is None or self.asked.most_calls is None:
            return None

        def is_over(text: str) -> bool:
            reader.push(text)
            return reader.is_full

        return is_over

    def _rules(self, mark: int | None) -> grammar.GrammarShaper | None:
        """What holds the answer to a form, if one was asked for."""
        asked, wish = self.asked, self.asked.response_format
        shaper = None if wish is None else grammar.make(wish, self.engine.target)
        if self.dialect is None:
            return shaper
        if shaper is not None:
            raise SettingError("response_format", wish.type, "text where tools may be called")
        functions = asked.callable
        if not asked.must_call and not any(function.strict for function in functions):
            return None
        schemas = {
            one.name: ((asked.must_call or one.strict) and one.parameters) or {"type": "object"}
            for one in functions
        }
        rules = tools.rules(
            self.dialect, schemas, must=asked.must_call, most=asked.most_calls, token=mark
        )
        return grammar.calls(rules, self.engine.target)

    def _mark(self) -> int | None:
        """The id of the mark before calls where it is a special token, which text leaves out."""
        if self.dialect is None:
            return None
        special = self.tokenizer.inner.added_tokens_decoder.items()
        begin = self.dialect.begin
        return next((id for id, one in special if one.special and one.content == begin), None)


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

    def failure(self, index: int) -> str | None:
        """Why a choice has ended without being finished; None while it runs or if it is."""
        result = self._results.get(index)
        if result is None or result.finish_reason in FINISH:
            return None
        return result.error or "the server stopped before the answer was finished"

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
        """The chunks of a piece; the last one of a choice that failed has none."""
        self.add(index, piece)
        if self.failure(index) is not None:
            return
        choice = {**self._delta(index, piece), "index": index}
        choice["finish_reason"] = None if piece.result is None else self._end(index, piece.result)
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

    def _end(self, index: int, result: Result) -> str:
        """Why a choice ended, in OpenAI's words."""
        return FINISH[result.finish_reason]

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
        self._scores = ChatScores(Spelling(ask.tokenizer)) if ask.asked.logprobs else None
        self._marks = [Marks(ask.tokenizer) for _ in rows] if ask.asked.mark_drafted else []
        self._readers = [ask.reader() for _ in rows]

    def opening(self) -> Iterator[dict[str, Any]]:
        """Who speaks."""
        for index, _ in enumerate(self._rows):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([{"index": index, "delta": delta, "finish_reason": None}])

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        score = self._scores
        words, calls = self._parts(index, result.text, is_last=True)
        message = {"role": "assistant", "content": words, "refusal": None}
        if calls:
            message |= {"content": words or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": None if score is None else score(result.token_ids, result.scores),
            "finish_reason": self._end(index, result),
        }

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        is_last = piece.result is not None
        before = self._num_calls(index)
        words, calls = self._parts(index, piece.text, is_last=is_last)
        content: dict[str, Any] = {"content": words} if words else {}
        if calls:
            numbered = enumerate(calls, start=before)
            content["tool_calls"] = [{"index": number, **call} for number, call in numbered]
        delta: dict[str, Any] = {"delta": content}
        if self._scores is not None:
            delta["logprobs"] = self._scores(piece.token_ids, piece.scores)
        if self._marks:
            delta["marks"] = self._marks[index](piece.token_ids, piece.drafted, is_last=is_last)
        return delta

    def _end(self, index: int, result: Result) -> str:
        end = super()._end(index, result)
        return "tool_calls" if end == "stop" and self._num_calls(index) else end

    def _num_calls(self, index: int) -> int:
        """Calls a choice has made so far."""
        reader = self._readers[index]
        return 0 if reader is None else reader.num_calls

    def _parts(self, index: int, text: str, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """The words and the calls of a piece of a choice's text."""
        reader = self._readers[index]
        if reader is None:
            return text, []
        number = reader.num_calls
        words, calls = reader.push(text)
        if is_last:
            rest, late = reader.finish()
            words, calls = words + rest, calls + late
        return words, [self._call(index, n, call) for n, call in enumerate(calls, start=number)]

    def _call(self, index: int, number: int, call: tools.Call) -> dict[str, Any]:
        """A call, with an id of nine letters, which is what some chat templates insist on."""
        key = hashlib.sha256(f"{self.id} {index} {number}".encode()).hexdigest()[:9]
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": key, "type": "function", "function": function}


class CompletionAnswer(Answer):
    """`/v1/completions`."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, ask: Ask, rows: Sequence[Request], model: str) -> None:
        super().__init__(ask, rows, model)
        self._scores = []
        if ask.asked.logprobs is not None:
            decoder = ask.tokenizer if ask.asked.skip_special_tokens else Verbatim(ask.tokenizer)
            spelling = Spelling(ask.tokenizer)
            self._scores = [CompletionScores(spelling, decoder) for _ in rows]

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        scores = self._scores
        return {
            "index": index,
            "text": result.text,
            "logprobs": scores[index](result.token_ids, result.scores) if scores else None,
            "finish_reason": FINISH[result.finish_reason],
        }

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"text": piece.text, "logprobs": None}
        if self._scores:
            delta["logprobs"] = self._scores[index](piece.token_ids, piece.scores)
        return delta
