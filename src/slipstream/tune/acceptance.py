"""What would have been accepted: one recorded run answers for every smaller tree.

A drafter is asked at every position of an answer and nothing of it is verified, so the answer is
plain decoding's and every position has a tree. With a rule that follows the target's own tokens
(`walk`), what a tree is worth can then be read off the answer. A smaller tree is part of a larger
one, so decoding with it can be replayed without a model: look up how far its nodes agree with the
answer, jump there, repeat. This is exact for the prompts that were recorded, greedy and keyed.

Paper: Chen et al. 2024, Sequoia, arXiv:2402.12374 (acceptance measured once, trees chosen by it).
Differs: steps are replayed where they would fall, so acceptance may depend on context and depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from slipstream.bench.calibration import Judged
from slipstream.drafters.protocol import Drafter, Row
from slipstream.errors import SettingError
from slipstream.types import DraftTree, Verdict
from slipstream.verify.walk import follow

NO_TOKEN = -1  # what the target says after the end of a recorded answer


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer with the tree that was drafted at each of its positions.

    Args:
        tokens: prompt and answer.
        start: index of the first root, the answer's first token.
        trees: trees[i] is rooted at tokens[start + i].
    """

    tokens: tuple[int, ...]
    start: int
    trees: tuple[DraftTree, ...]

    def judged(self) -> list[Judged]:
        """Every tree with the path of it that the answer takes."""
        return [(tree, self._verdict(place, tree)) for place, tree in enumerate(self.trees)]

    def _verdict(self, place: int, tree: DraftTree) -> Verdict:
        depths, root = tree.depths.tolist(), self.start + place

        def said(node: int) -> int:
            at = root + depths[node] + 1
            return self.tokens[at] if at < len(self.tokens) else NO_TOKEN

        return follow(tree, said)


class Recorder:
    """A drafter that lets another one draft at every position, keeps its trees, proposes nothing.

    Args:
        drafter: who drafts.

    Raises:
        SettingError: the drafter learns from verified trees, so it cannot be asked in vain.
    """

    def __init__(self, drafter: Drafter) -> None:
        if getattr(drafter, "wants_choices", False):
            raise SettingError(
                "drafter", drafter.name, "one whose drafts do not depend on what was verified"
            )
        self.name, self.taps = drafter.name, drafter.taps
        self.rests_threads = getattr(drafter, "rests_threads", False)
        self._drafter = drafter
        self._done: dict[int, Recording] = {}
        self._trees: dict[int, list[DraftTree]] = {}

    @property
    def recordings(self) -> list[Recording]:
        """Finished answers, in the order in which their prompts were given."""
        return [self._done[key] for key in sorted(self._done)]

    def open(self, row: Row, features: Tensor | None) -> None:
        """Open the row in the drafter."""
        self._trees[row.key] = []
        self._drafter.open(row, features)

    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        """The roots alone; the drafter's trees are kept."""
        for row, tree in zip(rows, self._drafter.propose(rows), strict=True):
            self._trees[row.key].append(tree)
        return [DraftTree.chain([row.tokens[-1]]) for row in rows]

    def observe(self, row: Row, verdict: Verdict, features: Tensor | None) -> None:
        """Tell the drafter what was committed: the root."""
        self._drafter.observe(row, verdict, features)

    def close(self, row: Row) -> None:
        """File the answer."""
        trees = self._trees.pop(row.key, [])
        start = len(row.tokens) - 1 - len(trees)
        self._done[row.key] = Recording(tuple(row.tokens), start, tuple(trees))
        self._drafter.close(row)


class Position:
    """A recorded tree and the answer's way through it, ready to be cut to any smaller tree.

    Args:
        tree: as drafted.
        verdict: the path of it that the answer takes.
    """

    def __init__(self, tree: DraftTree, verdict: Verdict) -> None:
        self._depths = tree.depths[1:].numpy()  # [N - 1], root left out from here on
        self._joint = -self._depths.astype(float)  # of drafters without scores: the shallow first
        self._path = [node - 1 for node in verdict.path[1:]]
        self._orders: dict[int, list[int]] = {}
        parents = tree.parents.tolist()
        if tree.log_probs is not None:
            given = tree.log_probs.double().nan_to_num(0.0).tolist()
            joint = [0.0] * len(tree)
            for node in range(1, len(tree)):
                joint[node] = joint[parents[node]] + given[node]
            self._joint = np.array(joint[1:])
        self._chain: list[int] = []  # the first child, its first child, ...
        newest = 0
        for node in range(1, len(tree)):
            if parents[node] == newest:
                self._chain.append(node - 1)
                newest = node

    def chain(self, depth: int) -> tuple[int, int]:
        """(drafted, accepted) nodes of the first children down to a depth."""
        size = min(depth, len(self._chain))
        accepted = 0
        for mine, said in zip(self._chain[:size], self._path, strict=False):
            if mine != said:
                break
            accepted += 1
        return size, accepted

    def best(self, budget: int, depth: int) -> tuple[int, int]:
        """(drafted, accepted) nodes of the `budget` most probable ones down to a depth."""
        within = self._depths <= depth
        if depth not in self._orders:
            joint, orders = self._joint[within], []
            indices = np.flatnonzero(within)
            for node in self._path[:depth]:
                better = joint > self._joint[node]
                equal = (joint == self._joint[node]) & (indices < node)
                orders.append(int(better.sum() + equal.sum()))
            self._orders[depth] = orders
        accepted = sum(order < budget for order in self._orders[depth])
        return min(budget, int(within.sum())), accepted


@dataclass(frozen=True, slots=True)
class Replayed:
    """What decoding with some trees would have been.

    Args:
        tau: tokens per pass, the target's own included.
        widths: tokens in a pass, root included, to the number of such passes.
    """

    tau: float
    widths: Counter[int]

    @property
    def num_passes(self) -> int:
        """Target passes after prefill."""
        return self.widths.total()

    def mean(self, cost: Callable[[int], float]) -> float:
        """Mean of a cost over the passes."""
        total = sum(count * cost(width) for width, count in self.widths.items())
        return total / self.num_passes if self.num_passes else 0.0


Answer = Sequence[Position]
"""The positions of one recorded answer."""

Cut = Callable[[int, int], tuple[int, int]]
"""(answer, position in it) to the (drafted, accepted) nodes there."""


def positions(recordings: Sequence[Recording]) -> list[list[Position]]:
    """Recorded answers, ready to be cut."""
    return [[Position(*each) for each in recording.judged()] for recording in recordings]


def replay(lengths: Sequence[int], cut: Cut) -> Replayed:
    """Decode recorded answers again with the trees that `cut` leaves.

    Args:
        lengths: positions of each answer.
        cut: drafted and accepted nodes at a position.

    Example:
        >>> found = replay([6], lambda answer, position: (3, 1))
        >>> found.tau, dict(found.widths)
        (2.0, {4: 3})
    """
    widths: Counter[int] = Counter()
    for answer, length in enumerate(lengths):
        at = 0
        while at < length:
            drafted, accepted = cut(answer, at)
            widths[drafted + 1] += 1
            at += accepted + 1
    passes = widths.total()
    return Replayed(sum(lengths) / passes if passes else 1.0, widths)


def united(first: Cut, second: Cut) -> Cut:
    """Both trees merged: as far as the better one; nodes they are known to share count once."""

    def cut(answer: int, position: int) -> tuple[int, int]:
        drafted, accepted = first(answer, position)
        more, also = second(answer, position)
        return drafted + more - min(accepted, also), max(accepted, also)

    return cut


def is_recordable(drafter: Drafter) -> bool:
    """True when a drafter's trees do not depend on earlier verified trees."""
    return not getattr(drafter, "wants_choices", False)
