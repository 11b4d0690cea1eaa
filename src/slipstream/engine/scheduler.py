"""Who is in the batch: waiting requests take a cache row as soon as one is free."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from slipstream.cache import SlotCache
from slipstream.engine.request import Request


class Scheduler:
    """A rolling batch over the rows of one cache; first come, first served.

    A row is a request's from admission to its end, with room for its longest answer, so that
    nothing that runs ever has to be put off.

    Args:
        cache: its rows are handed out, the lowest first, so that they lie side by side.
        num_rows: rows that decode together.
        requests: in the order they will be admitted; `submit` adds more.
    """

    def __init__(self, cache: SlotCache, num_rows: int, requests: Iterable[Request] = ()) -> None:
        self._cache = cache
        self._free = list(range(num_rows))
        self.waiting = deque(requests)
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_free(self) -> int:
        """Cache rows nobody holds."""
        return len(self._free)

    def submit(self, request: Request) -> None:
        """Put a request behind those that wait."""
        self.waiting.append(request)

    def admit(self) -> Request | None:
        """Give the next waiting request a clean row; None when nobody waits or no row is free."""
        if not self.waiting or not self._free:
            return None
        request = self.waiting.popleft()
        request.slot = heapq.heappop(self._free)
        self._cache.reset(request.slot)
        self.running.append(request)
        return request

    def retire(self, request: Request) -> None:
        """Take a request out of the batch and free its row."""
        self.running.remove(request)
        self._cache.reset(request.slot)
        heapq.heappush(self._free, request.slot)
        request.slot = -1

    def withdraw(self, request: Request) -> None:
        """Take a request out of the queue; one that does not wait is left alone."""
        if request in self.waiting:
            self.waiting.remove(request)
