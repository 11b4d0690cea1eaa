"""Who is in the batch: waiting requests take a cache row as soon as there is one and room in it.

First come, first served. A row holds blocks for its tokens and grows with them. When none is left,
kept prefixes go first, then drafts get narrower, and at last the youngest row gives way: it is put
off to the head of the queue and later prefilled with all it has said. Keyed noise makes it go on
with the tokens it would have said anyway.

A scheduler that keeps prefixes leaves a finished row's keys where they are, with the features its
drafter was given. A request whose prompt starts with the same tokens, the next turn of a chat for
example, takes that row and prefills the rest alone; its drafter is opened with all features, as if
the whole prompt had been run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache import SlotCache
from slipstream.engine.blocks import BLOCK, Blocks
from slipstream.engine.request import Request


@dataclass(frozen=True, slots=True)
class Kept:
    """What a free cache row still holds.

    Args:
        tokens: whose keys are in the row.
        features: [S, K*D] of these tokens, or None where the drafter takes none.
    """

    tokens: tuple[int, ...]
    features: Tensor | None

    def common(self, tokens: Sequence[int]) -> int:
        """How many of a prompt's tokens it saves; the last one is always run, for its logits."""
        most = min(len(self.tokens), len(tokens) - 1)
        return next((i for i in range(most) if self.tokens[i] != tokens[i]), most)


class Scheduler:
    """A rolling batch over the rows of one cache.

    Args:
        cache: its rows are handed out, the lowest first, so that they lie side by side.
        num_rows: rows that decode together.
        requests: in the order they will be admitted; `submit` adds more.
        blocks: how much of the cache they may hold; None lets each row have its full length.
        keeps_prefixes: finished rows serve later requests that start alike.

    Attributes:
        waiting: in the order they will be admitted.
        running: in the order they came, the youngest last; all are older than those that wait.
    """

    def __init__(
        self,
        cache: SlotCache,
        num_rows: int,
        requests: Iterable[Request] = (),
        *,
        blocks: Blocks | None = None,
        keeps_prefixes: bool = False,
    ) -> None:
        self._cache, self._num_rows, self._keeps = cache, num_rows, keeps_prefixes
        self.blocks = blocks or Blocks(num_rows * -(-cache.max_length // BLOCK))
        self._is_scarce = blocks is not None
        self.kept: dict[int, Kept] = {}  # by slot, the longest unused first
        self._free = list(range(num_rows))
        self.waiting = deque(requests)
        self.running: list[Request] = []
        self.num_put_off = 0

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_free(self) -> int:
        """Cache rows nobody holds."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that running rows hold, so not what kept prefixes hold."""
        running = tuple(self.running)  # other threads ask too
        return sum(self.blocks.held(row.slot) for row in running) / self.blocks.total

    def submit(self, request: Request) -> None:
        """Put a request behind those that wait."""
        self.waiting.append(request)

    def admit(self) -> Request | None:
        """Give the next waiting request a clean row; None when nobody waits or there is no room.

        Where blocks are scarce, one for each row that runs is left over, so that whoever comes in
        is not put off again by the next few steps of the others.
        """
        if not self.waiting or not self._free:
            return None
        request = self.waiting[0]
        slot, num_shared = self._best_row(request.tokens)
        size = len(request.tokens)
        spare = len(self.running) if self._is_scarce else 0
        if not self._make_room(self.blocks.count(size) + spare, besides=slot):
            return None
        self.waiting.popleft()
        self.blocks.hold(slot, size)
        self._free.remove(slot)
        heapq.heapify(self._free)
        kept = self.kept.pop(slot, None)
        if kept is not None and num_shared:
            self._cache.truncate(slot, num_shared)
            if kept.features is not None:
                request.features.append(kept.features[:num_shared])
        else:
            self._cache.reset(slot)
        request.slot, request.keeps_features = slot, self._keeps
        self.running.append(request)
        return request

    def provide(self) -> list[Request]:
        """Let every prefilled row hold what its next step may write.

        Returns:
            The rows that had to give way; they wait again.
        """
        put_off: list[Request] = []
        for row in self.running:  # what the last step had for its drafts comes back first
            if self.blocks.count(len(row.tokens)) < self.blocks.held(row.slot):
                self.blocks.hold(row.slot, len(row.tokens))
        for row in list(self.running):  # the oldest first: it can always go on
            while row.slot >= 0 and row.is_prefilled and not self._hold(row, len(row.tokens)):
                put_off.append(self._put_off(self.running[-1]))
        for row in self.running:
            if row.is_prefilled:
                self._widen(row)
                row.capacity = min(self._cache.max_length, self.blocks.room(row.slot))
        return put_off

    def retire(self, request: Request) -> None:
        """Take a request out of the batch and free its row."""
        self.running.remove(request)
        if self._keeps and request.failure is None:
            self._keep(request)
        else:
            self._clear(request.slot)
        heapq.heappush(self._free, request.slot)
        request.slot = -1
        request.features = []  # whoever still reads the answer holds the request

    def withdraw(self, request: Request) -> None:
        """Take a request out of the queue; one that does not wait is left alone."""
        if request in self.waiting:
            self.waiting.remove(request)

    def forget(self) -> None:
        """Empty every free row that still holds a prefix."""
        for slot in self.kept:
            self._clear(slot)
        self.kept.clear()

    def check(self) -> str:
        """What is wrong with the books, in words; empty when rows, slots and blocks add up."""
        rows = {row.slot: row for row in self.running}
        if sorted([*self._free, *(row.slot for row in self.running)]) != [*range(self._num_rows)]:
            return f"rows {sorted(self._free)} are free and {sorted(rows)} run"
        for slot, size in enumerate(self._cache.lengths):
            row, kept, held = rows.get(slot), self.kept.get(slot), self.blocks.held(slot)
            if row is None and size != (0 if kept is None else len(kept.tokens)):
                return f"row {slot} is free and holds {size} keys"
            if row is None and kept is None and held:
                return f"row {slot} is free and holds {held} blocks"
            if row is not None and row.is_prefilled and size != len(row.tokens) - 1:
                return f"row {slot} has {size} keys of {len(row.tokens)} tokens"
            if size > self.blocks.room(slot):
                return f"row {slot} has {size} keys in {held} blocks"
        if self.blocks.num_free < 0:
            return f"{self.blocks.total - self.blocks.num_free} of {self.blocks.total} blocks"
        return ""

    def _best_row(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The free row that saves most of a prompt, and how many tokens; else an unused one.

        What a kept row holds beyond the shared tokens is lost. So while there are unused rows, a
        row is taken that shares most of what it holds; all chats share their template's first
        tokens.
        """
        shared = {slot: kept.common(tokens) for slot, kept in self.kept.items()}
        clean = [slot for slot in self._free if slot not in self.kept]
        if clean:
            shared = {s: n for s, n in shared.items() if 2 * n >= len(self.kept[s].tokens)}
        best = max(shared, key=shared.__getitem__, default=None)
        if best is not None and shared[best]:
            return best, shared[best]
        return (min(clean) if clean else next(iter(self.kept))), 0

    def _hold(self, row: Request, num_slots: int) -> bool:
        """Let a row hold so many slots, if need be at the price of kept prefixes."""
        self._make_room(self.blocks.count(num_slots) - self.blocks.held(row.slot))
        return self.blocks.hold(row.slot, num_slots)

    def _widen(self, row: Request) -> None:
        """Let a row hold what its drafts may need besides, or as much of it as there is."""
        wanted = min(len(row.tokens) + row.widest_now, self._cache.max_length)
        if not self._hold(row, wanted):
            free = self.blocks.size * self.blocks.num_free
            self.blocks.hold(row.slot, self.blocks.room(row.slot) + free)

    def _make_room(self, num_blocks: int, besides: int = -1) -> bool:
        """Clear kept prefixes, the longest unused first, until so many blocks are free.

        Args:
            num_blocks: that are needed.
            besides: a row whose blocks count as free; its prefix stays.

        Returns:
            False if even without them there are too few; then they stay.
        """
        lacking = num_blocks - self.blocks.num_free - self.blocks.held(besides)
        others = [slot for slot in self.kept if slot != besides]
        if lacking > sum(self.blocks.held(slot) for slot in others):
            return False
        for slot in others:
            if lacking <= 0:
                break
            lacking -= self.blocks.held(slot)
            del self.kept[slot]
            self._clear(slot)
        return True

    def _put_off(self, request: Request) -> Request:
        """Take a running request's row away; it waits before all others."""
        self.running.remove(request)
        self._clear(request.slot)
        heapq.heappush(self._free, request.slot)
        request.put_off()
        self.waiting.appendleft(request)
        self.num_put_off += 1
        return request

    def _clear(self, slot: int) -> None:
        self._cache.reset(slot)
        self.blocks.release(slot)

    def _keep(self, request: Request) -> None:
        """Leave a finished row's keys in place, as far as the features go too."""
        size = self._cache.lengths[request.slot]
        features = torch.cat(request.features) if request.features else None
        if features is not None:
            size = min(size, len(features))
        self._cache.truncate(request.slot, size)
        self.blocks.hold(request.slot, size)
        self.kept[request.slot] = Kept(tuple(request.tokens[:size]), features)
