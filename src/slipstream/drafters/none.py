"""Drafts nothing: plain decoding through the same loop, the baseline of every speed-up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slipstream.drafters.protocol import Row
from slipstream.types import DraftTree, Verdict


class NoDrafter:
    """Every tree is the root alone, so each pass emits the target's next token."""

    name = "none"
    taps: tuple[int, ...] = ()
    rests_threads = True

    def open(self, row: Row, features: Tensor | None) -> None:
        """Nothing to remember."""

    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        """The roots."""
        return [DraftTree.chain(row.tokens[-1:]) for row in rows]

    def observe(self, row: Row, verdict: Verdict, features: Tensor | None) -> None:
        """Nothing to learn."""

    def close(self, row: Row) -> None:
        """Nothing to forget."""
