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
from slipstream.errors import SettingError
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
    prompts: Sequence[Sequence[int]],
    arguments: Mapping[str, Any],
) -> DraftCost:
    """Median seconds of drafting at each depth, the depths taking turns.

    Args:
        load: gives the engine that drafts to a depth.
        depths: ascending.
        prompts: token ids of each; the later ones are asked where the earlier ones' answers are
            too short.
        arguments: sampling, as `Engine.generate` takes it.

    Raises:
        SettingError: no answer is long enough to draft in.
    """
    engines = [load(depth) for depth in depths]
    taken: list[list[float]] = [[] for _ in depths]
    for turn in range(NUM_ROUNDS + 1):
        for engine, depth, times in zip(engines, depths, taken, strict=True):
            found = _drafting(engine, depth, prompts, arguments)
            if turn:  # the first turn warms up
                times += found
    if not all(taken):
        raise SettingError(
            "prompts",
            f"{len(prompts)} whose answers end within two steps",
            "one with a longer answer, in which drafting can be timed",
            "give other --prompts or --tasks",
        )
    return DraftCost(tuple(depths), tuple(statistics.median(times) for times in taken))


def _drafting(
    engine: Engine, depth: int, prompts: Sequence[Sequence[int]], arguments: Mapping[str, Any]
) -> list[float]:
    """Seconds of drafting of a few steps, none of them near the longest possible answer's end."""
    recording = Engine(engine.target, Recorder(engine.drafter), walk)
    room = NUM_STEPS + depth + 2  # a tree is no deeper than what may still be said
    settings = {**arguments, "max_new_tokens": room, "trace": True}
    taken: list[float] = []
    for prompt in prompts:
        steps = recording.generate(list(prompt), **settings).steps
        taken += [step.draft_seconds for step in steps[1:]]  # the first also reads the prompt
        if len(taken) >= NUM_STEPS - 1:
            break
    return taken[: NUM_STEPS - 1]


def other_seconds(
    engine: Engine, prompts: Sequence[Sequence[int]], arguments: Mapping[str, Any]
) -> float:
    """Mean seconds of a step besides drafting and the pass, over the first answers of some steps.

    Args:
        engine: drafts as it would.
        prompts: token ids of each; the later ones are asked where the earlier ones' answers are
            too short.
        arguments: of `Engine.generate`.
    """
    seconds, num_passes = 0.0, 0
    for prompt in prompts:
        result = engine.generate(list(prompt), **arguments)
        seconds += result.other_seconds
        num_passes += result.num_target_passes
        if num_passes >= NUM_STEPS:
            break
    return seconds / max(num_passes, 1)
