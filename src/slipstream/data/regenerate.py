"""The target answers its own prompts, through our own engine and so speculatively.

A drafter learns to predict the target, so it should be trained on the target's answers, not on
somebody else's: the same text format, the same tokens, the same loops and endings. Prompts of
several turns are answered turn by turn, one output row per answer (ids "x", "x:2", "x:3"), each
with the exact token ids that generation saw and emitted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slipstream.data.answers import AnswersFile
from slipstream.data.conversations import Conversation, Message
from slipstream.data.exchanges import Exchange, open_exchanges
from slipstream.data.loops import ends_in_loop
from slipstream.errors import DataError, SettingError, TemplateRefusalError
from slipstream.types import Sampling

log = logging.getLogger(__name__)

ROUNDS_PER_GROUP = 16  # the batch runs empty at a group's end only, so one in 16 times


class Answerer(Protocol):
    """What regeneration needs of an engine; `engine.engine.Engine` is one."""

    target: Any
    max_length: int

    def generate(self, prompts: Any, **settings: Any) -> Any:
        """Answer token lists in a rolling batch, telling `on_result` of each as it ends."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is.

    Args:
        rows: answers written by this run.
        done: conversations finished or skipped, those of earlier runs included.
        total: conversations in all.
        tokens: answer tokens written by this run.
        seconds: since the start.
    """

    rows: int
    done: int
    total: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens of this run per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining_seconds(self) -> float | None:
        """Estimate from this run's answers so far; None before the first."""
        return (self.total - self.done) * self.seconds / self.rows if self.rows else None


@dataclass(slots=True)
class Regenerated:
    """What a run wrote.

    Args:
        path: the answers file.
        rows: answers written.
        tokens: their tokens.
        seconds: wall clock.
        bytes: size of the whole file.
        counts: `already_there`, `long_prompts_skipped`, `duplicates_skipped`, `no_user_turn`,
            `refused_by_template`, `failed`, `truncated_answers`, `loops`, `retokenised`.
    """

    path: Path
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    bytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens per second of wall clock."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def regenerate(
    engine: Answerer,
    rows: Iterable[Conversation],
    out_path: str | Path,
    *,
    max_new_tokens: int = 384,
    num_rows: int = 8,
    sampling: Sampling | None = None,
    resume: bool = True,
    limit: int | None = None,
    keep_history: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Regenerated:
    """Answer prompts and append the answers to a file.

    Rows are written and flushed as they are done; whatever ends the run, the file is valid and
    `resume` goes on where it stopped.

    Args:
        engine: target and drafter.
        rows: prompts; assistant turns in them are left out and answered anew.
        out_path: JSONL file to append to.
        max_new_tokens: tokens of an answer at most.
        num_rows: rows decoded together.
        sampling: greedy without it.
        resume: go on in an existing file.
        limit: read this many prompts only.
        keep_history: answer only the last user turn, with the data's own earlier assistant turns
            as its history.
        on_progress: called after each answer.

    Raises:
        OutputError: the file exists and `resume` is off, or cannot be written.
        DataError: there is no prompt.
        SettingError: a number is below 1.
    """
    for name, value in (("max-new-tokens", max_new_tokens), ("rows", num_rows), ("limit", limit)):
        if value is not None and value < 1:
            raise SettingError(name, value, "1 or more")
    sampling = sampling or Sampling()
    settings = {
        "model": engine.target.spec.name,
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "template": getattr(engine.target.tokenizer, "fingerprint", None),
        "template_mode": dict(engine.target.tokenizer.template_mode or {}),
        "keep_history": keep_history,
    }
    chosen = list(_take(rows, limit))
    if not chosen:
        raise DataError("there are no prompts to answer", "give a file with at least one row")
    report = Regenerated(Path(out_path))
    with AnswersFile(out_path, settings=settings, resume=resume) as answers:
        run = _Run(engine, answers, report, sampling, max_new_tokens, num_rows)
        run.total, run.on_progress = len(chosen), on_progress
        try:
            for number, group in enumerate(_groups(chosen, num_rows * ROUNDS_PER_GROUP)):
                exchanges = open_exchanges(group, answers, report.counts, keep_history=keep_history)
                run.done += len(group) - len(exchanges)
                run.answer(exchanges, seed=sampling.seed + number)
        finally:
            report.seconds = run.seconds
            report.bytes = answers.num_bytes
    return report


@dataclass(slots=True)
class _Run:
    """Answers groups of conversations, one turn of all of them at a time."""

    engine: Answerer
    answers: AnswersFile
    report: Regenerated
    sampling: Sampling
    max_new_tokens: int
    num_rows: int
    on_progress: Callable[[Progress], None] | None = None
    total: int = 0
    done: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Wall clock so far."""
        return time.perf_counter() - self.started

    def answer(self, exchanges: list[Exchange], *, seed: int) -> None:
        """Every waiting turn of every exchange."""
        while exchanges:
            asked: list[Exchange] = []
            prompts: list[list[int]] = []
            for exchange in exchanges:
                exchange.said.extend(exchange.waiting.pop(0))
                prompt = self._prompt(exchange)
                if prompt is None:
                    exchange.waiting.clear()
                    self.done += 1
                else:
                    asked.append(exchange)
                    prompts.append(prompt)
            if prompts:
                self._generate(asked, prompts, seed)
            exchanges = [exchange for exchange in asked if exchange.waiting]

    def _prompt(self, exchange: Exchange) -> list[int] | None:
        """The next prompt's ids; None, with a count, where it cannot be asked."""
        ids = list(exchange.row.prompt_ids or ())
        if exchange.said:
            try:
                chat = [message.to_dict() for message in exchange.said]
                ids = self.engine.target.tokenizer.encode_chat(chat)
            except TemplateRefusalError as error:
                log.warning("row %s: %s", exchange.row.id, error)
                self.report.counts["refused_by_template"] += 1
                return None
        if len(ids) > self.engine.max_length - 1:
            self.report.counts["long_prompts_skipped"] += 1
            return None
        return ids

    def _generate(self, asked: list[Exchange], prompts: list[list[int]], seed: int) -> None:
        self.engine.generate(
            prompts,
            num_rows=self.num_rows,
            on_result=lambda result: self._keep(asked[result.prompt_index], result),
            max_new_tokens=self.max_new_tokens,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            seed=seed,
        )

    def _keep(self, exchange: Exchange, result: Any) -> None:
        """One row to the file; a failed answer ends its conversation."""
        response = list(result.token_ids)
        report = self.report
        if result.finish_reason == "error" or not response:
            log.warning("row %s: no answer: %s", exchange.row.id, getattr(result, "error", None))
            report.counts["failed"] += 1
            exchange.waiting.clear()
        else:
            answered = [*exchange.said, Message("assistant", result.text)]
            self.answers.append(
                exchange.row_id,
                source=exchange.row.source,
                prompt_ids=result.prompt_ids,
                response_ids=response,
                finish=result.finish_reason,
                messages=answered,
                temperature=self.sampling.temperature,
                is_retokenised=getattr(result, "is_retokenised", False),
            )
            exchange.said = answered
            exchange.num_answers += 1
            report.rows += 1
            report.tokens += len(response)
            report.counts["truncated_answers"] += result.finish_reason == "length"
            report.counts["loops"] += ends_in_loop(response)
            if getattr(result, "is_retokenised", False):
                report.counts["retokenised"] += 1
        self.done += not exchange.waiting
        if self.on_progress:
            self.on_progress(
                Progress(report.rows, self.done, self.total, report.tokens, self.seconds)
            )


def _take(rows: Iterable[Conversation], limit: int | None) -> Iterator[Conversation]:
    for number, row in enumerate(rows):
        if limit is not None and number >= limit:
            return
        yield row


def _groups(rows: list[Conversation], size: int) -> Iterator[list[Conversation]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
