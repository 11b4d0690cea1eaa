"""What a data file teaches: how much of it the mask covers, and what is wrong with its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from slipstream.data.conversations import Conversation
from slipstream.data.loops import ends_in_loop
from slipstream.data.supervise import Supervised, supervise
from slipstream.errors import DataError

REASONS = (
    "no_answer",
    "template_errors",
    "empty_masks",
    "over_long",
    "truncated_answers",
    "loops",
    "skipped_turns",
)


@dataclass(slots=True)
class Coverage:
    """Counts over the rows of a file.

    Args:
        rows: rows seen.
        tokens: their tokens, cut to the length limit.
        supervised_tokens: tokens to be predicted.
        counts: rows by reason, see `REASONS`; `skipped_turns` counts answers.
        template_modes: rows by how their mask was made.
        first_error: what the first row whose template fails says.
        shown: the first rows, to look at.
    """

    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(REASONS, 0)))
    template_modes: Counter[str] = field(default_factory=Counter)
    first_error: str | None = None
    shown: list[tuple[Conversation, Supervised]] = field(default_factory=list)

    @property
    def unmasked_share(self) -> float:
        """Supervised tokens over all tokens."""
        return self.supervised_tokens / self.tokens if self.tokens else 0.0

    def add(self, row: Conversation, made: Supervised) -> None:
        """Count one row."""
        self.tokens += len(made.tokens)
        self.supervised_tokens += made.num_supervised
        self.template_modes[made.template_mode] += 1
        self.counts["empty_masks"] += made.num_supervised == 0
        self.counts["over_long"] += made.is_truncated
        self.counts["truncated_answers"] += row.finish == "length"
        self.counts["skipped_turns"] += made.num_skipped_turns
        self.counts["loops"] += ends_in_loop(row.response_ids or _last_run(made))


def survey(
    rows: Iterable[Conversation],
    tokenizer: Any,
    *,
    max_length: int,
    last_turn_only: bool = False,
    num_shown: int = 3,
) -> Coverage:
    """Supervise every row and count.

    Args:
        rows: the file's.
        tokenizer: the target's.
        max_length: tokens kept of a row.
        last_turn_only: mark the last answer only.
        num_shown: rows to keep for looking at.
    """
    coverage = Coverage()
    for row in rows:
        coverage.rows += 1
        if not row.has_answer:
            coverage.counts["no_answer"] += 1
            continue
        try:
            made = supervise(row, tokenizer, max_length=max_length, last_turn_only=last_turn_only)
        except DataError as error:
            coverage.counts["template_errors"] += 1
            coverage.first_error = coverage.first_error or str(error)
            continue
        coverage.add(row, made)
        if len(coverage.shown) < num_shown:
            coverage.shown.append((row, made))
    return coverage


def _last_run(made: Supervised) -> list[int]:
    """The last answer's tokens."""
    end = len(made.mask)
    while end and not made.mask[end - 1]:
        end -= 1
    start = end
    while start and made.mask[start - 1]:
        start -= 1
    return made.tokens[start:end]
