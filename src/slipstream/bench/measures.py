"""What a bench says about answers: accepted length, acceptance, rates, intervals, efficiency.

All functions take `Sample`s (one answer of one method) and pool over answers: a rate is a sum
of tokens over a sum of seconds, never a mean of rates. Decoding rates leave the prefill and the
token it gives out of both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 1000
LEVEL = 0.95
PERCENTS = (50, 90, 99)
SEED = 0

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of one method, as measured.

    Args:
        prompt_index: which prompt of the task; pairs methods with each other.
        token_ids: the answer, stopping rules applied.
        num_target_passes: passes after prefill.
        reach: per depth, share of passes whose node at that depth was accepted.
        prefill_seconds: up to the first token.
        draft_seconds: drafting, after prefill.
        target_seconds: target passes after prefill.
        other_seconds: everything else after prefill, time between the steps included.
        finish_reason: "stop", "length" or "error".
        is_loop: the answer ends in a repetition loop.
    """

    prompt_index: int
    token_ids: tuple[int, ...]
    num_target_passes: int
    reach: tuple[float, ...]
    prefill_seconds: float
    draft_seconds: float
    target_seconds: float
    other_seconds: float
    finish_reason: str = "length"
    is_loop: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, the first one (which prefill gives) included."""
        return len(self.token_ids)

    @property
    def num_decoded(self) -> int:
        """Tokens emitted after prefill."""
        return max(len(self.token_ids) - 1, 0)

    @property
    def decode_seconds(self) -> float:
        """Seconds after prefill."""
        return self.draft_seconds + self.target_seconds + self.other_seconds


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 else None


def tau(samples: Sequence[Sample]) -> float | None:
    """Emitted tokens after the first, per target pass after prefill; the bonus counts.

    None when no answer needed a pass. The number of *drafted* tokens accepted per pass is one
    less. Counts come from the emitted ids, so tokens behind an end of answer never count.
    """
    return _ratio(sum(s.num_decoded for s in samples), sum(s.num_target_passes for s in samples))


def reach(samples: Sequence[Sample]) -> list[float]:
    """reach[i] = share of all passes whose node at depth i + 1 was accepted."""
    passes = sum(s.num_target_passes for s in samples)
    if not passes:
        return []
    counts = [0.0] * max((len(s.reach) for s in samples), default=0)
    for sample in samples:
        for depth, share in enumerate(sample.reach):
            counts[depth] += share * sample.num_target_passes
    while counts and counts[-1] == 0:
        counts.pop()
    return [count / passes for count in counts]


def alpha(reached: Sequence[float]) -> list[float]:
    """alpha[i] = P(depth i + 1 accepted given depth i accepted), from `reach`.

    Example:
        >>> alpha([0.5, 0.25])
        [0.5, 0.5]
    """
    before = [1.0, *reached]
    return [r / b for r, b in zip(reached, before, strict=False) if b > 0]


def decode_rate(samples: Sequence[Sample]) -> float | None:
    """Tokens per second after prefill."""
    return _ratio(sum(s.num_decoded for s in samples), sum(s.decode_seconds for s in samples))


def whole_rate(samples: Sequence[Sample]) -> float | None:
    """Tokens per second, prefill included."""
    seconds = sum(s.prefill_seconds + s.decode_seconds for s in samples)
    return _ratio(sum(s.num_tokens for s in samples), seconds)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99 of some values; None without values.

    Example:
        >>> percentiles([1.0, 2.0, 3.0])["p50"]
        2.0
    """
    if not values:
        return None
    found = np.quantile(np.asarray(values, float), [percent / 100 for percent in PERCENTS])
    return {f"p{percent}": float(value) for percent, value in zip(PERCENTS, found, strict=True)}


def prefill_latency(samples: Sequence[Sample]) -> dict[str, float] | None:
    """Percentiles over answers of the seconds from prompt to first token."""
    return percentiles([s.prefill_seconds for s in samples])


def token_latency(samples: Sequence[Sample]) -> dict[str, float] | None:
    """Percentiles over answers of the mean seconds per token after the first."""
    return percentiles([s.decode_seconds / s.num_decoded for s in samples if s.num_decoded])


def speedup(samples: Sequence[Sample], plain: Sequence[Sample]) -> float | None:
    """Decoding rate over plain decoding's, same prompts, same run."""
    fast, slow = decode_rate(samples), decode_rate(plain)
    return fast / slow if fast is not None and slow else None


def resamples(count: int) -> np.ndarray:
    """[NUM_RESAMPLES, count] int64, prompts drawn with replacement, the same on every call."""
    return np.random.default_rng(SEED).integers(0, count, size=(NUM_RESAMPLES, count))


def interval(values: np.ndarray) -> Interval | None:
    """The middle 95% of resampled values that are finite; None without any."""
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def resampled_ratio(above: Sequence[float], below: Sequence[float], draw: np.ndarray) -> np.ndarray:
    """[NUM_RESAMPLES] pooled ratio of two per-answer sums, for every row of `draw`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(above, float)[draw].sum(1) / np.asarray(below, float)[draw].sum(1)


def tau_interval(samples: Sequence[Sample]) -> Interval | None:
    """95% bootstrap interval of `tau` over prompts; None below two prompts."""
    if len(samples) < 2:
        return None
    draw = resamples(len(samples))
    emitted = [s.num_decoded for s in samples]
    return interval(resampled_ratio(emitted, [s.num_target_passes for s in samples], draw))


def speedup_interval(samples: Sequence[Sample], plain: Sequence[Sample]) -> Interval | None:
    """95% paired bootstrap interval of `speedup`: both methods on the same drawn prompts.

    Args:
        samples: of the method, in the order of `plain`.
        plain: of plain decoding, one per sample.
    """
    assert [s.prompt_index for s in samples] == [s.prompt_index for s in plain], "paired"
    if len(samples) < 2:
        return None
    draw = resamples(len(samples))
    rates = [
        resampled_ratio([s.num_decoded for s in of], [s.decode_seconds for s in of], draw)
        for of in (samples, plain)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        return interval(rates[0] / rates[1])


@dataclass(frozen=True, slots=True)
class Cost:
    """Where a method's decoding time goes, per target pass.

    Args:
        draft_seconds: drafting per pass.
        target_seconds: mean target pass, t(n).
        other_share: time outside drafting and target passes, share of decoding time.
    """

    draft_seconds: float
    target_seconds: float
    other_share: float

    @property
    def cost_ratio(self) -> float:
        """Drafting over the target pass, dimensionless."""
        return self.draft_seconds / self.target_seconds if self.target_seconds else 0.0


def cost(samples: Sequence[Sample]) -> Cost | None:
    """Mean cost of a pass; None when no answer needed one."""
    passes = sum(s.num_target_passes for s in samples)
    seconds = sum(s.decode_seconds for s in samples)
    if not passes or not seconds:
        return None
    return Cost(
        draft_seconds=sum(s.draft_seconds for s in samples) / passes,
        target_seconds=sum(s.target_seconds for s in samples) / passes,
        other_share=sum(s.other_seconds for s in samples) / seconds,
    )


def efficiency(samples: Sequence[Sample], plain: Sequence[Sample]) -> float | None:
    """Measured speed-up over tau * t(1) / (t(n) + draft time), the most the passes allow.

    t(1) is plain decoding's measured pass, t(n) the method's. Below 1 by what the loop itself
    costs; plain decoding's own overhead counts against it too, so values above 1 can occur.
    """
    mine, one, gain, length = cost(samples), cost(plain), speedup(samples, plain), tau(samples)
    if mine is None or one is None or gain is None or length is None or not one.target_seconds:
        return None
    possible = length * one.target_seconds / (mine.target_seconds + mine.draft_seconds)
    return gain / possible
