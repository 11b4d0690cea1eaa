"""SpecTr's k-SEQ: independent siblings are all tried against p / rho, and one residual serves all.

Each of m siblings is kept with probability min(1, p / (rho q)). A larger rho makes every single
try less likely to succeed, a smaller one makes the m tries together take more of a token than the
target has to give; the best is the smallest rho that does not.

Paper: Sun et al. 2023, SpecTr, arXiv:2310.15141.
Differs: rho is the upper end of a bisection, which is valid at every width of the bracket, so the
law is exact though the best rho has no closed form.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Verdict
from slipstream.verify.drawn import judge
from slipstream.verify.protocol import Chance, Probs, ProbsOf
from slipstream.verify.tree import Choice, top_down

HALVINGS = 10  # of [1, m]: rho is within 0.1 (m - 1) % of the best


def kseq(tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int) -> Verdict:
    """Verify siblings that were drawn independently; see `judge` for arguments and errors."""
    return judge("k-seq", kseq_rule, tree, logits, sampler, root_position, made="drawn")


def kseq_rule(
    tree: DraftTree, target_probs: ProbsOf, draft_probs: ProbsOf, chance: Chance
) -> Verdict:
    """`kseq` as a `Rule`, for floats and for fractions."""
    tokens = tree.tokens.tolist()

    def try_children(nodes: list[int], p: Probs, q: Probs) -> Choice:
        rho = smallest_rho(p, q, len(nodes))
        for node in nodes:
            if chance.accepts(p[tokens[node]], rho * q[tokens[node]]):
                return Choice(node)
        each = overlap(p, q, rho)  # [V], mass of a single try
        beta = each.sum()
        if beta == 0:
            return Choice(None, p)
        taken = each * ((1 - (1 - beta) ** len(nodes)) / beta)
        return Choice(None, (p - taken).clip(0))

    return top_down(tree, target_probs, draft_probs, chance, try_children)


def smallest_rho(p: Probs, q: Probs, num_tries: int) -> Any:
    """The smallest valid rho in [1, num_tries], up to the bisection's width.

    Valid means that all tries together take of no token more than the target has:
    1 - (1 - beta)^m <= rho * beta, with beta the success of a single try. `num_tries` always is.
    """

    def is_valid(rho: Any) -> bool:
        beta = overlap(p, q, rho).sum()
        return bool(1 - (1 - beta) ** num_tries <= rho * beta)

    one = p.sum()  # of p's own kind: a float or a fraction
    if is_valid(one):
        return one
    highest, step = num_tries * one, (num_tries - 1) * one
    for _ in range(HALVINGS):
        step = step / 2
        if is_valid(highest - step):
            highest = highest - step
    return highest


def overlap(p: Probs, q: Probs, rho: Any) -> Probs:
    """[V] min(q, p / rho): mass that a single try keeps of each token."""
    scaled = p / rho
    return q - (q - scaled).clip(0)
