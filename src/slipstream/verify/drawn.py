"""What the rules that divide by q share: does the tree fit, and where do the numbers come from?

p/q is only right for a token that was drawn from q, in the order it was drawn in. Whether draws
were independent or without replacement cannot be read off a tree of distinct tokens: a drafter
is told by `methods.CHILDREN` how to draw for the rule at hand.

Rules run on the CPU in float64, over p and q made to sum to 1: one transfer per visited node, and
no small residual is lost to rounding.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from slipstream import shapes
from slipstream.errors import VerifierMismatchError
from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Verdict
from slipstream.verify.protocol import GeneratorChance, Rule, children
from slipstream.verify.walk import walk


def judge(
    name: str,
    rule: Rule,
    tree: DraftTree,
    logits: Tensor,
    sampler: Sampler,
    root_position: int,
    *,
    made: str,
    is_chain: bool = False,
) -> Verdict:
    """Run a rule over a tree that fits it; at temperature 0 all of them are the longest match.

    Args:
        name: of the verifier, for errors.
        rule: the method.
        tree: root and drafted nodes.
        logits: [N, V], the target's at every node.
        sampler: the request's warp and its "verify" generator.
        root_position: index of the root in the row's tokens.
        made: how the rule's children must be made: "chosen", "drawn", "distinct" or "mixed".
        is_chain: the rule knows no siblings.

    Raises:
        ShapeError: tree and logits differ in length, or logits are not [N, V].
        VerifierMismatchError: the tree was made in another way.
        NumericError: a visited node's logits hold NaN.
    """
    shapes.check(name, tokens=(tree.tokens, "N"), logits=(logits, "N V"))
    if is_chain and tree.num_drafted != tree.budget:
        raise VerifierMismatchError(
            f"verifier '{name}' got a tree of {tree.budget} drafted nodes and depth "
            f"{tree.num_drafted}, expected a chain (one child per node)",
            "use --tree chain, or --verifier walk",
        )
    if sampler.is_greedy:
        return walk(tree, logits, sampler, root_position)
    if made != "chosen" and tree.budget:
        _check_made(name, tree, logits, made)

    @cache
    def target_probs(node: int) -> Tensor:
        return _summing_to_one(sampler.probs(logits[node : node + 1])[0])

    @cache
    def draft_probs(node: int) -> Tensor:
        assert tree.draft_probs is not None, "a rule for chosen nodes asked for q"
        return _summing_to_one(tree.draft_probs[node])

    return rule(tree, target_probs, draft_probs, GeneratorChance(sampler.generator("verify")))


def _check_made(name: str, tree: DraftTree, logits: Tensor, made: str) -> None:
    """Raises VerifierMismatchError for a tree that was made in another way."""
    hint = "use --verifier walk, which is exact however a tree was made"
    drawn = [False] * len(tree) if tree.is_drawn is None else tree.is_drawn.tolist()
    num_chosen = tree.budget - sum(drawn[1:])
    if made == "mixed":
        _check_mixed(name, tree, drawn, hint)
    elif num_chosen:
        raise VerifierMismatchError(
            f"verifier '{name}' got a tree with {num_chosen} chosen nodes of {tree.budget}, "
            f"expected nodes drawn from the drafter's distribution: the ratio p/q is wrong for a "
            f"token that was chosen",
            hint,
        )
    if made == "distinct":
        _check_distinct(name, tree)
    if tree.draft_probs is None:
        raise VerifierMismatchError(
            f"verifier '{name}' got a tree without draft_probs, expected [N, V]", hint
        )
    if tree.draft_probs.dtype not in (torch.float32, torch.float64):
        raise VerifierMismatchError(
            f"verifier '{name}' got draft_probs in {tree.draft_probs.dtype}, expected the float32 "
            f"numbers the tokens were drawn from",
            "convert the draft logits to float32 before the softmax that is drawn from",
        )
    shapes.check(name, draft_probs=(tree.draft_probs, "N V"), logits=(logits, "N V"))


def _check_mixed(name: str, tree: DraftTree, drawn: list[bool], hint: str) -> None:
    tokens = tree.tokens.tolist()
    for siblings in children(tree):
        draws = [node for node in siblings if drawn[node]]
        if len(draws) > 1 or (draws and draws[-1] != siblings[-1]):
            raise VerifierMismatchError(
                f"verifier '{name}' got {len(draws)} drawn nodes among {len(siblings)} siblings, "
                f"expected chosen ones and then at most one that was drawn from what they leave",
                hint,
            )
        _check_no_repeat(name, [tokens[node] for node in siblings])


def _check_distinct(name: str, tree: DraftTree) -> None:
    tokens = tree.tokens.tolist()
    for siblings in children(tree):
        _check_no_repeat(name, [tokens[node] for node in siblings])


def _check_no_repeat(name: str, tokens: list[int]) -> None:
    if len(set(tokens)) != len(tokens):
        raise VerifierMismatchError(
            f"verifier '{name}' got siblings {tokens}, expected distinct ones, drawn without "
            f"replacement",
            "use --verifier with-replacement for independent draws",
        )


def _summing_to_one(probs: Tensor) -> Tensor:
    """[V] float64 on the CPU; the softmax of float32 sums to 1 only up to rounding."""
    probs = probs.cpu().double()
    return probs / probs.sum().clamp(min=1e-300)
