"""Medusa's typical acceptance: LOSSY. Keeps what the target finds plausible, not what it would say.

A token is kept when p exceeds min(0.09, 0.3 exp(-H(p))), H being the target's entropy there: the
less sure the target is, the less it takes. The longest kept path wins, the likelier of equals.
Above temperature 0 the output does not have the target's distribution; at temperature 0 this is
the longest match, as every rule is.

Paper: Cai et al. 2024, Medusa, arXiv:2401.10774, section 2.3.1.
Differs: the token after the path is drawn from the target at the request's temperature.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Verdict
from slipstream.verify.drawn import judge
from slipstream.verify.protocol import Chance, Probs, ProbsOf, children, verdict

EPSILON = 0.09  # no token of this probability is refused
DELTA = 0.3  # share of exp(-entropy) that is enough


def typical(tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int) -> Verdict:
    """Keep the longest plausible path, which is not lossless; see `judge` for the rest."""
    return judge("typical", typical_rule, tree, logits, sampler, root_position, made="chosen")


def typical_rule(
    tree: DraftTree, target_probs: ProbsOf, draft_probs: ProbsOf, chance: Chance
) -> Verdict:
    """`typical` as a `Rule`; q is never asked for."""
    tokens, below = tree.tokens.tolist(), children(tree)
    level = [([0], 1.0)]  # plausible paths of one length, and their likelihoods
    best: list[int] = [0]
    while level:
        best = max(level, key=lambda path: path[1])[0]
        longer = []
        for path, likelihood in level:
            p = target_probs(path[-1])
            least = threshold(p) if below[path[-1]] else math.inf
            longer += [
                ([*path, child], likelihood * float(p[tokens[child]]))
                for child in below[path[-1]]
                if p[tokens[child]] > least
            ]
        level = longer
    return verdict(best, chance.draws(target_probs(best[-1])), below)


def threshold(p: Probs) -> float:
    """Probability that a token has to exceed, given the target's distribution [V].

    Example:
        >>> round(threshold([0.5, 0.5]), 3), round(threshold([0.05] * 20), 3)
        (0.09, 0.015)
    """
    probs = np.asarray(p, dtype=np.float64)
    entropy = -float((probs[probs > 0] * np.log(probs[probs > 0])).sum())
    return min(EPSILON, DELTA * math.exp(-entropy))
