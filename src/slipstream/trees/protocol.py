"""What a level-by-level tree builder is: scores in, frontier out, a `DraftTree` at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.errors import SettingError
from slipstream.types import DraftTree, Drawn


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes of the newest level whose children are wanted next.

    Args:
        tokens: [F] int64, target vocabulary ids.
        parents: [F] int64, index of each node's parent in the previous frontier (the first
            frontier's parents are all 0: the root). A drafter gathers its states with it.
        depth: of these nodes; 1 for the root's children.
    """

    tokens: Tensor
    parents: Tensor
    depth: int


class TreeBuilder(Protocol):
    """Grows one tree. Candidates that leave the frontier may still enter the finished tree.

    Attributes:
        num_children: children wanted of each node of the current frontier, after `start` (the
            root alone) and after each `grow`.
    """

    num_children: tuple[int, ...]

    def start(self, root: int) -> None:
        """Begin a tree at this root token."""

    def grow(
        self, log_probs: Tensor, tokens: Tensor, drawn: Drawn | None = None
    ) -> Frontier | None:
        """Take the scores of the current frontier's children.

        Args:
            log_probs: [F, M] nats, the drafter's conditional log-probabilities (first call: F=1,
                the root), for M candidate children each, in rank or draw order.
            tokens: [F, M] int64, their target vocabulary ids.
            drawn: how they were drawn, or None when all were chosen. A builder that prunes or
                reranks must refuse it: what was drawn is kept as drawn.

        Returns:
            The nodes to expand next, or None when the tree needs no more levels.
        """

    def finish(self) -> DraftTree:
        """The tree, root first, parents before children, siblings in candidate order."""


def refuse_drawn(drawn: Drawn | None) -> None:
    """For builders that let scores decide which nodes stay: a sample must stay as it was drawn.

    Raises:
        SettingError: the candidates were drawn.
    """
    if drawn is not None:
        raise SettingError(
            "tree",
            "pruned by score",
            "a shape that is fixed before anything is drawn",
            "use --tree chain, static, kary or sequoia, or --verifier walk",
        )
