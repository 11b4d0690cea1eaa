"""The measures against scripted answers and a mock clock."""

from __future__ import annotations

import pytest

from fakes import OracleDrafter, TableTarget
from slipstream.bench import measures
from slipstream.bench.measures import Sample
from slipstream.bench.results import Equality, make_row
from slipstream.bench.runner import to_sample
from slipstream.data.loops import ends_in_loop
from slipstream.engine.engine import Engine
from slipstream.verify.walk import walk


def sample(index=0, tokens=11, passes=5, draft=0.0, target=1.0, other=0.0, prefill=10.0, reach=()):
    ids = tuple(range(tokens))
    return Sample(index, ids, passes, reach, prefill, draft, target, other)


def oracle_result(wrong: float, *, depth: int = 4, eos_ids=(), num_tokens: int = 41):
    target = TableTarget(eos_ids=eos_ids)
    prompt = [3, 1, 4]
    known = [prompt + target.answer(prompt, 64)]
    engine = Engine(target, OracleDrafter(known, depth=depth, wrong=wrong), walk)
    return engine.generate(prompt, max_new_tokens=num_tokens)


def test_decode_rate_leaves_the_prefill_out():  # B124
    one = sample(tokens=11, target=1.0, prefill=10.0)
    assert measures.decode_rate([one]) == pytest.approx(10.0)
    assert measures.whole_rate([one]) == pytest.approx(1.0)


def test_both_definitions_of_accepted_length():  # B122
    right, wrong = to_sample(oracle_result(0.0), 0), to_sample(oracle_result(1.0), 0)
    rows = [
        make_row("t", "m", [s], [s], temperature=0, num_rows=1, equality=None)
        for s in (right, wrong)
    ]
    assert [row.tau for row in rows] == [5.0, 1.0]
    assert [row.num_accepted for row in rows] == [4.0, 0.0]
    assert rows[0].reach == [1.0] * 4 and rows[0].alpha == [1.0] * 4
    assert rows[1].reach == [] and rows[1].alpha == []


def test_tokens_behind_the_end_never_count():  # B121
    target = TableTarget()
    answer = target.answer([3, 1, 4], 64)
    at = next(i for i in range(7, 40) if i % 5 not in (0, 1) and answer[i] not in answer[:i])
    result = oracle_result(0.0, eos_ids=(answer[at],))
    one = to_sample(result, 0)
    assert result.finish_reason == "stop" and one.num_tokens == at + 1
    assert measures.tau([one]) == pytest.approx(at / one.num_target_passes)
    assert measures.tau([one]) == pytest.approx(1 + sum(measures.reach([one])))


def test_tau_pools_passes_and_not_answers():
    short, long = sample(tokens=3, passes=2), sample(tokens=101, passes=20)
    assert measures.tau([short, long]) == pytest.approx(102 / 22)
    assert measures.tau([sample(tokens=1, passes=0)]) is None


def test_reach_and_alpha_pool_by_passes():
    some = [sample(passes=1, reach=(1.0, 1.0)), sample(passes=3, reach=(1 / 3,))]
    assert measures.reach(some) == pytest.approx([0.5, 0.25])
    assert measures.alpha(measures.reach(some)) == pytest.approx([0.5, 0.5])


def test_efficiency_is_one_without_overhead_and_falls_with_it():
    plain = [sample(tokens=11, passes=10, target=1.0)]
    lean = [sample(tokens=11, passes=5, draft=0.1, target=0.6)]
    assert measures.speedup(lean, plain) == pytest.approx(1 / 0.7)
    assert measures.efficiency(lean, plain) == pytest.approx(1.0)
    slow = [sample(tokens=11, passes=5, draft=0.1, target=0.6, other=0.3)]
    assert measures.efficiency(slow, plain) == pytest.approx(0.7)
    spent = measures.cost(slow)
    assert spent.other_share == pytest.approx(0.3)
    assert spent.cost_ratio == pytest.approx(0.1 / 0.6)


def test_intervals_hold_the_value_and_repeat():
    some = [sample(i, tokens=10 + 7 * i % 23, passes=4 + i % 5) for i in range(30)]
    plain = [
        sample(i, tokens=s.num_tokens, passes=s.num_decoded, target=2.0) for i, s in enumerate(some)
    ]
    low, high = measures.tau_interval(some)
    assert low < measures.tau(some) < high
    assert measures.tau_interval(some) == (low, high)
    low, high = measures.speedup_interval(some, plain)
    assert low <= measures.speedup(some, plain) <= high
    assert measures.tau_interval(some[:1]) is None


def test_paired_interval_ignores_what_both_methods_share():
    """Prompts that are slow for both sides move both rates, not their ratio."""
    times = [1.0 + 10 * (i % 7) for i in range(40)]
    plain = [sample(i, target=2 * t) for i, t in enumerate(times)]
    fast = [sample(i, target=t) for i, t in enumerate(times)]
    assert measures.speedup_interval(fast, plain) == pytest.approx((2.0, 2.0))


def test_a_prompt_whose_tokens_differ_is_left_out_of_the_speedup():  # B124
    plain = [sample(0, target=2.0), sample(1, target=2.0)]
    mine = [sample(0, target=1.0), sample(1, target=0.01)]
    equality = Equality(different=frozenset({1}))
    row = make_row("t", "m", mine, plain, temperature=0, num_rows=1, equality=equality)
    assert row.speedup == pytest.approx(2.0)
    assert (row.identical, row.ties, row.different) == (1, 0, 1)
    assert row.num_speedup_prompts == 1
    all_differ = Equality(different=frozenset({0, 1}))
    row = make_row("t", "m", mine, plain, temperature=0, num_rows=1, equality=all_differ)
    assert row.speedup is None and row.speedup_ci is None and row.efficiency is None


def test_loops():
    words = [7, 8, 9, 10, 11, 12, 13]
    assert ends_in_loop([1, 2, 3, *words * 5])
    assert ends_in_loop([1, 2, 3, *words * 5, 7, 8])  # cut inside a period
    assert not ends_in_loop([*words * 5, 99, 98])  # it found its way out
    assert not ends_in_loop([1, 2, 3, *words * 2])  # said twice
    assert not ends_in_loop([4] * 29) and ends_in_loop([4] * 30)
    assert not ends_in_loop([]) and not ends_in_loop(list(range(200)))


def test_loops_are_reported_with_tau_without_them():
    looping = to_sample(oracle_result(0.0), 0)
    looping = Sample(**{f: getattr(looping, f) for f in looping.__slots__} | {"is_loop": True})
    other = to_sample(oracle_result(1.0), 1)
    both = [looping, other]
    row = make_row("t", "m", both, both, temperature=0, num_rows=1, equality=None)
    assert row.loops == 0.5 and row.tau_without_loops == 1.0 and row.tau > 1.0
