"""Does a drafter know when it is right? Confidence against acceptance, by depth, rank and place.

Everything here is counted from judged trees: what was drafted and which path of it was kept. A
node is *tried* when its parent was kept; only then does its own log q meet an outcome. The
*joint* confidence of a node is the product along its path, and every node has an outcome for it.

Paper: Li et al. 2024, EAGLE-2, arXiv:2406.16858, sections 3.1 and 3.2 (acceptance by place in the
tree over contexts; confidence approximates acceptance); Guo et al. 2017, arXiv:1706.04599 (ECE).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np

from slipstream.types import DraftTree, Step, Verdict

NUM_BINS = 10
MAX_PLACES = 12

Judged: TypeAlias = tuple[DraftTree, Verdict]
Place: TypeAlias = tuple[int, ...]
"""A node's place in its tree: the ranks from the root's child down to it."""


@dataclass(frozen=True, slots=True)
class Node:
    """One drafted node and what became of it.

    Args:
        place: ranks from the root's child down.
        confidence: q of the node given its parent; None where the drafter has none, as of a
            copied node.
        joint: product of the confidences along its path; None where one of them is.
        is_tried: its parent was kept.
        is_accepted: it was kept itself.
    """

    place: Place
    confidence: float | None
    joint: float | None
    is_tried: bool
    is_accepted: bool

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return len(self.place)

    @property
    def rank(self) -> int:
        """Which child of its parent, 0 the first."""
        return self.place[-1]


@dataclass(frozen=True, slots=True)
class Bin:
    """The nodes whose confidence lies in [low, high): their mean confidence and acceptance."""

    low: float
    high: float
    count: int
    confidence: float
    acceptance: float


@dataclass(frozen=True, slots=True)
class Reliability:
    """Confidence against acceptance.

    Args:
        bins: those that hold a node, from the least confident on.
        ece: expected calibration error, mean |confidence - acceptance| over nodes, by bin.
    """

    bins: tuple[Bin, ...]
    ece: float

    def to_dict(self) -> dict[str, object]:
        """The JSON value."""
        return asdict(self)


def judged(steps: Iterable[Step]) -> list[Judged]:
    """The trees of traced steps with what was kept of them."""
    return [(step.tree, step.verdict) for step in steps]


def nodes(trees: Iterable[Judged]) -> list[Node]:
    """Every drafted node of some judged trees.

    Example:
        >>> chain = DraftTree.chain([5, 6, 7])
        >>> [node.is_tried for node in nodes([(chain, Verdict((0,), next_token=9))])]
        [True, False]
    """
    found = []
    for tree, verdict in trees:
        kept = set(verdict.path)
        places: list[Place] = [()]
        num_children = [0] * len(tree)
        joint: list[float | None] = [1.0] * len(tree)
        given = _confidences(tree)
        for node, parent in enumerate(tree.parents.tolist()):
            if node == 0:
                continue
            places.append((*places[parent], num_children[parent]))
            num_children[parent] += 1
            confidence, above = given[node], joint[parent]
            joint[node] = None if confidence is None or above is None else above * confidence
            found.append(
                Node(
                    places[node],
                    confidence,
                    joint[node],
                    is_tried=parent in kept,
                    is_accepted=node in kept,
                )
            )
    return found


def _confidences(tree: DraftTree) -> list[float | None]:
    """The drafter's probability of each node; None where it gave none (NaN)."""
    if tree.log_probs is None:
        return [None] * len(tree)
    given = tree.log_probs.double().exp().tolist()
    return [None if math.isnan(probability) else probability for probability in given]


def reliability(
    confidence: Sequence[float], accepted: Sequence[bool], *, num_bins: int = NUM_BINS
) -> Reliability:
    """Bin confidences in [0, 1] and compare each bin's mean with its share of hits.

    Args:
        confidence: one per node.
        accepted: likewise.
        num_bins: of equal width.

    Example:
        >>> round(reliability([0.9, 0.9, 0.1, 0.1], [True, True, False, False]).ece, 2)
        0.1
    """
    sure, hit = np.asarray(confidence, float), np.asarray(accepted, float)
    which = np.minimum((sure * num_bins).astype(int), num_bins - 1)
    bins = []
    for number in sorted(set(which.tolist())):
        here = which == number
        bins.append(
            Bin(
                number / num_bins,
                (number + 1) / num_bins,
                int(here.sum()),
                float(sure[here].mean()),
                float(hit[here].mean()),
            )
        )
    gaps = sum(b.count * abs(b.confidence - b.acceptance) for b in bins)
    return Reliability(tuple(bins), gaps / len(sure) if len(sure) else 0.0)


def by_depth(found: Iterable[Node]) -> dict[int, Reliability]:
    """Reliability of q(node given parent) among tried nodes, for each depth.

    Acceptance is conditional, so that a depth's map multiplies with those above it.
    """
    grouped: dict[int, list[Node]] = defaultdict(list)
    for node in found:
        if node.is_tried and node.confidence is not None:
            grouped[node.depth].append(node)
    return {depth: _reliability(grouped[depth], "confidence") for depth in sorted(grouped)}


def joint(found: Iterable[Node]) -> Reliability:
    """Reliability of the joint confidence, over all drafted nodes."""
    return _reliability([node for node in found if node.joint is not None], "joint")


def _reliability(group: Sequence[Node], of: str) -> Reliability:
    # Rounding may leave a probability a hair above 1.
    values = [min(getattr(node, of), 1.0) for node in group]
    return reliability(values, [node.is_accepted for node in group])


@dataclass(frozen=True, slots=True)
class Rates:
    """How often the child of a rank was kept when tried, for each depth.

    Args:
        offered: offered[d][r] tries of rank r at depth d + 1.
        accepted: accepted[d][r] of them kept.
    """

    offered: tuple[tuple[int, ...], ...]
    accepted: tuple[tuple[int, ...], ...]

    def rates(self) -> list[list[float | None]]:
        """[depth][rank] share kept; None where nothing was tried."""
        pairs = zip(self.offered, self.accepted, strict=True)
        return [
            [hit / tries if tries else None for tries, hit in zip(*rows, strict=True)]
            for rows in pairs
        ]

    def pooled(self) -> list[float]:
        """Sequoia's vector: by rank over all depths, how often the child tried was the one kept.

        Siblings are tried one after the other, and the shares of one node sum to at most 1.
        """
        offered = [sum(row) for row in zip(*self.offered, strict=True)]
        accepted = [sum(row) for row in zip(*self.accepted, strict=True)]
        return [hit / max(tries, 1) for tries, hit in zip(offered, accepted, strict=True)]


def by_depth_and_rank(found: Iterable[Node]) -> Rates:
    """Acceptance of tried nodes by depth and rank.

    Example:
        >>> tree = DraftTree.chain([5, 6, 7])
        >>> by_depth_and_rank(nodes([(tree, Verdict((0, 1), next_token=9))])).rates()
        [[1.0], [0.0]]
    """
    tried = [node for node in found if node.is_tried]
    depth = max((node.depth for node in tried), default=0)
    width = max((node.rank for node in tried), default=-1) + 1
    offered = np.zeros((depth, width), dtype=int)
    accepted = np.zeros((depth, width), dtype=int)
    for node in tried:
        offered[node.depth - 1, node.rank] += 1
        accepted[node.depth - 1, node.rank] += node.is_accepted
    as_rows = lambda table: tuple(tuple(row) for row in table.tolist())  # noqa: E731
    return Rates(as_rows(offered), as_rows(accepted))


def by_place(
    contexts: Mapping[str, Iterable[Judged]], *, max_places: int = MAX_PLACES
) -> dict[Place, dict[str, float]]:
    """Acceptance of each place of the tree, one value per context: EAGLE-2's scatter.

    If acceptance depended on the place alone, the values of a place would agree; where they
    spread, a tree that adapts to the context has something to gain.

    Args:
        contexts: name (a prompt, a task) to its judged trees.
        max_places: the places that were drafted most often.

    Returns:
        Place to context to share of its drafted nodes that were kept, the shallowest first.
    """
    drafted: dict[Place, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for name, trees in contexts.items():
        for node in nodes(trees):
            drafted[node.place][name].append(node.is_accepted)
    size = {place: sum(map(len, groups.values())) for place, groups in drafted.items()}
    most = sorted(drafted, key=lambda place: (-size[place], len(place), place))[:max_places]
    return {
        place: {name: sum(kept) / len(kept) for name, kept in drafted[place].items()}
        for place in sorted(most, key=lambda place: (len(place), place))
    }
