"""The classical rules with a real network: the next two tokens have the target's law.

One step of the loop for many rows that differ in their seed alone. The trees are drafted by a
network with a cache and a draft vocabulary that lacks one of the target's five tokens, so a q that
is not what the children were drawn from shows in the counts.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fakes import random_language, tiny_target
from slipstream import methods
from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Sampling

V, NUM_ROWS, ROOT = 5, 600, 1
SAMPLING = {"temperature": 0.8}
DRAWN = [rule for rule, children in methods.CHILDREN.items() if children != "chosen"]
CRITICAL = 66.0  # chi-square of 24 degrees of freedom, exceeded once in 100,000


@pytest.fixture(scope="module")
def target() -> object:
    return tiny_target(vocab_size=V, std=0.12)


def law(target: object) -> Tensor:
    """[V, V] probability of the two tokens after the root."""
    tree = DraftTree(torch.tensor([ROOT, *range(V)]), torch.tensor([-1, *[0] * V]))
    logits = target.forward([tree], target.new_cache(1, V + 1), [0]).logits[0]
    p = Sampler(Sampling(**SAMPLING), V).probs(logits)
    return p[:1].T * p[1:]


def count(target: object, rule: str, *, spoilt: bool = False) -> tuple[Tensor, float]:
    """[V, V] how often the next two tokens were emitted, and the share of steps that accepted.

    Where a step gave one token only, the second is counted by its probability under the target.
    `spoilt` tells the rule that the children were drawn uniformly.
    """
    drafter = random_language(
        target, size=V - 1, tree="chain" if rule in methods.FOR_CHAINS else "kary",
        budget=6, depth=2, topk=2, children=methods.CHILDREN[rule],
    )  # fmt: skip
    rows = [
        SimpleNamespace(
            key=seed, tokens=[ROOT], max_depth=2, max_nodes=6,
            sampler=Sampler(Sampling(**SAMPLING, seed=seed), V),
        )
        for seed in range(NUM_ROWS)
    ]  # fmt: skip
    for row in rows:
        drafter.open(row, None)
    trees = drafter.propose(rows)
    if spoilt:
        trees = [replace(t, draft_probs=torch.full((len(t), V), 1 / V)) for t in trees]
    slots = list(range(NUM_ROWS))
    logits = target.forward(trees, target.new_cache(NUM_ROWS, 7), slots).logits
    verify = methods.resolve(methods.VERIFIERS[rule])
    seconds = law(target)
    seconds = seconds / seconds.sum(1, keepdim=True)
    seen, accepted = torch.zeros(V, V), 0
    for row, tree, own in zip(rows, trees, logits, strict=True):
        verdict = verify(tree, own[: len(tree)], row.sampler, 0)
        said = [*tree.tokens[list(verdict.path[1:])].tolist(), verdict.next_token]
        accepted += verdict.num_accepted > 0
        if len(said) > 1:
            seen[said[0], said[1]] += 1
        else:
            seen[said[0]] += seconds[said[0]]
    return seen, accepted / NUM_ROWS


def statistic(target: object, seen: Tensor) -> float:
    """Chi-square of counts against the target's law."""
    expected = law(target) * NUM_ROWS
    return float(((seen - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("rule", DRAWN)
def test_the_next_two_tokens_have_the_targets_law(target: object, rule: str) -> None:
    seen, accepted = count(target, rule)
    assert accepted > 0.3, "the law would hold for a drafter that is never believed"
    assert statistic(target, seen) < CRITICAL


def test_the_count_finds_a_wrong_q(target: object) -> None:
    assert statistic(target, count(target, "token", spoilt=True)[0]) > CRITICAL
