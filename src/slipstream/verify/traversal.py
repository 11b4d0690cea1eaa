"""Traversal verification: from the leftmost leaf to the root, so that no good deep path is lost.

Top-down rules refuse a child before they have seen what lies below it. Here the weight
w(child) = min(1, w(node) * p/q) runs down to a leaf and the whole path is kept with the leaf's
weight; if not, the leaf is deleted, its parent takes over what it left (p becomes the residual
max(w p - q, 0), w the share of it), and the next leaf is tried. The root is always kept. On a
chain this is block verification.

Paper: Weng et al. 2025, Traversal Verification, arXiv:2505.12398.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Verdict
from slipstream.verify.drawn import judge
from slipstream.verify.protocol import (
    SMALLEST_MASS,
    Chance,
    Probs,
    ProbsOf,
    children,
    verdict,
    without,
)


def traversal(tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int) -> Verdict:
    """Verify siblings drawn without replacement, leaf to root; see `judge` for the rest."""
    return judge("traversal", traversal_rule, tree, logits, sampler, root_position, made="distinct")


def traversal_with_replacement(
    tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int
) -> Verdict:
    """Verify siblings drawn independently, leaf to root; see `judge` for the rest."""
    return judge(
        "traversal-with-replacement",
        traversal_with_replacement_rule,
        tree,
        logits,
        sampler,
        root_position,
        made="drawn",
    )


def traversal_rule(
    tree: DraftTree, target_probs: ProbsOf, draft_probs: ProbsOf, chance: Chance
) -> Verdict:
    """`traversal` as a `Rule`, for floats and for fractions."""
    return _traverse(tree, target_probs, draft_probs, chance, is_replaced=False)


def traversal_with_replacement_rule(
    tree: DraftTree, target_probs: ProbsOf, draft_probs: ProbsOf, chance: Chance
) -> Verdict:
    """`traversal_with_replacement` as a `Rule`, for floats and for fractions."""
    return _traverse(tree, target_probs, draft_probs, chance, is_replaced=True)


def _traverse(
    tree: DraftTree,
    target_probs: ProbsOf,
    draft_probs: ProbsOf,
    chance: Chance,
    *,
    is_replaced: bool,
) -> Verdict:
    tokens, below = tree.tokens.tolist(), children(tree)
    untried = [list(nodes) for nodes in below]
    path = [0]
    weight: dict[int, Any] = {0: 1}
    p: dict[int, Probs] = {0: target_probs(0)}  # of the path's nodes, less what was refused
    q: dict[int, Probs] = {}
    while True:
        while untried[path[-1]]:  # down to the leftmost leaf that is left
            node = path[-1]
            child = untried[node][0]
            token = tokens[child]
            if node not in q:
                q[node] = draft_probs(node)
            weight[child] = min(weight[node] * p[node][token] / q[node][token], 1)
            p[child] = target_probs(child)
            path.append(child)
        leaf = path[-1]
        if leaf == 0 or chance.accepts(weight[leaf], 1):
            return verdict(path, chance.draws(p[leaf]), below)
        path.pop()
        node = path[-1]
        untried[node].pop(0)
        p[node], weight[node] = _left(p[node], q[node], weight[node])
        if not is_replaced:
            q[node] = without(q[node], tokens[leaf])


def _left(p: Probs, q: Probs, weight: Any) -> tuple[Probs, Any]:
    """What a refused child leaves of its parent: the residual [V] and the weight."""
    rest = (weight * p - q).clip(0)
    mass = rest.sum()
    if mass < SMALLEST_MASS:
        return p, 0 * mass
    return rest / mass, mass / (mass + 1 - weight)
