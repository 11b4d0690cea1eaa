"""Rule D: the likeliest children chosen, one more drawn from what they leave, and tried first.

The drawn child costs the chosen ones nothing: it is kept with min(1, p / q') where q' is q without
the chosen tokens, its refusal leaves max(p - q', 0), and the chosen ones are then tried against
that with the target's own probabilities. Accepts p(chosen) + sum over the others of min(p, q'),
which is the most any rule can for these candidates; trying the chosen ones first is as lossless
and accepts less.

Paper: Hu et al. 2025, Towards Optimal Multi-draft Speculative Decoding, arXiv:2502.18779 (the
bound that this proposal meets, and the greedy set with one random last draft).
"""

from __future__ import annotations

from torch import Tensor

from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Verdict
from slipstream.verify.drawn import judge
from slipstream.verify.protocol import Chance, Probs, ProbsOf, residual, without
from slipstream.verify.tree import Choice, top_down


def hybrid(tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int) -> Verdict:
    """Verify chosen siblings with one drawn among them; see `judge` for arguments and errors."""
    return judge("hybrid", hybrid_rule, tree, logits, sampler, root_position, made="mixed")


def hybrid_rule(
    tree: DraftTree, target_probs: ProbsOf, draft_probs: ProbsOf, chance: Chance
) -> Verdict:
    """`hybrid` as a `Rule`, for floats and for fractions."""
    tokens = tree.tokens.tolist()
    drawn = [False] * len(tree) if tree.is_drawn is None else tree.is_drawn.tolist()

    def try_children(nodes: list[int], p: Probs, q: Probs) -> Choice:
        for node in nodes:
            if drawn[node]:
                if chance.accepts(p[tokens[node]], q[tokens[node]]):
                    return Choice(node)
                p = residual(p, q)
        for node in nodes:
            if not drawn[node]:
                if chance.accepts(p[tokens[node]], 1):
                    return Choice(node)
                p = without(p, tokens[node])
        return Choice(None, p)

    return top_down(tree, target_probs, draft_probs, chance, try_children)
