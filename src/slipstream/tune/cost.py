"""What the parts of a step cost on this machine: drafting by depth, the pass, the rest.

The pass is `target.passes`; here are the other two. Both are taken from real steps of a real
answer, so that context, cache and features are what they are in use.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.engine.engine import Engine
from slipstream.tune.acceptance import Recorder
from slipstream.verify.walk import walk

NUM_STEPS = 6
NUM_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of drafting a tree by its depth, straight between the measured depths.

    Args:
        depths: measured, ascending.
        seconds: of each.

    Example:
        >>> DraftCost((1, 3), (0.1, 0.3))(2)
        0.2
    """

    depths: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, depth: int) -> float:
        """Seconds; beyond the deepest the last slope goes on."""
        if len(self.depths) > 1 and depth > self.depths[-1]:
            (low, high), (before, after) = self.depths[-2:], self.seconds[-2:]
            return after + (after - before) / (high - low) * (depth - high)
        return float(np.interp(depth, self.depths, self.seconds))

    def to_dict(self) -> dict[str, float]:
        """The JSON value: depth to seconds."""
        return {str(depth): s for depth, s in zip(self.depths, self.seconds, strict=True)}


def draft_costs(
    load: Callable[[int], Engine],
    depths: Sequence[int],
    prompt: Sequence[int],
    arguments: Mapping[str, Any],
) -> DraftCost:
    """Median seconds of drafting at each depth, the depths taking turns.

    Args:
        load: gives the engine that drafts to a depth.
        depths: ascending.
        prompt: token ids of one prompt.
        arguments: sampling, as `Engine.generate` takes it.
    """
    engines = [load(depth) for depth in depths]
    taken: list[list[float]] = [[] for _ in depths]
    for turn in range(NUM_ROUNDS + 1):
        for engine, depth, times in zip(engines, depths, taken, strict=True):
            found = _drafting(engine, depth, prompt, arguments)
            if turn:  # the first turn warms up
                times += found
    seconds = tuple(statistics.median(times) if times else 0.0 for times in taken)
    return DraftCost(tuple(depths), seconds)


def _drafting(
    engine: Engine, depth: int, prompt: Sequence[int], arguments: Mapping[str, Any]
) -> list[float]:
    """Seconds of drafting of a few steps, none of them near the answer's end."""
    recording = Engine(engine.target, Recorder(engine.drafter), walk)
    room = NUM_STEPS + depth + 2  # a tree is no deeper than what may still be said
    settings = {**arguments, "max_new_tokens": room, "trace": True}
    steps = recording.generate(list(prompt), **settings).steps
    return [step.draft_seconds for step in steps[1:NUM_STEPS]]  # the first also reads the prompt


def other_seconds(engine: Engine, prompt: Sequence[int], arguments: Mapping[str, Any]) -> float:
    """Mean seconds of a step besides drafting and the pass, over one real answer."""
    result = engine.generate(list(prompt), **arguments)
    return result.other_seconds / max(result.num_target_passes, 1)
