"""The exact output law of every verification rule, by enumeration with fractions.

Positive laws are `==`, and every registered verifier is held to one by being registered. Negative
controls are rules known to be biased: the machinery must find each of them, with the exact wrong
numbers.
"""

from __future__ import annotations

import sys
from fractions import Fraction as Fr
from itertools import pairwise, product
from types import ModuleType

import pytest
import torch

from rules import is_lossless, shapes_of, step_of, top
from slipstream import methods
from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Sampling
from slipstream.verify import kseq
from slipstream.verify.chain import chain_rule
from slipstream.verify.law import (
    ancestral_law,
    distance,
    emitted_law,
    enumerate_law,
    expected_accepted,
)
from slipstream.verify.protocol import without
from slipstream.verify.toy import (
    chosen_step,
    chosen_tree,
    drawn_step,
    random_table,
    table,
)
from slipstream.verify.tree import (
    Choice,
    top_down,
    with_replacement_rule,
    without_replacement_rule,
)
from slipstream.verify.walk import follow, walk, walk_rule

NAMES = tuple(methods.VERIFIERS)
EXACT = tuple(name for name in NAMES if name not in methods.LOSSY)
DRAWN = tuple(name for name in EXACT if methods.CHILDREN[name] != "chosen")


@pytest.fixture(autouse=True)
def _quick_rho(monkeypatch):
    """k-SEQ is exact at every width of its bisection: short fractions, each found once."""
    plain, found = kseq.smallest_rho, {}

    def remembered(p, q, num_tries):
        key = (*p, *q, num_tries)
        if key not in found:
            found[key] = plain(p, q, num_tries)
        return found[key]

    monkeypatch.setattr(kseq, "HALVINGS", 2)
    monkeypatch.setattr(kseq, "smallest_rho", remembered)


# --- positive ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_every_verifier_has_the_targets_law(name):
    check_law(name)


def check_law(name):
    for counts, vocab_size in shapes_of(name):
        for seed, zeros in ((0, False), (1, True)):
            target = random_table(vocab_size, 3, seed, zeros=zeros)
            draft = random_table(vocab_size, 3, seed + 100, zeros=zeros)
            step = step_of(name, target, draft, counts)
            assert is_lossless(step, target, vocab_size, len(counts) + 1), (name, counts, zeros)


def register(monkeypatch, name, children, **functions):
    """A verifier that somebody adds to the catalogue."""
    module = ModuleType("added_verifier")
    for key, function in functions.items():
        setattr(module, key, function)
    monkeypatch.setitem(sys.modules, "added_verifier", module)
    monkeypatch.setitem(methods.VERIFIERS, name, "added_verifier:added")
    monkeypatch.setitem(methods.CHILDREN, name, children)


def test_a_new_verifier_without_a_rule_or_with_a_biased_one_fails(monkeypatch):
    register(monkeypatch, "added", "chosen", added=walk)
    with pytest.raises(AttributeError, match="added_rule"):
        check_law("added")
    register(monkeypatch, "added", "chosen", added=walk, added_rule=with_replacement_rule)
    with pytest.raises(AssertionError, match="added"):
        check_law("added")
    register(monkeypatch, "added", "chosen", added=walk, added_rule=walk_rule)
    check_law("added")


@pytest.mark.parametrize("name", methods.LOSSY)
def test_a_lossy_verifier_is_lossy(name):
    """Marking an exact rule as lossy would take it out of the law above."""
    target, draft = random_table(3, 3, 0), random_table(3, 3, 100)
    assert not is_lossless(step_of(name, target, draft, (2, 1)), target, 3)


@pytest.mark.parametrize("name", NAMES)
def test_a_certain_target_reduces_every_rule_to_the_longest_match(name):
    """One-hot p: what is emitted is what the target says, and drafts that agree are kept."""
    one_hot = {
        prefix: [Fr(token == sum(prefix) % 3) for token in range(3)]
        for size in range(3)
        for prefix in product(range(3), repeat=size)
    }
    target, draft = table(one_hot), random_table(3, 3, 1)
    for counts, vocab_size in shapes_of(name):
        if vocab_size == 3:
            step = step_of(name, target, draft, counts)
            assert emitted_law(step, target, horizon=3) == {(0, 0, 0): 1}
            law = enumerate_law(step)
            assert all(set(emitted) <= {0} for emitted in law)
            if methods.CHILDREN[name] == "drawn":  # kept exactly when it was among the draws
                q = draft(())[0]
                kept = sum(mass for emitted, mass in law.items() if len(emitted) > 1)
                assert kept == 1 - (1 - q) ** counts[0]


@pytest.mark.parametrize("name", NAMES)
def test_at_temperature_zero_every_verifier_is_the_walk(name):
    """On tensors, over chosen trees with siblings (chains where the rule knows no others)."""
    verify, generator = methods.resolve(methods.VERIFIERS[name]), torch.Generator().manual_seed(3)
    sampler, kept = Sampler(Sampling(), 4), 0
    for _ in range(40):
        n = int(torch.randint(1, 9, (), generator=generator))
        parents = [-1] + [
            node if name in methods.FOR_CHAINS
            else int(torch.randint(0, node + 1, (), generator=generator))
            for node in range(n - 1)
        ]  # fmt: skip
        tokens = torch.randint(0, 4, (n,), generator=generator)
        tree = DraftTree(tokens, torch.tensor(parents))
        logits = torch.randn(n, 4, generator=generator)
        found = verify(tree, logits, sampler, 0)
        assert found == walk(tree, logits, sampler, 0)
        kept += found.num_accepted
    assert kept > 5


@pytest.mark.parametrize("name", DRAWN)
def test_a_draft_from_the_target_is_kept_whole(name):
    """Drawn from p itself nothing is refused, and no weight becomes 0/0."""
    target = random_table(3, 3, 5)
    chain = step_of(name, target, target, (1, 1, 1))
    assert is_lossless(chain, target, 3, 4) and expected_accepted(chain) == 3
    if name not in methods.FOR_CHAINS:
        assert is_lossless(step_of(name, target, target, (2, 1)), target, 3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_walk_is_lossless_over_any_chosen_tree(seed, count):
    target, draft = random_table(3, 3, seed, zeros=True), random_table(3, 3, seed + 50)
    assert is_lossless(chosen_step(walk_rule, target, draft, top(draft, count, count)), target, 3)


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


# --- negative controls ------------------------------------------------------------------------


def test_chosen_child_with_ratio_has_the_exact_wrong_law():
    """algorithms 2.4 F: P(a) = 0.5 instead of 0.3."""
    target = table({(): [Fr(3, 10), Fr(7, 10)]})
    draft = table({(): [Fr(6, 10), Fr(4, 10)]})

    def only_a(prefix):
        return [] if prefix else [0]

    for rule in (chain_rule, with_replacement_rule):
        law = emitted_law(chosen_step(rule, target, draft, only_a), target, horizon=1)
        assert law == {(0,): Fr(1, 2), (1,): Fr(1, 2)}
    assert is_lossless(chosen_step(walk_rule, target, draft, only_a), target, 2)


@pytest.mark.parametrize("seed", range(5))
def test_chosen_trees_with_ratio_are_found(seed):
    target, draft = random_table(3, 3, seed), random_table(3, 3, seed + 20)
    step = chosen_step(with_replacement_rule, target, draft, top(draft, 2, 2))
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
    rule = without_replacement_rule
    in_order = drawn_step(rule, target, draft, (2,), with_replacement=False)
    in_sorted_order = drawn_step(rule, target, draft, (2,), with_replacement=False, order=sort_by_q)
    assert is_lossless(in_order, target, 3)
    law = emitted_law(in_sorted_order, target, horizon=1)
    assert law == {(0,): Fr(5, 9), (1,): Fr(11, 36), (2,): Fr(5, 36)}


def test_drawn_siblings_must_not_be_pruned():
    """Two independent draws, the one with the lower id kept: a survives with 3/4, not 1/2."""
    half = table({(): [Fr(1, 2), Fr(1, 2)]})
    rule = with_replacement_rule

    def first_of_sorted(tokens, q):
        return sort_by_q(tokens, q)[:1]

    law = emitted_law(drawn_step(rule, half, half, (2,), order=first_of_sorted), half, horizon=1)
    assert law == {(0,): Fr(3, 4), (1,): Fr(1, 4)}


def test_sorted_order_is_biased_almost_always():
    biased = 0
    for seed in range(10):
        target, draft = random_table(3, 1, seed), random_table(3, 1, seed + 40)
        step = drawn_step(
            without_replacement_rule,
            target,
            draft,
            (2,),
            with_replacement=False,
            order=sort_by_q,
        )
        biased += not is_lossless(step, target, 3, horizon=1)
    assert biased >= 8


@pytest.mark.parametrize(
    ("faults", "law"),
    [
        ((), (Fr(5, 10), Fr(4, 10), Fr(1, 10))),
        # b is tried with 0.4 instead of 0.4 / 0.5: half of what it should get.
        (("not renormalised",), (Fr(1, 2), Fr(1, 5), Fr(3, 10))),
        # the last tenth is drawn from all of p again.
        (("final draw from p",), (Fr(55, 100), Fr(44, 100), Fr(1, 100))),
    ],
)
def test_refusals_must_renormalise_and_the_final_draw_must_use_what_is_left(faults, law):
    """Report B11: q := 1 for chosen children is right, these two shortcuts are not."""
    target = table({(): [Fr(5, 10), Fr(4, 10), Fr(1, 10)]})

    def rule(tree, target_probs, draft_probs, chance):
        tokens = tree.tokens.tolist()

        def try_children(nodes, p, q):
            left = p
            for node in nodes:
                if chance.accepts(left[tokens[node]], 1):
                    return Choice(node)
                rest = left + 0
                rest[tokens[node]] = 0
                left = rest if "not renormalised" in faults else without(left, tokens[node])
            return Choice(None, p if "final draw from p" in faults else left)

        return top_down(tree, target_probs, draft_probs, chance, try_children)

    step = chosen_step(rule, target, target, top(target, 2))
    assert emitted_law(step, target, horizon=1) == {(t,): law[t] for t in range(3)}


def test_distance_names_the_worst_sequence():
    assert distance({(0,): Fr(1)}, {(0,): Fr(1, 4), (1,): Fr(3, 4)}) == Fr(3, 4)
