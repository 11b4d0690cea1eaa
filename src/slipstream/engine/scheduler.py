"""Who is in the batch: waiting requests take a cache row as soon as one is free.

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
    """A rolling batch over the rows of one cache; first come, first served.

    A row is a request's from admission to its end, with room for its longest answer, so that
    nothing that runs ever has to be put off.

    Args:
        cache: its rows are handed out, the lowest first, so that they lie side by side.
        num_rows: rows that decode together.
        requests: in the order they will be admitted; `submit` adds more.
        keeps_prefixes: finished rows serve later requests that start alike.
    """

    def __init__(
        self,
        cache: SlotCache,
        num_rows: int,
        requests: Iterable[Request] = (),
        *,
        keeps_prefixes: bool = False,
    ) -> None:
        self._cache, self._keeps = cache, keeps_prefixes
        self.kept: dict[int, Kept] = {}  # by slot, the longest unused first
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
        request.slot, num_shared = self._best_row(request.tokens)
        self._free.remove(request.slot)
        heapq.heapify(self._free)
        kept = self.kept.pop(request.slot, None)
        if kept is not None and num_shared:
            self._cache.truncate(request.slot, num_shared)
            if kept.features is not None:
                request.features.append(kept.features[:num_shared])
        else:
            self._cache.reset(request.slot)
        request.keeps_features = self._keeps
        self.running.append(request)
        return request

    def retire(self, request: Request) -> None:
        """Take a request out of the batch and free its row."""
        self.running.remove(request)
        if self._keeps and request.error is None:
            self._keep(request)
        else:
            self._cache.reset(request.slot)
        heapq.heappush(self._free, request.slot)
        request.slot = -1

    def withdraw(self, request: Request) -> None:
        """Take a request out of the queue; one that does not wait is left alone."""
        if request in self.waiting:
            self.waiting.remove(request)

    def forget(self) -> None:
        """Empty every free row that still holds a prefix."""
        for slot in self.kept:
            self._cache.reset(slot)
        self.kept.clear()

    def _best_row(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The free row that saves most of a prompt, and how many tokens; else an unused one."""
        shared = {slot: kept.common(tokens) for slot, kept in self.kept.items()}
        best = max(shared, key=shared.__getitem__, default=None)
        if best is not None and shared[best]:
            return best, shared[best]
        clean = [slot for slot in self._free if slot not in self.kept]
        return (min(clean) if clean else next(iter(self.kept))), 0

    def _keep(self, request: Request) -> None:
        """Leave a finished row's keys in place, as far as the features go too."""
        size = self._cache.lengths[request.slot]
        features = torch.cat(request.features) if request.features else None
        if features is not None:
            size = min(size, len(features))
        self._cache.truncate(request.slot, size)
        self.kept[request.slot] = Kept(tuple(request.tokens[:size]), features)
