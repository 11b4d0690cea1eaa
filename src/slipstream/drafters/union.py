"""Two drafters in one pass: their trees are merged, common prefixes once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slipstream.drafters.protocol import Drafter, Row
from slipstream.errors import SettingError
from slipstream.trees.union import union
from slipstream.types import DraftTree, Verdict


class UnionDrafter:
    """Proposes what either drafter proposes; the first one's nodes come first.

    More than two are nested: a union is a drafter.

    Args:
        first: its nodes are kept when the budget is short.
        second: fills the budget up.
        budget: drafted nodes of the merged tree at most.

    Raises:
        SettingError: budget is below 1, both drafters want features at different taps, or the
            second one wants choices (only the first one's nodes keep their numbers).
    """

    def __init__(self, first: Drafter, second: Drafter, budget: int) -> None:
        if budget < 1:
            raise SettingError("budget", budget, "1 or more")
        if first.taps and second.taps and first.taps != second.taps:
            raise SettingError(
                "taps", f"{first.taps} and {second.taps}", "the same, or one drafter without"
            )
        if getattr(second, "wants_choices", False):
            raise SettingError("second drafter", second.name, "one that learns from its path alone")
        self.wants_choices = getattr(first, "wants_choices", False)
        self.name = f"{first.name}+{second.name}"
        self.taps = first.taps or second.taps
        self.rests_threads = all(getattr(d, "rests_threads", False) for d in (first, second))
        self._parts = (first, second)
        self._budget = budget

    def open(self, row: Row, features: Tensor | None) -> None:
        """Open the row in both."""
        for drafter in self._parts:
            drafter.open(row, features if drafter.taps else None)

    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        """The merged trees."""
        first, second = (drafter.propose(rows) for drafter in self._parts)
        return [
            union([one, other], min(self._budget, row.max_nodes)) if row.max_nodes else one
            for row, one, other in zip(rows, first, second, strict=True)
        ]

    def read_choices(self, row: Row, choices: Tensor) -> None:
        """Tell the first; its nodes lead the merged tree in its own order."""
        self._parts[0].read_choices(row, choices)

    def observe(self, row: Row, verdict: Verdict, features: Tensor | None) -> None:
        """Tell both; paths are told by tokens and features, not by node numbers."""
        for drafter in self._parts:
            drafter.observe(row, verdict, features if drafter.taps else None)

    def close(self, row: Row) -> None:
        """Close the row in both."""
        for drafter in self._parts:
            drafter.close(row)
