"""The most that any lossless rule can accept of given candidates: a diagnostic, not a rule.

When all candidates fall in a set A, what is accepted is in A, and of A the target takes no more
than p(A). So for every A

    accepted <= p(A) + 1 - Pr(all candidates fall in A),

and by max-flow = min-cut some rule reaches the least of these.

Paper: Hu et al. 2025, Towards Optimal Multi-draft Speculative Decoding, arXiv:2502.18779.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from torch import Tensor

from slipstream.verify.protocol import Probs


def optimal_acceptance(p: Probs, proposal: Mapping[Sequence[int], Any]) -> Any:
    """The bound for any proposal, over all subsets of a tiny vocabulary.

    Args:
        p: [V], the target's.
        proposal: candidates to their probability.

    Example:
        >>> from fractions import Fraction
        >>> third = Fraction(1, 3)
        >>> str(optimal_acceptance([third, 2 * third], {(0,): 2 * third, (1,): third}))
        '2/3'
    """
    tokens = range(len(p))
    return 1 + min(
        sum(p[token] for token in inside)
        - sum(mass for drawn, mass in proposal.items() if set(drawn) <= set(inside))
        for size in range(len(p) + 1)
        for inside in combinations(tokens, size)
    )


def optimal_acceptance_of_draws(p: Tensor, q: Tensor, num_draws: int) -> float:
    """The bound for independent draws from q: the worst A is a prefix by q/p, largest first.

    Args:
        p: [V] float64, the target's.
        q: [V] float64, the drafter's.
        num_draws: candidates.
    """
    order = (q / p.clamp(min=1e-300)).argsort(descending=True)
    inside_p, inside_q = p[order].cumsum(0), q[order].cumsum(0)
    return 1 + min(0.0, float((inside_p - inside_q**num_draws).min()))
