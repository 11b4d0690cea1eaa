"""How much to draft under load: what has given the most tokens per second with so many rows.

Wider passes cost more the more rows share them, drafting costs too, and what is accepted depends on
the texts. All three show in one number, the tokens per second of a step, so that is measured: for
each number of rows, widths are tasted, those that are not hopeless are tried, the best is used, and
now and then a neighbour of it is tried again, less often the longer the best stays the best and the
more the trials lose. Zero is one of the widths. Few rows begin with the widest, many, for whom that
would be dear, with the narrowest: each further node is accepted less often and costs no less, so
among widths that draft the rate has one peak, and beyond it nothing is tasted. A width is chosen
before anything is drafted, and keyed noise makes answers independent of it.

A drafter that has rested reads all it has missed when it drafts next: the prompt, or hundreds of
tokens. That step says nothing about its width, so it does not count, and a trial goes on for some
steps after it.

Paper: Liu et al. 2024, SmartSpec, arXiv:2406.14066 (goodput decides the length under load).
Differs: goodput is measured for each width, not predicted from a cost model and acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass

TASTE = 2  # steps before a width may be hopeless: with many rows, a wide one costs many narrow ones
CROWD = 8  # rows whose steps tell a width from another after so few, and for whom width is dear
PEAKED = 0.85  # of the rate of the next narrower width: the peak is behind
HOPELESS = 0.7  # of the best width's tokens per second
TRIALS = 8  # steps before a width is judged
PERIOD = 32  # of so many steps one tries a neighbour of the best width, at first
LONGEST = 1024  # steps between such trials when nothing has changed for long
SHARE = 0.01  # of the time that trials may lose; one that is due before LONGEST waits for that
TRIAL = 3  # steps of such a trial; in the first of them a drafter may have to catch up
FORGET = 0.98  # weight of what was seen, one step later


@dataclass(slots=True)
class Seen:
    """What a width has given: decayed sums."""

    tokens: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0  # steps the sums stand for
    num_steps: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        """Count one step."""
        self._fade(FORGET)
        self.tokens += tokens
        self.seconds += seconds
        self.weight += 1
        self.num_steps += 1

    def age(self, most: int) -> None:
        """Weigh what was seen long ago like so many steps at most, so that new ones tell."""
        self._fade(min(1.0, most / max(self.weight, 1.0)))

    def _fade(self, share: float) -> None:
        self.tokens *= share
        self.seconds *= share
        self.weight *= share

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Trials:
    """When to try a neighbour of the best width again: ever later while the best stays the same."""

    best: int = -1
    period: int = PERIOD
    num_steps: int = 0
    goes_up: bool = False
    tried: int = -1
    num_left: int = 0
    debt: float = 0.0  # seconds that other widths than the best have lost, not made up for yet

    def pay(self, seconds: float, lost: float) -> None:
        """Count a step's time, and what it lost beside the best width."""
        self.debt = self.debt + lost if lost else max(0.0, self.debt - SHARE * seconds)

    def choose(self, best: int, num_widths: int) -> int:
        """Count a step; the width it should have: the best, or for some steps a neighbour.

        Args:
            best: its place among the widths.
            num_widths: how many there are; at either end only one neighbour is left to try.
        """
        if best != self.best:
            self.best, self.period, self.num_steps, self.num_left = best, PERIOD, 0, 0
            self.debt = 0.0  # there is something to be found
        if self.num_left:
            self.num_left -= 1
            return min(self.tried, num_widths - 1)
        self.num_steps += 1
        waits = self.debt > 0 and self.num_steps < LONGEST
        if self.num_steps < self.period or waits or num_widths == 1:
            return best
        self.period, self.num_steps = min(2 * self.period, LONGEST), 0
        self.goes_up = best == 0 or (best < num_widths - 1 and not self.goes_up)
        self.tried, self.num_left = best + (1 if self.goes_up else -1), TRIAL - 1
        return self.tried


class Throttle:
    """Chooses the drafted nodes a row may have in the next step.

    Args:
        widest: nodes of the drafter's whole tree.
        pass_tokens: tokens of one pass at most, roots included; None sets no bound.

    Example:
        >>> throttle = Throttle(8)
        >>> seconds = {8: 4.0, 4: 2.0, 2: 1.0, 1: 1.0, 0: 1.0}
        >>> chosen = []
        >>> for _ in range(29):
        ...     width = throttle.choose(16)
        ...     throttle.note(16, width, tokens=16 + width, seconds=seconds[width])
        ...     chosen.append(width)
        >>> {width: chosen.count(width) for width in seconds}
        {8: 0, 4: 2, 2: 11, 1: 8, 0: 8}
    """

    def __init__(self, widest: int, pass_tokens: int | None = None) -> None:
        sizes = [1 << power for power in range(widest.bit_length()) if 1 << power < widest]
        self._widths = sorted({0, *sizes, widest})
        self._pass_tokens = pass_tokens
        self._seen: dict[int, dict[int, Seen]] = {}
        self._trials: dict[int, Trials] = {}
        self._has_skipped = False

    def choose(self, num_rows: int) -> int:
        """Nodes for each of so many rows."""
        widths = [width for width in self._widths if width <= self._most(num_rows)]
        seen = self._of(num_rows)
        is_crowd = num_rows >= CROWD
        for index, width in enumerate(widths if is_crowd else (widths[-1], *widths[:-1])):
            if seen[width].num_steps < TASTE:
                return width
            if is_crowd and index > 1 and seen[width].rate < PEAKED * seen[widths[index - 1]].rate:
                break
        best = max(widths, key=lambda width: seen[width].rate)
        for width in widths:
            hopes = seen[width].rate >= HOPELESS * seen[best].rate
            if hopes and seen[width].num_steps < TRIALS:
                return width
        trials = self._trials_of(num_rows)
        width = widths[trials.choose(widths.index(best), len(widths))]
        if width != best and trials.num_left == TRIAL - 1:
            seen[width].age(TASTE if is_crowd else TRIALS)
        return width

    def note(
        self, num_rows: int, width: int, *, tokens: int, seconds: float, catches_up: bool = False
    ) -> None:
        """A step of so many rows with this width gave so many tokens in so long.

        Args:
            num_rows: of the step.
            width: that was chosen for it.
            tokens: all rows' together.
            seconds: it took.
            catches_up: a drafter that has rested first read what it had missed. Where that
                happens in step after step, because new rows keep coming, it belongs to the price
                of drafting: every other such step counts.
        """
        seen, trials = self._of(num_rows), self._trials_of(num_rows)
        best = max(seen, key=lambda each: seen[each].rate)
        is_worse = width != best and seen[best].rate > 0
        lost = seconds - tokens / seen[best].rate if is_worse else 0.0
        trials.pay(seconds, max(0.0, lost))
        self._has_skipped = catches_up and not self._has_skipped
        if not self._has_skipped:
            seen[width].add(tokens, seconds)

    def _most(self, num_rows: int) -> int:
        if self._pass_tokens is None:
            return self._widths[-1]
        return max(0, self._pass_tokens // num_rows - 1)

    def _trials_of(self, num_rows: int) -> Trials:
        return self._trials.setdefault(_kind(num_rows), Trials())

    def _of(self, num_rows: int) -> dict[int, Seen]:
        """What was seen with about so many rows."""
        return self._seen.setdefault(_kind(num_rows), {width: Seen() for width in self._widths})


def _kind(num_rows: int) -> int:
    """Numbers of rows that count as one: 1, 2, 3 to 4, 5 to 8, and so on."""
    return (num_rows - 1).bit_length()
