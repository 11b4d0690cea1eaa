"""What more training would bring: held-out tokens a pass against the logarithm of tokens seen.

Over a run's evaluations the mean accepted length grows about as the logarithm of the tokens seen;
the line through them says what the next half token would cost. It is a guess for planning, not a
promise: the line flattens where the data repeats or the network is full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STEP = 0.5  # tokens a pass


@dataclass(frozen=True, slots=True)
class Forecast:
    """What `STEP` more tokens a pass would take.

    Args:
        tau: at the last evaluation, by the chain on held-out text.
        per_doubling: tokens a pass won by twice the training tokens.
        tokens: training tokens to see in all.
        seconds: of training in all, at this run's pace, after features were taken.
    """

    tau: float
    per_doubling: float
    tokens: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"held-out chain tau {self.tau:.2f}, {self.per_doubling:+.2f} with each doubling of "
            f"the training tokens; {STEP:g} more would take about {self.tokens / 1e6:,.1f} million "
            f"tokens and {self.seconds / 3600:,.1f} hours of training at this pace"
        )


def forecast(records: Sequence[dict[str, Any]]) -> Forecast | None:
    """Fit a run's evaluations; None with fewer than three, or when they do not rise.

    Args:
        records: of `metrics.jsonl`.

    Example:
        >>> found = forecast([{"chain_tau": 1 + k / 10, "tokens": 1000 * 2**k, "seconds": 2.0**k}
        ...                   for k in range(4)])
        >>> round(found.per_doubling, 3), round(found.tokens)
        (0.1, 256000)
    """
    seen = [r for r in records if "chain_tau" in r and r["tokens"] > 0]
    seen = seen[len(seen) // 3 :] if len(seen) > 4 else seen  # the first rise is not the trend
    if len(seen) < 3:
        return None
    xs = [math.log2(r["tokens"]) for r in seen]
    ys = [r["chain_tau"] for r in seen]
    middle = sum(xs) / len(xs)
    spread = sum((x - middle) ** 2 for x in xs)
    slope = sum((x - middle) * y for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
    if slope <= 0:
        return None
    last = seen[-1]
    doublings = STEP / slope
    if doublings > 40:
        return None
    growth = 2.0**doublings
    return Forecast(ys[-1], slope, last["tokens"] * growth, last["seconds"] * growth)
