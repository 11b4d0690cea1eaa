"""Who is in the batch: waiting requests take a cache row as soon as one is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from slipstream.cache import SlotCache
from slipstream.engine.request import Request


class Scheduler:
    """A rolling batch over the rows of one cache; first come, first served.

    Args:
        cache: its rows are handed out.
        num_rows: rows that decode together.
        requests: in the order they will be admitted.
    """

    def __init__(self, cache: SlotCache, num_rows: int, requests: Iterable[Request]) -> None:
        self._cache = cache
        self._free = deque(range(num_rows))
        self._waiting = deque(requests)
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._waiting or self.running)

    @property
    def num_free(self) -> int:
        """Cache rows nobody holds."""
        return len(self._free)

    def admit(self) -> Request | None:
        """Give the next waiting request a clean row; None when nobody waits or no row is free."""
        if not self._waiting or not self._free:
            return None
        request = self._waiting.popleft()
        request.slot = self._free.popleft()
        self._cache.reset(request.slot)
        self.running.append(request)
        return request

    def retire(self, request: Request) -> None:
        """Take a request out of the batch and free its row."""
        self.running.remove(request)
        self._cache.reset(request.slot)
        self._free.append(request.slot)
        request.slot = -1
