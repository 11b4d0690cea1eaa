"""Prompt lookup: what followed the last few tokens the last time they occurred.

Paper: prompt lookup decoding (Saxena 2023), as in Spec-Bench, arXiv:2401.07851, section 4.
Differs: the history includes the answer, a match may run past the end of the text (it then
continues with its own draft, so a loop is drafted whole), and an index makes a step cost
microseconds at any length.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slipstream.drafters.protocol import Row
from slipstream.errors import SettingError
from slipstream.types import DraftTree, Verdict


class NgramIndex:
    """Where each n-gram of a growing text was last continued.

    Args:
        smallest: shortest n-gram.
        largest: longest n-gram, tried first.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._sizes = range(largest, smallest - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after it
        self._num_seen = 1  # tokens that were entered as a continuation, the first has none

    def extend(self, tokens: Sequence[int]) -> None:
        """Enter the tokens added since the last call."""
        for end in range(self._num_seen, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(tokens[end - size : end])] = end
        self._num_seen = max(self._num_seen, len(tokens))

    def find(self, tokens: Sequence[int]) -> int | None:
        """Index of the token that followed the longest known n-gram at the text's end."""
        for size in self._sizes:
            if size < len(tokens):
                found = self._next.get(tuple(tokens[-size:]))
                if found is not None:
                    return found
        return None


class NgramDrafter:
    """Proposes a chain copied from the row's own text.

    Args:
        budget: drafted tokens at most.
        depth: the same for a chain; the smaller counts.
        smallest: shortest n-gram that may match.
        largest: longest n-gram, tried first.

    Raises:
        SettingError: a size is below 1 or smallest is above largest.
    """

    name = "ngram"
    taps: tuple[int, ...] = ()
    rests_threads = True

    def __init__(
        self, *, budget: int = 8, depth: int = 8, smallest: int = 1, largest: int = 3
    ) -> None:
        for name, value in (("budget", budget), ("depth", depth), ("smallest n-gram", smallest)):
            if value < 1:
                raise SettingError(name, value, "1 or more")
        if largest < smallest:
            raise SettingError("largest n-gram", largest, f"{smallest} or more")
        self._length = min(budget, depth)
        self._sizes = (smallest, largest)
        self._rows: dict[int, NgramIndex] = {}

    def open(self, row: Row, features: Tensor | None) -> None:
        """Index the prompt."""
        self._index(row)

    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        """The root and what followed it last time, if it was seen."""
        return [DraftTree.chain([row.tokens[-1], *self._continue(row)]) for row in rows]

    def observe(self, row: Row, verdict: Verdict, features: Tensor | None) -> None:
        """New tokens are indexed when they are next looked at."""

    def close(self, row: Row) -> None:
        """Forget the row's index."""
        self._rows.pop(row.key, None)

    def _index(self, row: Row) -> NgramIndex:
        index = self._rows.setdefault(row.key, NgramIndex(*self._sizes))
        index.extend(row.tokens)
        return index

    def _continue(self, row: Row) -> list[int]:
        length = min(self._length, row.max_depth, row.max_nodes)
        source = self._index(row).find(row.tokens) if length > 0 else None
        if source is None:
            return []
        drafted: list[int] = []
        for at in range(source, source + length):
            past = at - len(row.tokens)
            drafted.append(row.tokens[at] if past < 0 else drafted[past])
        return drafted
