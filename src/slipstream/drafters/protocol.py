"""What the loop asks of a drafter, and what a drafter may see of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Verdict


class Row(Protocol):
    """A request as a drafter sees it. Read only.

    Attributes:
        key: identifies the row from `open` to `close`; never reused within an engine.
        tokens: committed tokens, prompt included; the last one is the root.
        max_depth: deepest node worth drafting now (0: draft nothing), from the tokens the
            request may still emit and the room in the cache.
        max_nodes: drafted nodes that fit the cache now.
        stop_ids: ids that end the answer.
        sampler: the request's warp and keyed noise.
    """

    key: int
    tokens: list[int]
    max_depth: int
    max_nodes: int
    stop_ids: frozenset[int]
    sampler: Sampler


class Drafter(Protocol):
    """Proposes a tree of tokens per row. State per row lives between `open` and `close`.

    A drafter that learns from the target's opinion of all its nodes (Lookahead) says so with an
    attribute `wants_choices = True` and gets, before each `observe`, a call of
    `read_choices(row, choices)`: choices [N] int64 is the target's likeliest token at each node.

    A drafter that has no use for torch's threads, because it has no network or a compiled one, says
    so with `rests_threads = True`.

    Attributes:
        name: for tables and errors.
        taps: indices into the target's hidden states whose features it wants, possibly empty.
    """

    name: str
    taps: tuple[int, ...]

    def open(self, row: Row, features: Tensor | None) -> None:
        """A row was prefilled and its first token emitted.

        Args:
            row: `row.tokens` holds the prompt and the first emitted token (the root).
            features: [S, K*D] at the taps, for every position but the root's; None without taps.
        """

    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        """One tree per row, each rooted at the row's last token.

        A tree may be the root alone. Depth and nodes must respect `row.max_depth` and
        `row.max_nodes`. Not called for a step in which load leaves no row a node, unless the
        drafter wants choices.
        """

    def observe(self, row: Row, verdict: Verdict, features: Tensor | None) -> None:
        """The row's tree was verified and its path committed.

        Args:
            row: the row, after acceptance: `row.tokens` ends with the new root.
            verdict: what was kept, stopping rules not applied (a stopped row is closed instead).
            features: [1 + num_accepted, K*D] of the path's nodes, root first; None without taps.
        """

    def close(self, row: Row) -> None:
        """The row is over; forget it. Also called for rows that were never opened."""
