"""The open-ended loop: requests come and go between turns; `step` does the work.

A turn runs a bounded piece of the prompts that wait, so that long prompts do not stall the answers
under way, and then one step of every row that has its first token. `generate`, `stream` and the
server all run this loop; they differ in where requests come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from slipstream.cache import SlotCache
from slipstream.drafters.protocol import Drafter
from slipstream.engine.blocks import Blocks
from slipstream.engine.meter import Meter
from slipstream.engine.request import Request
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.step import prefill, step
from slipstream.engine.throttle import Throttle
from slipstream.target.hardware import threads_of
from slipstream.target.protocol import Target
from slipstream.verify.protocol import Verify


class Loop:
    """Continuous batching of speculative rows.

    Args:
        target: scores trees.
        drafter: proposes them.
        verify: judges them.
        cache: holds the rows.
        meter: times the turns.
        num_rows: requests that decode together.
        chunk: prompt tokens per prefill pass, if a turn may have so many.
        prefill_tokens: prompt tokens per turn, after which the running rows get their step; None
            finishes every prompt that has a row first.
        throttle: says before each step how much the rows may draft, down to nothing; None leaves
            trees as they are.
        blocks: how much of the cache the rows may hold; see `scheduler`.
        keeps_prefixes: finished rows serve later requests that start alike; see `scheduler`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        verify: Verify,
        cache: SlotCache,
        meter: Meter,
        *,
        num_rows: int,
        chunk: int,
        prefill_tokens: int | None = None,
        throttle: Throttle | None = None,
        blocks: Blocks | None = None,
        keeps_prefixes: bool = False,
    ) -> None:
        self._target, self._drafter, self._verify = target, drafter, verify
        self._cache, self._meter = cache, meter
        self._prefill_tokens = math.inf if prefill_tokens is None else prefill_tokens
        self._chunk = chunk if prefill_tokens is None else min(chunk, prefill_tokens)
        self._throttle = throttle
        self.scheduler = Scheduler(cache, num_rows, blocks=blocks, keeps_prefixes=keeps_prefixes)

    def submit(self, request: Request) -> None:
        """Put a request behind those that wait; it is admitted in a later turn."""
        self.scheduler.submit(request)

    def abort(self, request: Request) -> None:
        """End a request wherever it is, and free its row and its drafter's state.

        One that is finished keeps its answer; it still has a row where its last turn broke off.
        """
        self.scheduler.withdraw(request)
        if request in self.scheduler.running:
            self._drafter.close(request)
            self.scheduler.retire(request)
        if not request.is_finished:
            request.abort()

    def turn(self) -> Iterator[Request]:
        """Yield each row when its first token is there and after each of its steps."""
        yield from self._prefill()
        rows = self._ready()
        if not rows:
            return
        self._step(rows)
        for row in rows:
            if row.is_finished:
                self.scheduler.retire(row)
        yield from rows

    def run(self) -> Iterator[Request]:
        """Turns until nobody waits or runs."""
        while self.scheduler.has_work:
            yield from self.turn()

    def close(self) -> None:
        """Abort everything."""
        for row in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(row)

    def leaks(self) -> str:
        """What an idle loop still holds, in words; empty when rows, slots and blocks are back."""
        return "" if self.scheduler.has_work else self.scheduler.check()

    def _prefill(self) -> Iterator[Request]:
        left = self._prefill_tokens
        while left > 0 and (row := self._next_prompt()) is not None:
            left -= min(self._chunk, row.num_prefill - self._cache.lengths[row.slot])
            with self._threads():
                prefill(row, self._target, self._cache, self._drafter, self._meter, self._chunk)
            if row.is_finished:
                self.scheduler.retire(row)
            if row.is_finished or row.is_prefilled:
                yield row

    def _next_prompt(self) -> Request | None:
        """The oldest row that prefill has not finished, else the next that waits."""
        unfinished = (row for row in self.scheduler.running if not row.is_prefilled)
        return next(unfinished, None) or self.scheduler.admit()

    def _ready(self) -> list[Request]:
        """The rows of the next step, with what each may draft and room for it."""
        rows = [row for row in self.scheduler.running if row.is_prefilled]
        share = None if self._throttle is None or not rows else self._throttle.choose(len(rows))
        for row in rows:
            row.share = share
        for row in self.scheduler.provide():
            self._drafter.close(row)
        ready = (row for row in rows if row.slot >= 0)
        return sorted(ready, key=lambda row: row.slot)  # side by side in the cache

    def _threads(self) -> AbstractContextManager[None]:
        """What torch's threads do: beside compiled passes they rest, where the drafter agrees."""
        rests = getattr(self._drafter, "rests_threads", False)
        return threads_of(self._target.spec.decoder) if rests else nullcontext()

    def _step(self, rows: list[Request]) -> None:
        """One step, and what it gave for its time."""
        share = rows[0].share
        drafting = {row.key for row in rows if row.may_draft}
        catches_up = any(row.is_behind for row in rows if row.key in drafting)
        begun = self._meter.now()
        with self._threads():
            steps = step(rows, self._target, self._cache, self._drafter, self._verify, self._meter)
        if self._throttle is not None:
            tokens = sum(len(each.emitted) for each in steps)
            seconds = self._meter.now() - begun
            self._throttle.note(
                len(rows), share, tokens=tokens, seconds=seconds, catches_up=catches_up
            )
        for row in rows:
            row.is_behind = row.key not in drafting
