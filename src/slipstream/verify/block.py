"""Block verification: the chain is judged as a whole, and never keeps less than token by token.

A token that p likes more than q does makes up for an earlier one that p liked less: the weight
r[i] = min(r[i-1] * p/q, 1) runs along the chain, and the longest prefix whose own coin falls well
is kept. Needs nothing the target pass does not give anyway.

Paper: Sun et al. 2024, Block Verification, arXiv:2403.10444, algorithm 2.
Differs: the coins are thrown from the longest prefix down, so that the first success is the
answer; they are independent, so the law is the same.
"""

from __future__ import annotations

from torch import Tensor

from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Verdict
from slipstream.verify.drawn import judge
from slipstream.verify.protocol import Chance, ProbsOf, children, residual, verdict


def block(tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int) -> Verdict:
    """Verify a drawn chain as a whole; see `judge` for arguments and errors."""
    return judge(
        "block", block_rule, tree, logits, sampler, root_position, made="drawn", is_chain=True
    )


def block_rule(
    tree: DraftTree, target_probs: ProbsOf, draft_probs: ProbsOf, chance: Chance
) -> Verdict:
    """`block` as a `Rule`, for floats and for fractions."""
    tokens, below = tree.tokens.tolist(), children(tree)
    last = tree.budget  # nodes of a chain are numbered by depth
    weights = [1]  # r of each prefix
    for node in range(last):
        token = tokens[node + 1]
        ratio = target_probs(node)[token] / draft_probs(node)[token]
        weights.append(min(weights[-1] * ratio, 1))
    for node in range(last, 0, -1):
        weight = weights[node]
        if node == last:
            is_kept = chance.accepts(weight, 1)
        else:
            left = (weight * target_probs(node) - draft_probs(node)).clip(0).sum()
            is_kept = chance.accepts(left, left + 1 - weight)
        if is_kept:
            break
    else:
        node = 0
    p = target_probs(node)
    rest = p if node == last else residual(weights[node] * p, draft_probs(node))
    return verdict(list(range(node + 1)), chance.draws(rest), below)
