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

from torch import Tensor

from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Verdict
from slipstream.verify.drawn import judge
from slipstream.verify.protocol import Chance, ProbsOf, children, residual, verdict


def chain(tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int) -> Verdict:
    """Verify a drawn chain by rejection, token by token.

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
    return judge(
        "token", chain_rule, tree, logits, sampler, root_position, made="drawn", is_chain=True
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
