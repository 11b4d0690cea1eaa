"""The exact output law of every verification rule, by enumeration with fractions.

Positive laws are `==`. Negative controls are rules known to be biased: the machinery must find
each of them, with the exact wrong numbers.
"""

from __future__ import annotations

from fractions import Fraction as Fr
from itertools import pairwise

import pytest

from slipstream.verify.chain import chain_rule
from slipstream.verify.law import (
    ancestral_law,
    distance,
    emitted_law,
    enumerate_law,
    expected_accepted,
)
from slipstream.verify.protocol import children, residual, verdict, without
from slipstream.verify.toy import chosen_step, chosen_tree, drawn_step, random_table, table
from slipstream.verify.walk import follow, walk_rule


def top(draft, count):
    """Children by probability under q, as a dynamic tree chooses them; depth 2."""

    def children_of(prefix):
        if len(prefix) == 2:
            return []
        q = draft(prefix)
        return sorted(range(len(q)), key=lambda token: (-q[token], token))[:count]

    return children_of


def is_lossless(step, target, vocab_size, horizon=3):
    return emitted_law(step, target, horizon=horizon) == ancestral_law(
        target, vocab_size, horizon=horizon
    )


# --- rules that are not (yet) in the package, written against the same interface -------------


def top_down(node_rule):
    """A tree rule from a rule for one node: (tokens, p, q, chance) -> child index or token."""

    def rule(tree, target_probs, draft_probs, chance):
        tokens, below, path = tree.tokens.tolist(), children(tree), [0]
        while below[path[-1]]:
            nodes = below[path[-1]]
            kept, token = node_rule(
                [tokens[n] for n in nodes], target_probs(path[-1]), draft_probs(path[-1]), chance
            )
            if kept is None:
                return verdict(path, token, below)
            path.append(nodes[kept])
        return verdict(path, chance.draws(target_probs(path[-1])), below)

    return rule


def sequential(tokens, p, q, chance, *, renormalise=True, final="left"):
    """Rule A, one chosen child after the other, and its two faulty variants (report B11)."""
    left = p
    for i, token in enumerate(tokens):
        if chance.accepts(left[token], 1):
            return i, None
        rest = without(left, token)
        if not renormalise:
            rest = left + 0
            rest[token] = 0
        left = rest
    return None, chance.draws(left if final == "left" else p)


def with_replacement(tokens, p, q, chance):
    """SpecInfer's multi-round rejection (rule B)."""
    for i, token in enumerate(tokens):
        if chance.accepts(p[token], q[token]):
            return i, None
        p = residual(p, q)
    return None, chance.draws(p)


def without_replacement(tokens, p, q, chance):
    """Rule C: q loses each refused token."""
    for i, token in enumerate(tokens):
        if chance.accepts(p[token], q[token]):
            return i, None
        p, q = residual(p, q), without(q, token)
    return None, chance.draws(p)


def by_ratio(tokens, p, q, chance):
    """The trap: chosen children treated as if they had been drawn from q."""
    return with_replacement(tokens, p, q, chance)


# --- positive ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("zeros", [False, True])
def test_drawn_chain_is_lossless(seed, zeros):
    target = random_table(3, 3, seed, zeros=zeros)
    draft = random_table(3, 3, seed + 100, zeros=zeros)
    for depth in (1, 2, 3):
        step = drawn_step(chain_rule, target, draft, (1,) * depth)
        assert is_lossless(step, target, 3, horizon=depth + 1)


def test_drawn_chain_is_lossless_where_draft_equals_target():
    target = random_table(4, 2, 5)
    step = drawn_step(chain_rule, target, target, (1, 1))
    assert is_lossless(step, target, 4)
    assert expected_accepted(step) == 2  # nothing is refused


def test_greedy_target_reduces_to_the_longest_match():
    one_hot = table({(): [0, 1, 0]})
    draft = random_table(3, 2, 1)
    law = emitted_law(drawn_step(chain_rule, one_hot, draft, (1, 1)), one_hot, horizon=3)
    assert law == {(1, 1, 1): 1}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_walk_is_lossless_over_any_chosen_tree(seed, count):
    target, draft = random_table(3, 3, seed, zeros=True), random_table(3, 3, seed + 50)
    assert is_lossless(chosen_step(walk_rule, target, draft, top(draft, count)), target, 3)


def test_walk_is_lossless_over_drawn_trees_too():
    target, draft = random_table(3, 3, 8), random_table(3, 3, 9)
    assert is_lossless(drawn_step(walk_rule, target, draft, (2, 1)), target, 3)


def cells(rows):
    """A noise in [0, 1) cut wherever any distribution's cumulated mass has a step."""
    edges = {Fr(0), Fr(1)}
    for row in rows:
        total = Fr(0)
        for x in row:
            total += x
            edges.add(total)
    edges = sorted(edges)
    return [(low, high - low) for low, high in pairwise(edges)]


def invert(row, u):
    total = Fr(0)
    for token, x in enumerate(row):
        total += x
        if u < total:
            return token
    raise AssertionError(u)


@pytest.mark.parametrize("drafter", ["follows", "avoids", "mixes"])
@pytest.mark.parametrize("seed", range(3))
def test_walk_is_lossless_when_the_tree_looks_at_the_noise(drafter, seed):
    """Shared noise is one variable per position; the tree may be any function of it.

    Every position has its noise cut into cells in which all targets' choices are known, so the
    drafter here knows exactly what the target will say at every prefix.
    """
    vocab_size, depth, horizon = 3, 2, 3
    target, draft = random_table(vocab_size, 3, seed), random_table(vocab_size, 3, seed + 70)
    prefixes = list(ancestral_law(target, vocab_size, horizon=0))
    by_position = []
    for _ in range(horizon):
        by_position.append(cells([target(s) for s in prefixes] + [draft(s) for s in prefixes]))
        prefixes = [(*s, t) for s in prefixes for t in range(vocab_size)]

    def run(chance):
        noise = []
        for position in by_position:
            noise.append(position[chance.draws([size for _, size in position])][0])

        def says(prefix):
            return invert(target(prefix), noise[len(prefix)])

        def children_of(prefix):
            if len(prefix) == depth:
                return []
            if drafter == "follows":  # a perfect drafter
                return [says(prefix)]
            if drafter == "avoids":  # drafts exactly what will not be said
                return [t for t in range(vocab_size) if t != says(prefix)]
            guess = invert(draft(prefix), noise[len(prefix)])  # shares the noise, prunes by it
            return [guess] if noise[len(prefix)] < Fr(1, 2) else [guess, (guess + 1) % vocab_size]

        tree, node_prefixes = chosen_tree(children_of)
        kept = follow(tree, lambda node: says(node_prefixes[node]))
        emitted = (*node_prefixes[kept.path[-1]], kept.next_token)
        while len(emitted) < horizon:
            emitted = (*emitted, says(emitted))
        return emitted

    assert enumerate_law(run) == ancestral_law(target, vocab_size, horizon=horizon)


def test_ratio_test_on_shared_noise_is_biased():
    """Why shared noise is accept-iff-equal only: the same u for drafting and for the ratio."""
    p, q = [Fr(1, 2), Fr(1, 2)], [Fr(3, 4), Fr(1, 4)]
    edges = cells([p, q, [Fr(2, 3), Fr(1, 3)]])

    def run(chance):
        u = edges[chance.draws([size for _, size in edges])][0]
        token = invert(q, u)
        return token if u * q[token] < p[token] else 1

    assert enumerate_law(run) != {0: Fr(1, 2), 1: Fr(1, 2)}


# --- the machinery carries later rules: same interface, same enumeration -----------------------


@pytest.mark.parametrize("seed", range(3))
def test_rules_for_siblings_are_lossless_in_draw_order(seed):
    target, draft = random_table(3, 3, seed), random_table(3, 3, seed + 30)
    rule_b = drawn_step(top_down(with_replacement), target, draft, (2, 1))
    rule_c = drawn_step(
        top_down(without_replacement), target, draft, (2, 1), with_replacement=False
    )
    assert is_lossless(rule_b, target, 3)
    assert is_lossless(rule_c, target, 3)
    assert expected_accepted(rule_b) <= expected_accepted(rule_c)


def test_sequential_rule_a_equals_the_walk():
    target, draft = random_table(3, 3, 2), random_table(3, 3, 3)
    step = chosen_step(top_down(sequential), target, draft, top(draft, 2))
    assert is_lossless(step, target, 3)
    assert expected_accepted(step) == expected_accepted(
        chosen_step(walk_rule, target, draft, top(draft, 2))
    )


# --- negative controls ------------------------------------------------------------------------


def test_chosen_child_with_ratio_has_the_exact_wrong_law():
    """algorithms 2.4 F: P(a) = 0.5 instead of 0.3."""
    target = table({(): [Fr(3, 10), Fr(7, 10)]})
    draft = table({(): [Fr(6, 10), Fr(4, 10)]})

    def only_a(prefix):
        return [] if prefix else [0]

    for rule in (chain_rule, top_down(by_ratio)):
        law = emitted_law(chosen_step(rule, target, draft, only_a), target, horizon=1)
        assert law == {(0,): Fr(1, 2), (1,): Fr(1, 2)}
    assert is_lossless(chosen_step(walk_rule, target, draft, only_a), target, 2)


@pytest.mark.parametrize("seed", range(5))
def test_chosen_trees_with_ratio_are_found(seed):
    target, draft = random_table(3, 3, seed), random_table(3, 3, seed + 20)
    step = chosen_step(top_down(by_ratio), target, draft, top(draft, 2))
    assert not is_lossless(step, target, 3)


def sort_by_q(tokens, q):
    return sorted(tokens, key=lambda token: (-q[token], token))


def test_drawn_siblings_in_sorted_order_have_the_exact_wrong_law():
    """Two of three drawn without replacement, then verified from the likeliest down.

    q = (1/2, 1/4, 1/4): a is among the two with 5/6, is then tried first and kept with
    (1/3) / (1/2), so it comes out with 5/9 instead of 1/3; equal b and c differ by their order.
    """
    target = table({(): [Fr(1, 3), Fr(1, 3), Fr(1, 3)]})
    draft = table({(): [Fr(1, 2), Fr(1, 4), Fr(1, 4)]})
    rule = top_down(without_replacement)
    in_order = drawn_step(rule, target, draft, (2,), with_replacement=False)
    in_sorted_order = drawn_step(rule, target, draft, (2,), with_replacement=False, order=sort_by_q)
    assert is_lossless(in_order, target, 3)
    law = emitted_law(in_sorted_order, target, horizon=1)
    assert law == {(0,): Fr(5, 9), (1,): Fr(11, 36), (2,): Fr(5, 36)}


def test_drawn_siblings_must_not_be_pruned():
    """Two independent draws, the one with the lower id kept: a survives with 3/4, not 1/2."""
    half = table({(): [Fr(1, 2), Fr(1, 2)]})
    rule = top_down(with_replacement)

    def first_of_sorted(tokens, q):
        return sort_by_q(tokens, q)[:1]

    law = emitted_law(drawn_step(rule, half, half, (2,), order=first_of_sorted), half, horizon=1)
    assert law == {(0,): Fr(3, 4), (1,): Fr(1, 4)}


def test_sorted_order_is_biased_almost_always():
    biased = 0
    for seed in range(10):
        target, draft = random_table(3, 1, seed), random_table(3, 1, seed + 40)
        step = drawn_step(
            top_down(without_replacement),
            target,
            draft,
            (2,),
            with_replacement=False,
            order=sort_by_q,
        )
        biased += not is_lossless(step, target, 3, horizon=1)
    assert biased >= 8


def test_refusals_must_renormalise_and_the_final_draw_must_use_what_is_left():
    """Report B11: q := 1 for chosen children is right, these two shortcuts are not."""
    p = [Fr(5, 10), Fr(4, 10), Fr(1, 10)]
    target = table({(): p})

    def law(**how):
        def node_rule(*args):
            return sequential(*args, **how)

        step = chosen_step(
            top_down(node_rule), target, target, lambda prefix: [] if prefix else [0, 1]
        )
        return emitted_law(step, target, horizon=1)

    assert law() == {(0,): p[0], (1,): p[1], (2,): p[2]}
    # b is tried with 0.4 instead of 0.4 / 0.5: half of what it should get.
    assert law(renormalise=False) == {(0,): Fr(1, 2), (1,): Fr(1, 5), (2,): Fr(3, 10)}
    # the last tenth is drawn from all of p again.
    assert law(final="untouched") == {(0,): Fr(55, 100), (1,): Fr(44, 100), (2,): Fr(1, 100)}


# --- explanations that need correcting (algorithms 11b) ----------------------------------------


def test_expected_accepted_of_a_chain():
    """alpha (1 - alpha^d) / (1 - alpha): 1.773 for alpha 0.7 and d 4, not 1.533."""
    target = table({(): [Fr(1, 2), Fr(1, 2)]})
    draft = table({(): [Fr(8, 10), Fr(2, 10)]})  # sum of minima: 0.7
    accepted = expected_accepted(drawn_step(chain_rule, target, draft, (1, 1, 1, 1)))
    alpha = Fr(7, 10)
    assert accepted == alpha * (1 - alpha**4) / (1 - alpha)
    assert round(float(accepted), 3) == 1.773
    assert round(float((1 - alpha**4) / (1 - alpha) - 1), 3) == 1.533


def test_top_two_children_are_chosen_not_drawn():
    """Kept with the target's own 0.85 and then 0.55, not with the ratios 1.0 and 0.917."""
    target = table({(): [Fr(85, 100), Fr(825, 10000), Fr(675, 10000)]})
    draft = table({(): [Fr(8, 10), Fr(12, 100), Fr(8, 100)]})

    def first_and_second(rule, tokens):
        law = enumerate_law(lambda chance: rule(list(tokens), target(()), draft(()), chance)[0])
        first = law.get(0, Fr(0))
        return first, law.get(1, Fr(0)) / (1 - first) if first < 1 else None

    assert first_and_second(sequential, (0, 1)) == (Fr(85, 100), Fr(55, 100))
    assert first_and_second(by_ratio, (0, 1))[0] == 1  # min(1, 0.85 / 0.8)
    ratio = min(Fr(1), Fr(55, 100) / (Fr(12, 100) / Fr(20, 100)))
    assert round(float(ratio), 3) == 0.917


def test_siblings_exclude_each_other():
    """The second child catches what the first missed: 0.9 here, not 1 - (1 - 0.6)^2 = 0.84."""
    target = table({(): [Fr(6, 10), Fr(3, 10), Fr(1, 10)]})
    step = chosen_step(walk_rule, target, target, lambda prefix: [] if prefix else [0, 1])
    assert expected_accepted(step) == Fr(9, 10)


def test_distance_names_the_worst_sequence():
    assert distance({(0,): Fr(1)}, {(0,): Fr(1, 4), (1,): Fr(3, 4)}) == Fr(3, 4)
