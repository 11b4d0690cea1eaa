"""Repetition loops in answers: greedy answers of small models often end in one."""

from __future__ import annotations

from collections.abc import Sequence

MIN_REPEATS = 3
MIN_TOKENS = 30
MAX_PERIOD = 64


def loop_start(tokens: Sequence[int]) -> int | None:
    """Where a closing repetition loop has said its phrase once, or None.

    A text ends in a loop of period p when its last tokens repeat every p tokens, at least three
    times and over at least 30 tokens. The place returned is after the first period, so that a
    text cut there keeps one copy of the phrase.

    Args:
        tokens: ids of an answer; a closing end-of-text token is looked past.

    Example:
        >>> loop_start([9, 8] + [1, 2, 3] * 12)
        5
        >>> loop_start(list(range(50))) is None
        True
    """
    best: int | None = None
    for end in (len(tokens), len(tokens) - 1):
        for period in range(1, min(MAX_PERIOD, end // MIN_REPEATS) + 1):
            matched = 0
            while (
                end - 1 - matched - period >= 0
                and tokens[end - 1 - matched] == tokens[end - 1 - matched - period]
            ):
                matched += 1
            covered = matched + period
            if covered >= max(MIN_TOKENS, MIN_REPEATS * period):
                start = end - covered + period
                best = start if best is None else min(best, start)
                break
        if best is not None:
            break
    return best


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """True when the tokens end in a repetition loop."""
    return loop_start(tokens) is not None
