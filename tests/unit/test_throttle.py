"""The width that pays is found, kept, given up when it no longer pays, and zero is one."""

from __future__ import annotations

from collections import Counter

import pytest

from slipstream.engine.throttle import PERIOD, TASTE, TRIALS, Throttle


def simulate(
    throttle: Throttle,
    num_rows: int,
    cost: float,
    alpha: float,
    steps: int,
    *,
    reading: float = 0.0,
    prompt: int = 0,
) -> Counter:
    """Steps of a machine whose pass takes 1 + cost * tokens; what was chosen, late in the run.

    A drafter that drafts first reads what it has not read, `reading` seconds a token; at the start
    that is a prompt.
    """
    chosen: Counter = Counter()
    unread, has_rested = num_rows * prompt, True
    for turn in range(steps):
        width = throttle.choose(num_rows)
        accepted = sum(alpha**depth for depth in range(1, width + 1))
        seconds = 1 + cost * num_rows * (1 + width) + 0.2 * (width > 0)
        catches_up = width > 0 and has_rested
        if width:
            seconds, unread = seconds + reading * unread, 0
        has_rested, tokens = width == 0, num_rows * (1 + accepted)
        unread += tokens
        throttle.note(num_rows, width, tokens=tokens, seconds=seconds, catches_up=catches_up)
        chosen[width] += turn >= steps // 2
    return chosen


def rates(num_rows: int, cost: float, alpha: float) -> dict[int, float]:
    """Tokens per second of each width on that machine."""
    return {
        width: num_rows * (1 + sum(alpha**depth for depth in range(1, width + 1)))
        / (1 + cost * num_rows * (1 + width) + 0.2 * (width > 0))
        for width in (0, 1, 2, 4, 8, 16)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("num_rows", "cost", "best"), [(1, 0.001, 16), (1, 0.1, 4), (8, 0.05, 2), (64, 0.05, 0)]
)
def test_the_best_width_is_used_almost_always(num_rows: int, cost: float, best: int) -> None:
    alpha = 0.9 if best == 16 else 0.6
    found = rates(num_rows, cost, alpha)
    assert max(found, key=found.get) == best
    width, count = simulate(Throttle(16), num_rows, cost, alpha, 640).most_common(1)[0]
    assert width == best and count >= 320 * (1 - 1 / PERIOD) - 1


@pytest.mark.parametrize("num_rows", [1, 16])
def test_it_changes_its_mind_both_ways(num_rows: int) -> None:
    """Off can be left again though the first step after it has hundreds of tokens to read."""
    throttle, cost, best = Throttle(4), 0.01 / num_rows, []
    for alpha in (0.9, 0.0, 0.9, 0.0):
        late = simulate(
            throttle, num_rows, cost, alpha, steps=6_000, reading=0.1 / num_rows, prompt=200
        )
        best.append(late.most_common(1)[0][0])
    assert best == [4, 0, 4, 0]


@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_prompt_to_read_makes_no_width_look_bad(num_rows: int) -> None:
    """Whichever width drafts first reads the prompts; it is judged by its other steps."""
    throttle = Throttle(4)
    late = simulate(
        throttle,
        num_rows,
        0.01 / num_rows,
        alpha=0.9,
        steps=80,
        reading=0.1 / num_rows,
        prompt=1000,
    )
    assert late.most_common(1)[0][0] == 4


def test_reading_in_every_step_is_the_price_of_drafting() -> None:
    """Where new rows come all the time, their prompts are read all the time."""
    throttle, chosen = Throttle(4), Counter()
    for turn in range(400):
        width = throttle.choose(16)
        seconds = 1 + 4 * (width > 0)
        tokens = 16 * (1 + width / 2)
        throttle.note(16, width, tokens=tokens, seconds=seconds, catches_up=width > 0)
        chosen[width] += turn >= 200
    assert chosen.most_common(1)[0][0] == 0


def test_numbers_of_rows_are_judged_apart() -> None:
    throttle = Throttle(8)
    assert simulate(throttle, 32, 0.2, alpha=0.5, steps=100).most_common(1)[0][0] == 0
    assert [throttle.choose(1) for _ in range(TRIALS)] == [8] * TRIALS, "untried: widest first"


def test_a_pass_is_never_wider_than_allowed() -> None:
    throttle = Throttle(64, pass_tokens=20)
    for num_rows in (1, 3, 7, 20, 64):
        for _ in range(100):
            width = throttle.choose(num_rows)
            assert num_rows * (width + 1) <= max(20, num_rows)
            throttle.note(num_rows, width, tokens=num_rows, seconds=1.0)


def test_a_drafter_of_nothing_has_one_width() -> None:
    assert {Throttle(0).choose(n) for n in (1, 2, 9)} == {0}


def test_what_is_hopeless_is_tasted_only() -> None:
    """With many rows a wide step takes as long as many narrow ones."""
    throttle, chosen = Throttle(16), Counter()
    for _ in range(40):
        width = throttle.choose(32)
        seconds = 1 + 0.2 * 32 * (1 + width)
        throttle.note(32, width, tokens=32 * (1 + min(width, 1) / 2), seconds=seconds)
        chosen[width] += 1
    assert chosen[1] == TRIALS and chosen[2] == TASTE and chosen[0] > 20
    assert not chosen[4] and not chosen[8] and not chosen[16], "the peak was behind"


def test_few_rows_do_not_tell_where_the_peak_is() -> None:
    """One row's step is luck: every width is tasted before one is left out."""
    throttle, chosen = Throttle(16), Counter()
    for _ in range(2 * 6):
        width = throttle.choose(1)
        throttle.note(1, width, tokens=1, seconds=1.0 + width)
        chosen[width] += 1
    assert set(chosen) == {0, 1, 2, 4, 8, 16} and set(chosen.values()) == {TASTE}


def test_a_wide_tree_that_pays_is_found_behind_a_narrow_one_that_does_not() -> None:
    """A block costs the same to draft for one node as for sixteen."""
    throttle = Throttle(16)
    width, _ = simulate(throttle, 16, 0.0005, alpha=0.9, steps=300).most_common(1)[0]
    assert width == 16


def test_trials_lose_little_where_they_are_dear() -> None:
    """Sixteen rows whose drafter must read hundreds of tokens before each trial."""
    throttle, lost, whole = Throttle(8), 0.0, 0.0
    for step in range(3_000):
        width = throttle.choose(16)
        seconds = 0.02 + (0.1 if width else 0.0)
        throttle.note(16, width, tokens=16, seconds=seconds, catches_up=bool(width))
        if step > 64:  # the first tasting is done
            lost, whole = lost + seconds - 0.02, whole + seconds
    assert 0 < lost < 0.015 * whole
