"""Planted faults: each is caught with the settings that `verify` has by default."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakes import OracleDrafter, random_language, tiny_target
from planted import VERIFIERS, StaleCacheRow
from slipstream.bench.lossless import (
    LosslessReport,
    examine,
    joined,
    plain_engine,
    score_answers,
)
from slipstream.cli.verify import _decodings
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.verify.chain import chain
from slipstream.verify.typical import typical
from slipstream.verify.walk import walk

LENGTH = 40
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5]]
DEFAULT = [
    decoding.arguments()
    for decoding in _decodings(LENGTH, temperature=None, top_k=0, top_p=1.0, seed=0)
]


@pytest.fixture(scope="module")
def setting():
    """A target and what it says in both default ways of sampling."""
    target = tiny_target()
    said = [plain_engine(target).generate(PROMPTS, **arguments) for arguments in DEFAULT]
    return target, [[*r.prompt_ids, *r.token_ids] for results in said for r in results]


def verified(setting, verify, *, target=None):
    mine, answers = setting
    target = target or mine
    drafter = OracleDrafter(answers, depth=3, siblings=2, wrong=0.2)
    return examine(Engine(target, drafter, verify), PROMPTS, DEFAULT, load_twin=lambda: mine)


def test_what_is_right_is_lossless_in_both_ways(setting):
    found = verified(setting, walk)
    assert (found.verdict, found.mode) == ("lossless", "greedy+keyed")
    assert found.num_tokens == 2 * 2 * LENGTH and found.tau > 2


@pytest.mark.parametrize("fault", VERIFIERS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_verifier_is_caught(setting, fault):
    found = verified(setting, fault)
    assert found.verdict == "different"
    first = next(each for each in found.divergences if not each.is_tie)
    assert first.margin > 1e-4 and first.target_token != first.emitted_token
    assert first.without_drafting is False  # drafting is the cause, not wide passes


def test_a_stale_cache_row_is_caught(setting):
    found = verified(setting, walk, target=StaleCacheRow(setting[0]))
    assert found.verdict == "different" and not found.is_lossless


def test_a_lossy_rule_is_never_called_lossless(setting):
    target = setting[0]
    drafter = random_language(target, tree="chain", depth=2, budget=2)
    engine = Engine(target, drafter, typical, settings={"verifier": "typical", "lossless": False})
    found = examine(engine, PROMPTS, DEFAULT, load_twin=lambda: target)
    assert found.mode == "greedy+score" and found.is_lossy
    assert found.verdict in ("inconclusive", "different")
    assert {"p_value", "control_p_value", "power"} <= set(found.to_dict())


def test_a_scored_engine_drafts_as_wide_and_as_far_as_the_one_under_test():
    target, widest = tiny_target(), []

    class Wide(NoDrafter):
        def propose(self, rows):
            widest.extend(row.max_nodes for row in rows)
            return super().propose(rows)

    setup = {"settings": {"verifier": "token"}, "max_nodes": 90, "max_length": 100}
    engine = Engine(target, Wide(), chain, **setup)
    score_answers(engine, [[3, 1, 4]], {"max_new_tokens": 4, "temperature": 1.0})
    assert max(widest) == 90
    answers = score_answers(engine, [[3] * 98], {"max_new_tokens": 4, "temperature": 1.0})
    assert answers.num_tokens == 2, "the context is the engine's"


def test_modes_join_to_the_worst_verdict():
    good = LosslessReport("lossless", "greedy", 2, 80, 0, (), 2.0, None)
    ties = replace(good, verdict="ties", mode="keyed", num_divergent=1, tie_margin=1e-4)
    assert joined([good, ties]).verdict == "ties"
    assert joined([good, ties]).mode == "greedy+keyed"
    assert joined([good, replace(good, verdict="inconclusive"), ties]).verdict == "inconclusive"
    assert joined([good]) is good
