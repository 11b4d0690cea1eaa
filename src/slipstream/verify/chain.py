"""Leviathan and Chen's rejection rule for a drawn chain; "token" on the command line.

Each drafted token x, drawn from q, is kept with probability min(1, p(x) / q(x)); the first
refusal is replaced by a draw from the residual max(p - q, 0); if all were kept, the target's next
token is a bonus. At temperature 0 p is one-hot and the rule is the longest match.

Paper: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318,
algorithm 2.
Differs: the test is u * q < p, so that nothing divides by q and a token the target gives nothing
is never kept; a residual with less than 1e-8 of mass falls back to p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream import shapes
from slipstream.errors import VerifierMismatchError
from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Verdict
from slipstream.verify.protocol import (
    Chance,
    GeneratorChance,
    ProbsOf,
    children,
    residual,
    verdict,
)
from slipstream.verify.walk import walk


def chain(tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int) -> Verdict:
    """Verify a drawn chain by rejection.

    Args:
        tree: a chain whose drafted nodes were all drawn from the tree's `draft_probs`; at
            temperature 0 a chosen chain does as well.
        logits: [N, V], the target's at every node.
        sampler: the request's warp and its generator.
        root_position: index of the root in the row's tokens.

    Raises:
        ShapeError: tree and logits differ in length, or logits are not [N, V].
        VerifierMismatchError: siblings, chosen nodes, or draft probabilities that are missing or
            not the float32 numbers the tokens were drawn from.
        NumericError: a visited node's logits hold NaN.
    """
    shapes.check("chain", tokens=(tree.tokens, "N"), logits=(logits, "N V"))
    _refuse_siblings(tree)
    if sampler.is_greedy:
        return walk(tree, logits, sampler, root_position)
    if tree.budget:
        _refuse_chosen(tree, logits)
    draft_probs = tree.draft_probs
    chance = GeneratorChance(sampler.generator("verify"))
    return chain_rule(
        tree,
        lambda node: sampler.probs(logits[node : node + 1])[0],
        lambda node: draft_probs[node].to(logits.device),  # type: ignore[index]
        chance,
    )


def chain_rule(
    tree: DraftTree, target_probs: ProbsOf, draft_probs: ProbsOf, chance: Chance
) -> Verdict:
    """`chain` as a `Rule`, for floats and for fractions."""
    tokens = tree.tokens.tolist()
    below = children(tree)
    path = [0]
    while below[path[-1]]:
        p, q = target_probs(path[-1]), draft_probs(path[-1])
        node = below[path[-1]][0]
        if not chance.accepts(p[tokens[node]], q[tokens[node]]):
            return verdict(path, chance.draws(residual(p, q)), below)
        path.append(node)
    return verdict(path, chance.draws(target_probs(path[-1])), below)


def _refuse_siblings(tree: DraftTree) -> None:
    if tree.num_drafted != tree.budget:
        raise VerifierMismatchError(
            f"verifier 'token' got a tree of {tree.budget} drafted nodes and depth "
            f"{tree.num_drafted}, expected a chain (one child per node)",
            "use --tree chain, or --verifier walk",
        )


def _refuse_chosen(tree: DraftTree, logits: Tensor) -> None:
    hint = "use --verifier walk, which is exact for chosen nodes"
    drawn = 0 if tree.is_drawn is None else int(tree.is_drawn[1:].sum())
    if drawn < tree.budget:
        raise VerifierMismatchError(
            f"verifier 'token' got a chain with {tree.budget - drawn} chosen nodes of "
            f"{tree.budget}, expected nodes drawn from the drafter's distribution: the ratio "
            f"p/q is wrong for a token that was chosen",
            hint,
        )
    if tree.draft_probs is None:
        raise VerifierMismatchError(
            "verifier 'token' got a drawn chain without draft_probs, expected [N, V]", hint
        )
    if tree.draft_probs.dtype not in (torch.float32, torch.float64):
        raise VerifierMismatchError(
            f"verifier 'token' got draft_probs in {tree.draft_probs.dtype}, expected the float32 "
            f"numbers the tokens were drawn from",
            "convert the draft logits to float32 before the softmax that is drawn from",
        )
    shapes.check("chain", draft_probs=(tree.draft_probs, "N V"), logits=(logits, "N V"))
