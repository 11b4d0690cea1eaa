"""Counts and times of every step.

Times are wall-clock seconds. A batched step is one turn for all of its rows, so its times are
split evenly over them; the device is synchronised only where work is queued (CUDA).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from slipstream.types import Step


@dataclass(frozen=True, slots=True)
class Lap:
    """Seconds of one turn of the loop, or one row's share of it."""

    draft: float
    target: float
    other: float

    def share(self, num_rows: int) -> Lap:
        """One row's even share."""
        return Lap(self.draft / num_rows, self.target / num_rows, self.other / num_rows)


class Meter:
    """A stopwatch with named spans: `start`, some spans, `lap`.

    Args:
        clock: seconds, monotonic.
        synchronise: waits for queued device work before the clock is read; None on the CPU.
        on_lap: told what every turn took; how costs are learned while decoding.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        synchronise: Callable[[], None] | None = None,
        on_lap: Callable[[Lap], None] | None = None,
    ) -> None:
        self._clock = clock
        self._synchronise = synchronise
        self._on_lap = on_lap
        self._spans: dict[str, float] = {}
        self._started = 0.0

    def now(self) -> float:
        """Seconds, once the device has nothing queued."""
        if self._synchronise is not None:
            self._synchronise()
        return self._clock()

    def start(self) -> None:
        """Begin a turn."""
        self._spans = {"draft": 0.0, "target": 0.0}
        self._started = self.now()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block under `name` ("draft" or "target")."""
        begun = self.now()
        try:
            yield
        finally:
            self._spans[name] = self._spans.get(name, 0.0) + self.now() - begun

    def lap(self) -> Lap:
        """Seconds since `start`, what lies outside the spans as `other`."""
        draft, target = self._spans["draft"], self._spans["target"]
        found = Lap(draft, target, max(0.0, self.now() - self._started - draft - target))
        if self._on_lap is not None:
            self._on_lap(found)
        return found


@dataclass(slots=True)
class Tally:
    """What one request's steps add up to. Only tokens that reached the output count.

    Attributes:
        num_passes: target passes after prefill.
        num_emitted: tokens those passes gave; the first token, which prefill gives, is not one.
        reached: reached[i] steps emitted more than i + 1 tokens, so that
            tau == 1 + sum(reach) exactly, also when a stop cuts inside an accepted path.
        num_nodes: drafted nodes those passes verified.
        num_draft_steps: passes that verified any.
    """

    num_passes: int = 0
    num_emitted: int = 0
    reached: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    other_seconds: float = 0.0
    num_nodes: int = 0
    num_draft_steps: int = 0

    def add(self, step: Step) -> None:
        """Count one step."""
        self.num_passes += 1
        self.num_emitted += len(step.emitted)
        self.num_nodes += step.tree.budget
        self.num_draft_steps += step.tree.budget > 0
        self.reached += [0] * (step.tree.num_drafted - len(self.reached))
        for depth in range(len(step.emitted) - 1):
            self.reached[depth] += 1
        self.draft_seconds += step.draft_seconds
        self.target_seconds += step.target_seconds
        self.other_seconds += step.other_seconds

    @property
    def tau(self) -> float:
        """Mean accepted length, bonus included, tokens/pass; 1 when no pass was needed."""
        return self.num_emitted / self.num_passes if self.num_passes else 1.0

    @property
    def reach(self) -> tuple[float, ...]:
        """reach[i] = share of steps in which depth i + 1 was accepted."""
        return tuple(count / self.num_passes for count in self.reached)

    @property
    def alpha(self) -> tuple[float, ...]:
        """alpha[i] = share of depth i + 1 accepted among steps where depth i was."""
        before = [self.num_passes, *self.reached]
        return tuple(
            count / total if total else 0.0
            for count, total in zip(self.reached, before, strict=False)
        )
