"""`--budget auto`: as many nodes as pay for themselves on this machine, possibly none."""

from __future__ import annotations

import pytest

from fakes import (
    random_dflash,
    random_eagle3,
    random_language,
    random_medusa,
    random_peagle,
    tiny_target,
)
from slipstream import assemble, methods
from slipstream.bench.specs import parse_spec
from slipstream.cli.options import Setup
from slipstream.engine.engine import Engine, meter_for
from slipstream.errors import SettingError
from slipstream.target.passes import CostCurve, StepCost
from slipstream.verify.walk import walk

PROMPT = [3, 1, 4, 1, 5]
MAKERS = {
    "eagle3": (random_eagle3, "dynamic"),
    "chain": (random_language, "dynamic"),
    "medusa": (random_medusa, "best-first"),
    "peagle": (random_peagle, "best-first"),
    "ddtree": (random_dflash, "best-first"),
    "dspark": (lambda target, **shape: random_dflash(target, path_rank=4, **shape), "best-first"),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def nodes(target, make, tree, cost):
    """Drafted nodes of every step, and the answer."""
    drafter = make(target, tree=tree, budget=12, depth=3, topk=3, cost=cost)
    engine = Engine(target, drafter, walk)
    result = engine.generate(PROMPT, max_new_tokens=16, trace=True)
    return [step.tree.budget for step in result.steps], result.token_ids


@pytest.mark.parametrize("name", MAKERS)
def test_every_drafter_keeps_what_pays_and_none_where_nothing_does(target, name):
    make, tree = MAKERS[name]
    free, answer = nodes(target, make, tree, lambda n: 1.0)
    assert max(free) == 12
    dear, same = nodes(target, make, tree, lambda n: 1.0 + 50.0 * (n - 1))
    assert set(dear) == {0} and same == answer


def test_drafting_that_takes_longer_makes_larger_trees_pay(target):
    cost = StepCost(CostCurve((1, 13), (1.0, 25.0), context=1))
    few = nodes(target, random_eagle3, "dynamic", cost)[0]
    cost.learn(1000.0)
    many = nodes(target, random_eagle3, "dynamic", cost)[0]
    assert sum(many) > sum(few)


def test_every_turn_tells_what_it_took(target):
    told = []
    engine = Engine(target, random_eagle3(target), walk, meter=meter_for(target, told.append))
    passes = engine.generate(PROMPT, max_new_tokens=8).num_target_passes
    assert len(told) == passes and all(lap.draft > 0 for lap in told)


@pytest.mark.parametrize("tree", ["chain", "static", "kary", "sequoia"])
def test_fixed_trees_have_no_scores_to_decide_by(tree):
    with pytest.raises(SettingError, match="auto") as raised:
        assemble.check_auto(methods.get("eagle3"), tree)
    assert "--tree dynamic" in raised.value.hint


def test_a_budget_is_a_number_or_auto():
    assert Setup(method="ngram", budget="6").budget == 6
    with pytest.raises(SettingError, match="whole number, or auto"):
        Setup(method="ngram", budget="many")
    with pytest.raises(SettingError, match="chain"):
        Setup(method="ngram", budget="auto")
    assert parse_spec("eagle3:budget=auto").settings == {"budget": "auto"}
