"""The numbers of docs/verification.md: worked examples, and explanations that need correcting."""

from __future__ import annotations

import json
import re
from fractions import Fraction as Fr
from pathlib import Path

from slipstream.trees import choices
from slipstream.verify.chain import chain_rule
from slipstream.verify.hybrid import hybrid_rule
from slipstream.verify.law import emitted_law, enumerate_law, expected_accepted
from slipstream.verify.toy import chosen_step, drawn_step, table
from slipstream.verify.tree import with_replacement_rule, without_replacement_rule
from slipstream.verify.walk import walk_rule

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "acceptance.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "verification.md"
INTEGRAL, DERIVATIVE, EQUALS, IS, OTHER = range(5)  # the tokens of the page's first example


def example():
    """Target and drafter of the page: p and q after the root, and after the first token."""
    after_root = {INTEGRAL: (85, 80), DERIVATIVE: (9, 12), OTHER: (6, 8)}
    after_integral = {EQUALS: (55, 60), IS: (30, 25), OTHER: (15, 15)}

    def row(after, which):
        return [Fr(after.get(token, (0, 0))[which], 100) for token in range(5)]

    return (
        table({(): row(after_root, which), (INTEGRAL,): row(after_integral, which)})
        for which in (0, 1)
    )


def top_two(prefix):
    """The likeliest two under q at the root and below its first child: four chosen nodes."""
    return {(): [INTEGRAL, DERIVATIVE], (INTEGRAL,): [EQUALS, IS]}.get(prefix, [])


def says(number: str) -> bool:
    """Does the page state this number?"""
    return re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", PAGE.read_text("utf-8")) is not None


def kept_with(rule, children_of):
    """P(first token kept), and P(second kept given the first), of the path INTEGRAL EQUALS."""
    target, draft = example()
    law = enumerate_law(chosen_step(rule, target, draft, children_of))
    first = sum(
        mass for emitted, mass in law.items() if len(emitted) > 1 and emitted[0] == INTEGRAL
    )
    both = sum(mass for emitted, mass in law.items() if emitted[:2] == (INTEGRAL, EQUALS)
               and len(emitted) > 2)  # fmt: skip
    return first, both / first


def test_chosen_children_are_kept_with_the_targets_own_probabilities():
    """0.85, then 0.55, and the law is the target's."""
    target, draft = example()
    assert kept_with(walk_rule, top_two) == (Fr(85, 100), Fr(55, 100))
    law = emitted_law(chosen_step(walk_rule, target, draft, top_two), target, horizon=1)
    assert law == {(t,): p for t, p in enumerate(target(())) if p}
    assert says("0.85") and says("0.55")
    assert Fr(85, 100) * Fr(55, 100) == Fr(4675, 10000) and says("0.4675")


def test_drawn_children_are_kept_with_the_ratio():
    """1.0, then 0.917: of the same tokens, had they been drawn in this order."""
    target, draft = example()
    first = min(Fr(1), target(())[INTEGRAL] / draft(())[INTEGRAL])
    second = min(Fr(1), target((INTEGRAL,))[EQUALS] / draft((INTEGRAL,))[EQUALS])
    assert (first, second) == (1, Fr(11, 12)) and says("1.0") and says("0.917")
    for rule in (with_replacement_rule, without_replacement_rule):
        assert kept_with(rule, top_two) == (first, second)


def test_the_ratio_on_the_chosen_tree_is_wrong():
    """It says the first token always, instead of 85 times in 100."""
    target, draft = example()
    wrong = emitted_law(chosen_step(without_replacement_rule, target, draft, top_two), target,
                        horizon=2)  # fmt: skip
    first = sum(mass for emitted, mass in wrong.items() if emitted[0] == INTEGRAL)
    assert first == 1 and target(())[INTEGRAL] == Fr(85, 100)
    said = wrong[(INTEGRAL, EQUALS)]
    assert said == Fr(11, 12) and says("0.4675")
    drawn = drawn_step(without_replacement_rule, target, draft, (2,), with_replacement=False)
    assert emitted_law(drawn, target, horizon=1) == {(t,): p for t, p in enumerate(target(())) if p}


def test_refusing_one_sibling_after_the_other():
    """Two siblings of one node: the second is tried with what the first left, 0.0825 / 0.15."""
    target = table({(): [Fr(85, 100), Fr(825, 10000), Fr(675, 10000)]})
    siblings = {(): [0, 1]}
    law = enumerate_law(
        chosen_step(hybrid_rule, target, target, lambda prefix: siblings.get(prefix, []))
    )
    kept = [sum(m for e, m in law.items() if len(e) > 1 and e[0] == token) for token in (0, 1)]
    assert kept[0] == Fr(85, 100) and kept[1] / (1 - kept[0]) == Fr(55, 100)


# --- what was measured --------------------------------------------------------------------------


def test_the_reading_of_the_measured_table():
    """Every sentence under the table, held against the committed file."""
    rows = json.loads(RESULT.read_text("utf-8"))["rows"]
    found = {(r["children"], r["temperature"], r["rule"]): r["acceptance"] for r in rows}
    places = {(m, t) for m, t, _ in found}
    lossless = {r["rule"] for r in rows} - {"bound"}
    for m, t in places:
        most = max(found[m, t, rule] for rule in lossless)
        assert m == 1 or found[m, t, "hybrid"] >= most - 0.01
        assert found[m, t, "walk"] >= most - 0.07
        if m == 1:
            classical = {found[m, t, rule] for rule in lossless - {"walk", "likeliest"}}
            assert len(classical) == 1
            assert found[m, t, "walk"] < classical.pop()
    for number, key in {
        "0.470": (4, 1.5, "walk"),
        "0.321": (4, 1.5, "likeliest"),
        "0.391": (2, 0.2, "with-replacement"),
        "0.489": (2, 0.2, "without-replacement"),
    }.items():
        assert f"{found[key]:.3f}" == number and says(number)


# --- explanations that need correcting ----------------------------------------------------------


def test_expected_accepted_of_a_chain():
    """alpha (1 - alpha^d) / (1 - alpha): 1.773 for alpha 0.7 and d 4, not 1.533."""
    target = table({(): [Fr(1, 2), Fr(1, 2)]})
    draft = table({(): [Fr(8, 10), Fr(2, 10)]})  # sum of minima: 0.7
    accepted = expected_accepted(drawn_step(chain_rule, target, draft, (1, 1, 1, 1)))
    alpha = Fr(7, 10)
    assert accepted == alpha * (1 - alpha**4) / (1 - alpha)
    assert round(float(accepted), 3) == 1.773 and says("1.773") and says("2.773")
    assert round(float((1 - alpha**4) / (1 - alpha) - 1), 3) == 1.533 and says("1.533")


def test_siblings_exclude_each_other():
    """First child 0.7, second 0.15 of all: depth 2 is reached with 0.7225, not with 0.932."""
    target = table({(): [Fr(70, 100), Fr(15, 100), Fr(15, 100)]})
    step = chosen_step(walk_rule, target, target, lambda p: [0, 1] if len(p) < 2 else [])
    law = enumerate_law(lambda chance: len(step(chance)) - 1)
    assert law[2] == Fr(85, 100) ** 2 == Fr(7225, 10000) and says("0.7225")
    assert expected_accepted(step) == Fr(85, 100) + Fr(7225, 10000) and says("1.5725")
    assert round(1 - (1 - 0.7**2) ** 4, 3) == 0.932 and says("0.932")


def test_the_heads_weight_is_read_once_a_pass():
    """n x V x H multiply-adds for n = 60, V = 128,000, H = 4,096; 1.05 GB of bf16 weight."""
    tokens, vocabulary, hidden = 60, 128_000, 4_096
    assert round(2 * tokens * vocabulary * hidden / 1e9) == 63 and says("63 GFLOP")
    assert round(2 * vocabulary * hidden / 1e9, 2) == 1.05 and says("1.05 GB")


def test_published_trees_are_sparse():
    """25 and 63 nodes; a complete binary tree of EAGLE-1's depth 5 would have 62."""
    assert choices.EAGLE1.budget == 25 and says("25")
    assert choices.MEDUSA.budget == 63 and says("63")
    assert choices.EAGLE1.depth == 5 and sum(2**d for d in range(1, 6)) == 62 and says("62")
