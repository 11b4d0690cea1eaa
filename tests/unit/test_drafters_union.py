"""Two drafters in one pass."""

from __future__ import annotations

import pytest

from fakes import OracleDrafter, RandomDrafter, TableTarget
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.drafters.union import UnionDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import SettingError
from slipstream.verify.walk import walk

PROMPT = [1, 2, 3]


def tau_of(target: TableTarget, drafter: object) -> float:
    result = Engine(target, drafter, walk).generate(PROMPT, max_new_tokens=80)
    assert list(result.token_ids) == target.answer(PROMPT, 80)
    return result.tau


def test_it_accepts_what_either_would() -> None:
    target = TableTarget()
    answers = [PROMPT + target.answer(PROMPT, 90)]

    def odd() -> OracleDrafter:
        return OracleDrafter(answers, depth=5, wrong_positions=range(5, 200, 2), taps=(1,))

    def early() -> OracleDrafter:
        return OracleDrafter(answers, depth=1)

    both = tau_of(target, UnionDrafter(early(), odd(), 8))
    assert both > max(tau_of(target, early()), tau_of(target, odd())) - 1e-9
    perfect = UnionDrafter(RandomDrafter(4), OracleDrafter(answers, depth=3), 12)
    assert tau_of(target, perfect) > 3.8


def test_unions_nest() -> None:
    """Three drafters, each right where the others are wrong: together always right."""
    target = TableTarget()
    answers = [PROMPT + target.answer(PROMPT, 90)]
    places = [[p for p in range(200) if p % 3 != right] for right in range(3)]
    one, two, three = (OracleDrafter(answers, depth=1, wrong_positions=wrong) for wrong in places)
    drafter = UnionDrafter(UnionDrafter(one, two, 2), three, 3)
    assert drafter.name == "oracle+oracle+oracle"
    assert tau_of(target, drafter) == 79 / 40  # two tokens a pass, the last one alone


def test_rows_are_opened_and_closed_in_both() -> None:
    target = TableTarget()
    answers = [PROMPT + target.answer(PROMPT, 30)]
    first, second = OracleDrafter(answers, taps=(0, 1)), OracleDrafter(answers, wrong=0.5)
    drafter = UnionDrafter(first, second, 6)
    assert drafter.taps == (0, 1) and drafter.name == "oracle+oracle"
    engine = Engine(target, drafter, walk)
    result = engine.generate([PROMPT, PROMPT], max_new_tokens=25, num_rows=2, trace=True)
    assert first.rows == second.rows == set()
    assert max(step.tree.budget for r in result for step in r.steps) <= 6


def test_with_nothing_it_is_the_other() -> None:
    target = TableTarget(order=1, seed=3)
    alone = tau_of(target, NgramDrafter())
    assert tau_of(target, UnionDrafter(NoDrafter(), NgramDrafter(), 8)) == alone > 1


def test_bad_unions_are_refused() -> None:
    with pytest.raises(SettingError, match="budget is 0"):
        UnionDrafter(NoDrafter(), NgramDrafter(), 0)
    with pytest.raises(SettingError, match="taps"):
        UnionDrafter(OracleDrafter([], taps=(1,)), OracleDrafter([], taps=(2,)), 4)
