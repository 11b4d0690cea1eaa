"""Is this setup lossless on this machine? One method's tokens against plain decoding's.

Greedy and keyed sampling alike: the tokens must be equal. Plain decoding runs one row at a time,
in passes of one token; the method runs in batches as asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.bench.equality import Divergence, Judge, is_reduced, verdict
from slipstream.bench.runner import Generates

Ids = Sequence[int]
GROUPS_OF_ROWS = 2  # prompts per call, in batches, so that rows are refilled within a call


@dataclass(frozen=True, slots=True)
class LosslessReport:
    """What `verify` found.

    Args:
        verdict: lossless, ties, different or inconclusive; see `equality.verdict`.
        mode: greedy or keyed.
        num_prompts: answered.
        num_tokens: compared: up to an answer's first difference, that token included.
        num_divergent: answers that differ somewhere.
        divergences: their first differences.
        tau: of the method, emitted tokens per pass.
        tie_margin: largest margin of a tie; None when nothing had to be judged.
        num_errors: answers of either side that ended in an error.
    """

    verdict: str
    mode: str
    num_prompts: int
    num_tokens: int
    num_divergent: int
    divergences: tuple[Divergence, ...]
    tau: float | None
    tie_margin: float | None
    num_errors: int = 0

    @property
    def is_lossless(self) -> bool:
        """True for the verdicts that exit with 0."""
        return self.verdict in ("lossless", "ties")

    def to_dict(self) -> dict[str, object]:
        """The JSON value; an infinite margin is null."""
        value = asdict(self)
        for each in value["divergences"]:
            each["margin"] = each["margin"] if each["margin"] != float("inf") else None
        return value


def answers(
    engine: Generates,
    prompts: Sequence[Ids],
    arguments: Mapping[str, Any],
    *,
    on_done: Callable[[int], None] = lambda count: None,
) -> list[Any]:
    """The engine's results for all prompts, a few batches per call.

    Args:
        engine: plain or speculative.
        prompts: token ids.
        arguments: of `Engine.generate`, `num_rows` included.
        on_done: told how many prompts were finished by a call.
    """
    size = arguments["num_rows"] * GROUPS_OF_ROWS
    results: list[Any] = []
    for start in range(0, len(prompts), size):
        group = [list(ids) for ids in prompts[start : start + size]]
        results += engine.generate(group, **arguments)
        on_done(len(group))
    return results


def compare_answers(
    prompts: Sequence[Ids], plain: Sequence[Any], results: Sequence[Any], judge: Judge
) -> LosslessReport:
    """Compare a method's results with plain decoding's.

    Args:
        prompts: token ids.
        plain: plain decoding's results, or anything with token_ids and finish_reason.
        results: the method's.
        judge: of the target's precision.
    """
    found, num_tokens, num_errors = [], 0, 0
    for index, (ids, one, other) in enumerate(zip(prompts, plain, results, strict=True)):
        if "error" in (one.finish_reason, other.finish_reason):
            num_errors += 1
            continue
        divergence = judge.judge(index, ids, one.token_ids, other.token_ids)
        if divergence is None:
            num_tokens += len(one.token_ids)
        else:
            num_tokens += divergence.position + 1
            found.append(divergence)
    passes = sum(result.num_target_passes for result in results)
    emitted = sum(max(len(result.token_ids) - 1, 0) for result in results)
    word = verdict(found, num_tokens, is_exact=not is_reduced(judge.dtype))
    if num_errors and word != "different":
        word = "inconclusive"
    return LosslessReport(
        verdict=word,
        mode="greedy" if judge.sampling.is_greedy else "keyed",
        num_prompts=len(prompts),
        num_tokens=num_tokens,
        num_divergent=len(found),
        divergences=tuple(found),
        tau=emitted / passes if passes else None,
        tie_margin=judge.limit() if found else None,
        num_errors=num_errors,
    )
