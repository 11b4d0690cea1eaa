"""What the answers of a peer say: rates, ratios with intervals, acceptance, equality with ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slipstream.bench.measures import interval, resampled_ratio, resamples
from slipstream.target.hardware import WEIGHTS

Samples = Sequence[Mapping[str, Any]]
"""Per prompt: tokens, seconds of the whole answer, and passes where known."""


def answers(replies: Samples, eos_ids: Collection[int]) -> list[dict[str, Any]]:
    """Replies with their tokens cut where the answer ends."""
    return [{**said, "tokens": cut(said["tokens"], eos_ids)} for said in replies]


def cut(tokens: Sequence[int], eos_ids: Collection[int]) -> list[int]:
    """Tokens before the first that ends an answer: some engines return it and some do not.

    Example:
        >>> cut([5, 6, 2, 7], {2})
        [5, 6]
    """
    ends = (i for i, token in enumerate(tokens) if token in eos_ids)
    return list(tokens[: next(ends, len(tokens))])


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that two answers begin with alike."""
    places = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in places if a != b), min(len(first), len(second)))


def row(variant: str, samples: Samples, plain: Samples) -> dict[str, Any]:
    """One variant beside our plain decoding of the same prompts, which took turns with it.

    Args:
        variant: its name.
        samples: its answers.
        plain: ours.
    """
    tokens = [len(sample["tokens"]) for sample in samples]
    seconds = [sample["seconds"] for sample in samples]
    draw = resamples(len(samples))
    rates = resampled_ratio(tokens, seconds, draw)
    ours = resampled_ratio([len(s["tokens"]) for s in plain], [s["seconds"] for s in plain], draw)
    pairs = [(a["tokens"], b["tokens"]) for a, b in zip(samples, plain, strict=True)]
    return {
        "variant": variant,
        "num_prompts": len(samples),
        "num_tokens": sum(tokens),
        "tokens_per_second": sum(tokens) / sum(seconds),
        "times_our_plain": sum(tokens) / sum(seconds) / rate(plain),
        "times_our_plain_ci": interval(rates / ours) if len(samples) > 1 else None,
        "tau": tau(samples),
        "identical": sum(a == b for a, b in pairs),
        "common_share": sum(common(a, b) for a, b in pairs) / max(1, sum(len(b) for _, b in pairs)),
    }


def rate(samples: Samples) -> float:
    """Tokens per second of whole answers, prefill included."""
    return sum(len(s["tokens"]) for s in samples) / sum(s["seconds"] for s in samples)


def tau(samples: Samples) -> float | None:
    """Tokens per target pass after prefill; None where the engine does not tell."""
    if any(sample["passes"] is None for sample in samples):
        return None
    passes = sum(sample["passes"] for sample in samples)
    return sum(max(0, len(sample["tokens"]) - 1) for sample in samples) / passes if passes else None


def best_of_ours(rows: Samples, dtype: str) -> Mapping[str, Any] | None:
    """Our fastest row with weights of a type; any packed ones count for packed ones."""
    fitting = WEIGHTS if dtype in WEIGHTS else (dtype,)
    mine = [each for each in rows if each["variant"].rsplit(" ", 1)[-1] in fitting]
    return max(mine, key=lambda each: each["tokens_per_second"], default=None)


def lead(ours: Samples, dtype: str, other: Mapping[str, Any]) -> float | None:
    """Our fastest decoding over another engine's, both measured against our plain decoding.

    Args:
        ours: our rows.
        dtype: of the other's weights, and of the plain decoding it took turns with.
        other: its row.
    """
    best = best_of_ours(ours, dtype)
    plain = next((each for each in ours if each["variant"] == f"none {dtype}"), None)
    if best is None or plain is None:
        return None
    return best["tokens_per_second"] / plain["tokens_per_second"] / other["times_our_plain"]
