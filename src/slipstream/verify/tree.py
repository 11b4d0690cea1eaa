"""Drawn siblings, tried one after the other from the root down: multi-round rejection.

A refused sibling leaves the residual max(p - q, 0) for the next one. With replacement q stays what
it is; without, the refused token leaves q too. Siblings are tried in the order they were drawn
in: sorting them by q is biased.

Paper: Miao et al. 2023, SpecInfer, arXiv:2305.09781 (with replacement); Chen et al. 2024, Sequoia,
arXiv:2402.12374, and Li et al. 2024, EAGLE, arXiv:2401.15077 (without).
Differs: Sequoia goes on with uniform draws where q is exhausted, we with fewer children.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Verdict
from slipstream.verify.drawn import judge
from slipstream.verify.protocol import (
    Chance,
    Probs,
    ProbsOf,
    children,
    residual,
    verdict,
    without,
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What came of trying the children of one node.

    Args:
        node: the child that was kept, or None.
        left: [V], what the target still wants when none was kept.
    """

    node: int | None
    left: Probs = None


TryChildren: TypeAlias = Callable[[list[int], Probs, Probs], Choice]
"""(children of a node, its p, its q) to a choice."""


def with_replacement(
    tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int
) -> Verdict:
    """Verify siblings that were drawn independently; see `judge` for arguments and errors."""
    return judge(
        "with-replacement", with_replacement_rule, tree, logits, sampler, root_position,
        made="drawn",
    )  # fmt: skip


def without_replacement(
    tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int
) -> Verdict:
    """Verify siblings drawn without replacement; see `judge` for arguments and errors."""
    return judge(
        "without-replacement", without_replacement_rule, tree, logits, sampler, root_position,
        made="distinct",
    )  # fmt: skip


def with_replacement_rule(
    tree: DraftTree, target_probs: ProbsOf, draft_probs: ProbsOf, chance: Chance
) -> Verdict:
    """`with_replacement` as a `Rule`, for floats and for fractions."""
    tokens = tree.tokens.tolist()

    def try_children(nodes: list[int], p: Probs, q: Probs) -> Choice:
        for node in nodes:
            if chance.accepts(p[tokens[node]], q[tokens[node]]):
                return Choice(node)
            p = residual(p, q)
        return Choice(None, p)

    return top_down(tree, target_probs, draft_probs, chance, try_children)


def without_replacement_rule(
    tree: DraftTree, target_probs: ProbsOf, draft_probs: ProbsOf, chance: Chance
) -> Verdict:
    """`without_replacement` as a `Rule`, for floats and for fractions."""
    tokens = tree.tokens.tolist()

    def try_children(nodes: list[int], p: Probs, q: Probs) -> Choice:
        for node in nodes:
            if chance.accepts(p[tokens[node]], q[tokens[node]]):
                return Choice(node)
            p, q = residual(p, q), without(q, tokens[node])
        return Choice(None, p)

    return top_down(tree, target_probs, draft_probs, chance, try_children)


def top_down(
    tree: DraftTree,
    target_probs: ProbsOf,
    draft_probs: ProbsOf,
    chance: Chance,
    try_children: TryChildren,
) -> Verdict:
    """Walk down while a child is kept; then draw what the target still wants.

    A rule that is lossless at every node is lossless on the tree: what is left to draw depends on
    the prefix alone.

    Args:
        tree: root and drafted nodes.
        target_probs: node to p.
        draft_probs: node to q.
        chance: for the last draw; `try_children` throws its own coins.
        try_children: the rule for one node.
    """
    below, path = children(tree), [0]
    while below[path[-1]]:
        node = path[-1]
        choice = try_children(below[node], target_probs(node), draft_probs(node))
        if choice.node is None:
            return verdict(path, chance.draws(choice.left), below)
        path.append(choice.node)
    return verdict(path, chance.draws(target_probs(path[-1])), below)
