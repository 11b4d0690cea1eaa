"""What a verifier is, and where a rule takes its probabilities and its chance from.

A verifier is two layers. The outer one, `Verify`, is what the engine calls: tensors in, verdict
out. The inner one, `Rule`, is the method itself, written over anything that adds, divides, clips
and indexes like an array, and over a `Chance` that decides. The engine runs a rule with float
tensors and `GeneratorChance`; `verify.law` runs *the same function* with arrays of
`fractions.Fraction` and a chance that takes every branch, and so gets its exact law.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Verdict

SMALLEST_MASS = 1e-8  # a residual with less mass than this is rounding, not probability

Probs: TypeAlias = Any
"""[V] probabilities: a float tensor, or a numpy object array of fractions."""

ProbsOf: TypeAlias = Callable[[int], Probs]
"""The distribution of a node's children: of the target, or of the drafter."""


class Verify(Protocol):
    """Decides what of a tree is kept."""

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int
    ) -> Verdict:
        """Verify one tree.

        Args:
            tree: root and drafted nodes.
            logits: [N, V], the target's at every node.
            sampler: the request's warp, noise and generators.
            root_position: index of the root in the row's tokens; the token chosen at a node of
                depth d has position root_position + d + 1.

        Raises:
            ShapeError: tree and logits differ in length.
            VerifierMismatchError: the rule does not fit how the tree was made.
            NumericError: NaN where a token had to be chosen.
        """


class Chance(Protocol):
    """The only source of randomness of a rule."""

    def accepts(self, target: Any, draft: Any) -> bool:
        """True with probability min(1, target / draft)."""

    def draws(self, weights: Probs) -> int:
        """An index with probability proportional to its weight [V]."""


class Rule(Protocol):
    """A verification method, free of tensors, temperature and devices."""

    def __call__(
        self, tree: DraftTree, target_probs: ProbsOf, draft_probs: ProbsOf, chance: Chance
    ) -> Verdict:
        """Verify a tree whose distributions are given per node, and asked for when needed."""


class GeneratorChance:
    """Chance from a `torch.Generator` on the CPU."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def accepts(self, target: Any, draft: Any) -> bool:
        """Accept when u * draft < target, u in [0, 1): no division, and never a zero target."""
        return self._uniform() * float(draft) < float(target)

    def draws(self, weights: Probs) -> int:
        """Inverse of the cumulated weights, in float64; weight 0 is never drawn."""
        cumulated = weights.to(torch.float64).cumsum(0)
        at = self._uniform() * cumulated[-1]
        index = int(torch.searchsorted(cumulated, at, right=True))
        return index if index < len(weights) else int(weights.nonzero()[-1])

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def residual(target: Probs, draft: Probs) -> Probs:
    """max(target - draft, 0), normalised: what the target wants beyond what was offered.

    Falls back to the target itself when less than 1e-8 is left.

    Args:
        target: [V] probabilities, the target's or what earlier refusals left of them.
        draft: [V] probabilities the refused token was drawn from.

    Example:
        >>> residual(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]))
        tensor([0., 1.])
    """
    rest = (target - draft).clip(0)
    mass = rest.sum()
    return target if mass < SMALLEST_MASS else rest / mass


def without(probs: Probs, token: int) -> Probs:
    """`probs` with one token taken out and the rest normalised: refusing a chosen token.

    Nothing is subtracted, so that the smallest rest is exact; where none is left, `probs` itself.

    Example:
        >>> without(torch.tensor([0.5, 0.25, 0.25]), 0)
        tensor([0.0000, 0.5000, 0.5000])
    """
    rest = probs + 0  # a copy, for tensors and arrays alike
    rest[token] = 0
    mass = rest.sum()
    return rest / mass if mass > 0 else probs


def children(tree: DraftTree) -> list[list[int]]:
    """The children of each node, in the order they were drafted.

    Example:
        >>> children(DraftTree.chain([5, 6, 7]))
        [[1], [2], []]
    """
    below: list[list[int]] = [[] for _ in range(len(tree))]
    for node, parent in enumerate(tree.parents.tolist()):
        if parent >= 0:
            below[parent].append(node)
    return below


def verdict(path: list[int], next_token: int, below: list[list[int]]) -> Verdict:
    """The verdict for a path; the bonus is marked when it ends at a leaf below the root."""
    return Verdict(tuple(path), next_token, is_bonus=len(path) > 1 and not below[path[-1]])
