"""Lookahead decoding: the target drafts for itself, in the same pass that verifies.

Paper: Fu et al. 2024, Lookahead decoding, arXiv:2402.02057, sections 3 and 4.
Differs: both branches are one draft tree, equal prefixes merged, so window tokens may be accepted
too; a fully matched guess is followed by the target's own token (the authors' code drops it); the
pool also takes the n-grams of the row's own text as it grows; nothing is random.

The window holds guesses of the next tokens at N-1 levels of W columns; every pass turns its last
level into a new one (a Jacobi step), and each column with its prediction is an n-gram for the
pool. Level l of column c sits at position root + l + c and sees level 0 up to its column, then
its own column. That is a tree: level 0 is a chain below the root, and the other levels of column
c are a chain below its node c.

    level 0    root - a1 - a2        W = 3 columns, N = 4
    level 1     b0    b1   b2        (b1 is a child of a1)
    level 2     c0    c1   c2   ->   predictions d0 d1 d2; n-grams (root b0 c0 d0), (a1 b1 c1 d1)..

`walk` takes a node only where it is the target's own token, so nothing of this can change what
is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.drafters.protocol import Row
from slipstream.errors import SettingError
from slipstream.types import DraftTree, Verdict

STRIDE = 37  # filler tokens are taken this far apart from the text, so that they are no phrase


class NgramPool:
    """What was seen to follow a token, the most recent continuations of each.

    Args:
        length: tokens of a continuation.
        per_key: continuations kept of one token; the least recently seen goes first.
    """

    def __init__(self, length: int, per_key: int) -> None:
        self._length, self._per_key = length, per_key
        self._known: dict[int, dict[tuple[int, ...], None]] = {}
        self._num_seen = 0  # tokens of the text that began a whole n-gram

    def add(self, ngram: Sequence[int]) -> None:
        """Enter a token and its continuation, or mark them as seen again."""
        key, rest = ngram[0], tuple(ngram[1:])
        known = self._known.setdefault(key, {})
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._per_key:
            del known[next(iter(known))]

    def extend(self, tokens: Sequence[int]) -> None:
        """Enter the n-grams of a growing text that are new since the last call."""
        last = len(tokens) - self._length
        for start in range(self._num_seen, last):
            self.add(tokens[start : start + self._length + 1])
        self._num_seen = max(self._num_seen, last)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Continuations of a token, the most recently seen first."""
        return list(reversed(self._known.get(token, {})))


class Window:
    """The Jacobi window of a row.

    Args:
        num_columns: W.
        num_levels: N - 1 once it is filled; it starts with one and gains one a pass.
        filler: tokens to start from, cycled.
    """

    def __init__(self, num_columns: int, num_levels: int, filler: Sequence[int]) -> None:
        self._num_levels, self._filler, self._at = num_levels, filler, 0
        # Each pass that fills a level gives up the column that the root moves into.
        width = num_columns - 1 + num_levels - 1
        self.levels = [[self.spare() for _ in range(width)]]  # level 0 lacks column 0, the root

    @property
    def size(self) -> int:
        """Nodes it needs, the root not counted."""
        return sum(map(len, self.levels))

    @property
    def depth(self) -> int:
        """Depth of its deepest node."""
        return len(self.levels[0]) + len(self.levels) - 1

    def columns(self, root: int) -> list[list[int]]:
        """The tokens of each column, level 0 first."""
        first = [root, *self.levels[0]]
        return [list(column) for column in zip(first, *self.levels[1:], strict=True)]

    def advance(self, predictions: list[int]) -> None:
        """Take the target's predictions below the last level; the root has moved on by one."""
        levels = [*self.levels, predictions]
        if len(self.levels) < self._num_levels:
            self.levels = [level[1:] for level in levels]
        else:
            self.levels = [levels[1][1:], *levels[2:]]

    def spare(self) -> int:
        """The next filler token."""
        self._at += 1
        return self._filler[self._at * STRIDE % len(self._filler)]


@dataclass(slots=True)
class _Draft:
    """A tree under construction, in which a node is its path: equal prefixes are one node."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    index: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, node: int, tokens: Sequence[int], room: int) -> int:
        """Hang a chain below `node` as far as there is room for new nodes; its last node."""
        for token in tokens:
            known = self.index.get((node, token))
            if known is None:
                if len(self.tokens) > room:
                    break
                known = self.index[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
            node = known
        return node


@dataclass(slots=True)
class _RowState:
    """What is kept of a row between turns.

    `columns` and `last_level` (the nodes of its newest level) tell of the window within the
    newest tree; they are empty when it had no room there.
    """

    pool: NgramPool
    window: Window
    columns: list[list[int]] = field(default_factory=list)
    last_level: list[int] = field(default_factory=list)


class LookaheadDrafter:
    """Guesses from the pool and the window that feeds it, as one tree.

    W = G = (budget + 1) // (2 * depth), so that a full window and G guesses fill the budget.

    Args:
        budget: drafted nodes, window and guesses together.
        depth: tokens of a guess, N - 1. The window reaches W - 2 deeper.

    Raises:
        SettingError: depth is below 2, or the budget has no room for one column and one guess.
    """

    name = "lookahead"
    rests_threads = True
    taps: tuple[int, ...] = ()
    wants_choices = True

    def __init__(self, *, budget: int = 17, depth: int = 3) -> None:
        if depth < 2:
            raise SettingError("depth", depth, "2 or more", "a window needs two levels")
        if budget < 2 * depth - 1:
            raise SettingError(
                "budget", budget, f"{2 * depth - 1} or more at depth {depth}",
                "a window of one column and one guess need as much",
            )  # fmt: skip
        self._budget, self._depth = budget, depth
        self._width = (budget + 1) // (2 * depth)
        self._rows: dict[int, _RowState] = {}

    def open(self, row: Row, features: Tensor | None) -> None:
        """Fill pool and window from the prompt."""
        filler = [token for token in row.tokens if token not in row.stop_ids]
        window = Window(self._width, self._depth, filler or row.tokens)
        self._rows[row.key] = _RowState(NgramPool(self._depth, self._width), window)

    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        """The window where it fits whole, and guesses in the room that is left."""
        return [self._tree(row, self._rows[row.key]) for row in rows]

    def read_choices(self, row: Row, choices: Tensor) -> None:
        """One Jacobi step: predictions below the window's last level become its newest."""
        state = self._rows[row.key]
        predictions = choices[state.last_level].tolist()
        for column, prediction in zip(state.columns, predictions, strict=True):
            if len(column) == self._depth:
                state.pool.add([*column, prediction])
        if predictions:
            spare = state.window.spare
            state.window.advance([spare() if p in row.stop_ids else p for p in predictions])

    def observe(self, row: Row, verdict: Verdict, features: Tensor | None) -> None:
        """The pool reads new text when it is next asked."""

    def close(self, row: Row) -> None:
        """Forget the row."""
        self._rows.pop(row.key, None)

    def _tree(self, row: Row, state: _RowState) -> DraftTree:
        room, root, window = min(self._budget, row.max_nodes), row.tokens[-1], state.window
        draft, above = _Draft([root]), 0
        fits = window.size <= room and window.depth <= row.max_depth
        state.columns, state.last_level = window.columns(root) if fits else [], []
        for number, column in enumerate(state.columns):
            above = draft.add(above, column[:1], room) if number else 0
            state.last_level.append(draft.add(above, column[1:], room))
        state.pool.extend(row.tokens)
        for guess in state.pool.after(root):
            draft.add(0, guess[: row.max_depth], room)
        return DraftTree(torch.tensor(draft.tokens), torch.tensor(draft.parents))
