"""Sample the target at a node; if that token was drafted, follow it; else stop there.

The token the target chose is emitted either way, so the output is the target's whatever was
drafted, and with keyed noise it is plain decoding's, token for token. Greedy is temperature 0:
the longest match. This is rule A for chosen children in its "sample and match" form, and the
only rule that stays exact when the tree was pruned, reranked, or chosen with the same noise.

Paper: Daliri et al. 2024, arXiv:2408.07978 (shared noise); Miao et al. 2023, SpecInfer,
arXiv:2305.09781 (greedy match over a tree).
Differs: the noise is keyed by absolute position, so the tree's shape does not enter it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from slipstream import shapes
from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Verdict
from slipstream.verify.protocol import Chance, ProbsOf, children, verdict


def walk(tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int) -> Verdict:
    """Follow the target's own tokens down the tree.

    Args:
        tree: root and drafted nodes, however they came about.
        logits: [N, V], the target's at every node.
        sampler: the request's warp and keyed noise.
        root_position: index of the root in the row's tokens.

    Raises:
        ShapeError: tree and logits differ in length, or logits are not [N, V].
        NumericError: a visited node's logits hold NaN.

    Example:
        >>> import torch
        >>> from slipstream.types import Sampling
        >>> logits = torch.tensor([[0.0, 9.0, 0.0], [9.0, 0.0, 0.0]])
        >>> walk(DraftTree.chain([2, 1]), logits, Sampler(Sampling(), 3), 0)
        Verdict(path=(0, 1), next_token=0, is_bonus=True)
    """
    shapes.check("walk", tokens=(tree.tokens, "N"), logits=(logits, "N V"))
    if sampler.is_greedy and logits.device.type != "cpu":
        # One pass and one transfer; a visit at a time would wait for the device at every node.
        chosen = sampler.choose(logits, [0] * len(tree)).tolist()
        return follow(tree, chosen.__getitem__)
    depths = tree.depths.tolist()

    def choose(node: int) -> int:
        at = root_position + depths[node] + 1
        return int(sampler.choose(logits[node : node + 1], [at]))

    return follow(tree, choose)


def follow(tree: DraftTree, choose: Callable[[int], int]) -> Verdict:
    """Walk down from the root, asking for the target's token at each node on the way.

    Of siblings with the same token, the first is followed.

    Args:
        tree: root and drafted nodes.
        choose: node to the target's token there; called once per visited node.
    """
    tokens = tree.tokens.tolist()
    below = children(tree)
    path = [0]
    while True:
        token = choose(path[-1])
        match = next((child for child in below[path[-1]] if tokens[child] == token), None)
        if match is None:
            return verdict(path, token, below)
        path.append(match)


def walk_rule(
    tree: DraftTree, target_probs: ProbsOf, draft_probs: ProbsOf, chance: Chance
) -> Verdict:
    """`walk` as a `Rule`: one draw from the target per visited node; q is never asked for."""
    return follow(tree, lambda node: chance.draws(target_probs(node)))
