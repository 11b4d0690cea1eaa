"""How much rules accept: exact orderings, and the bound that no rule exceeds."""

from __future__ import annotations

from fractions import Fraction as Fr
from itertools import product

import pytest
import torch

from rules import is_lossless, top
from slipstream.verify import kseq
from slipstream.verify.block import block_rule
from slipstream.verify.bound import optimal_acceptance, optimal_acceptance_of_draws
from slipstream.verify.chain import chain_rule
from slipstream.verify.hybrid import hybrid_rule
from slipstream.verify.kseq import kseq_rule
from slipstream.verify.law import enumerate_law, expected_accepted
from slipstream.verify.protocol import residual, without
from slipstream.verify.toy import (
    chosen_step,
    drawn_step,
    likeliest,
    mixed_step,
    random_table,
    table,
)
from slipstream.verify.traversal import traversal_rule, traversal_with_replacement_rule
from slipstream.verify.tree import (
    Choice,
    top_down,
    with_replacement_rule,
    without_replacement_rule,
)
from slipstream.verify.walk import walk_rule


@pytest.mark.parametrize("seed", range(4))
def test_more_is_accepted(seed):
    """With <= without replacement; top-down <= traversal; token <= block; drawn last <= first."""
    target, draft = random_table(3, 3, seed), random_table(3, 3, seed + 30)

    def accepted(rule, counts, **how):
        return expected_accepted(drawn_step(rule, target, draft, counts, **how))

    for counts in ((2, 1), (1, 2)):
        replaced = accepted(with_replacement_rule, counts)
        distinct = accepted(without_replacement_rule, counts, with_replacement=False)
        assert replaced <= distinct
        assert replaced <= accepted(traversal_with_replacement_rule, counts)
        assert distinct <= accepted(traversal_rule, counts, with_replacement=False)
        first, last = (
            expected_accepted(mixed_step(rule, target, draft, counts))
            for rule in (hybrid_rule, chosen_first_rule)
        )
        assert last <= first
    chain = (1, 1, 1)
    assert accepted(chain_rule, chain) <= accepted(block_rule, chain)


def chosen_first_rule(tree, target_probs, draft_probs, chance):
    """Rule D the other way round: lossless, and accepts less."""
    tokens, drawn = tree.tokens.tolist(), tree.is_drawn.tolist()

    def try_children(nodes, p, q):
        for node in sorted(nodes, key=lambda node: drawn[node]):
            if chance.accepts(p[tokens[node]], q[tokens[node]] if drawn[node] else 1):
                return Choice(node)
            p = residual(p, q) if drawn[node] else without(p, tokens[node])
        return Choice(None, p)

    return top_down(tree, target_probs, draft_probs, chance, try_children)


def test_the_orderings_are_strict_somewhere():
    """Equal rules would pass the test above."""
    target, draft = random_table(3, 3, 0), random_table(3, 3, 30)
    drawn = drawn_step(with_replacement_rule, target, draft, (2, 1))
    distinct = drawn_step(without_replacement_rule, target, draft, (2, 1), with_replacement=False)
    traversal = drawn_step(traversal_rule, target, draft, (2, 1), with_replacement=False)
    mixed = mixed_step(hybrid_rule, target, draft, (2, 1))
    last = mixed_step(chosen_first_rule, target, draft, (2, 1))
    amounts = [expected_accepted(step) for step in (drawn, distinct, traversal, mixed)]
    assert amounts == sorted(set(amounts))
    assert is_lossless(last, target, 3) and expected_accepted(last) < amounts[-1]


def test_block_verification_on_its_own_example():
    """p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 11/9 accepted against 10/9."""
    target, draft = table({(): [Fr(1, 3), Fr(2, 3)]}), table({(): [Fr(2, 3), Fr(1, 3)]})
    token, block, traversal = (
        expected_accepted(drawn_step(rule, target, draft, (1, 1)))
        for rule in (chain_rule, block_rule, traversal_rule)
    )
    assert (token, block, traversal) == (Fr(10, 9), Fr(11, 9), Fr(11, 9))


@pytest.mark.parametrize("seed", range(3))
def test_traversal_of_a_chain_is_block_verification(seed):
    """Not only the emitted law: the law of how much is kept."""
    target, draft = random_table(3, 3, seed), random_table(3, 3, seed + 60)
    block, traversal = (
        enumerate_law(drawn_step(rule, target, draft, (1, 1, 1)))
        for rule in (block_rule, traversal_rule)
    )
    assert block == traversal


@pytest.mark.parametrize("seed", range(20))
def test_rule_d_meets_the_optimal_transport_bound_for_its_proposal(seed):
    """And its closed form: p(chosen) + sum over the others of min(p, q')."""
    size = 4
    target, draft = (
        random_table(size, 0, seed, zeros=seed % 2 == 1),
        random_table(size, 0, seed + 9),
    )
    p, q = target(()), draft(())
    for count in (1, 2, 3):
        accepted = expected_accepted(mixed_step(hybrid_rule, target, draft, (count,)))
        chosen, rest = likeliest(q, count - 1)
        rest = rest / rest.sum()
        proposal = {(*chosen, token): rest[token] for token in range(size) if rest[token] > 0}
        assert accepted == optimal_acceptance(p, proposal)
        others = [token for token in range(size) if token not in chosen]
        assert accepted == sum(p[chosen]) + sum(min(p[token], rest[token]) for token in others)


@pytest.mark.parametrize("seed", range(6))
def test_no_rule_exceeds_the_bound_for_its_proposal(seed, monkeypatch):
    target, draft = random_table(3, 0, seed), random_table(3, 0, seed + 30)
    p, q = target(()), draft(())
    monkeypatch.setattr(kseq, "HALVINGS", 2)  # exact at every width; short fractions are fast
    pairs = list(product(range(3), repeat=2))
    drawn = {pair: q[pair[0]] * q[pair[1]] for pair in pairs}
    distinct = {(a, b): q[a] * q[b] / (1 - q[a]) for a, b in pairs if a != b}
    bound = optimal_acceptance(p, drawn)
    for rule in (with_replacement_rule, kseq_rule, traversal_with_replacement_rule):
        assert expected_accepted(drawn_step(rule, target, draft, (2,))) <= bound
    bound_distinct = optimal_acceptance(p, distinct)
    assert bound <= bound_distinct
    for rule in (without_replacement_rule, traversal_rule):
        step = drawn_step(rule, target, draft, (2,), with_replacement=False)
        assert expected_accepted(step) <= bound_distinct
    as_floats = [torch.tensor([float(x) for x in row], dtype=torch.float64) for row in (p, q)]
    assert optimal_acceptance_of_draws(*as_floats, 2) == pytest.approx(float(bound), abs=1e-12)
    assert optimal_acceptance(p, {(a,): q[a] for a in range(3)}) == sum(map(min, p, q))


def test_refusing_chosen_children_one_by_one_equals_the_walk():
    """Rule A's two forms: hybrid without a drawn child is the sequential one."""
    target, draft = random_table(3, 3, 2), random_table(3, 3, 3)
    step = chosen_step(hybrid_rule, target, draft, top(draft, 2, 2))
    assert is_lossless(step, target, 3)
    assert enumerate_law(step) == enumerate_law(
        chosen_step(walk_rule, target, draft, top(draft, 2, 2))
    )
