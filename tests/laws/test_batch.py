"""A batch of n is n batches of one, in any admission order; nothing is left behind.

Bug reports B51, B53, B55, B60, B61, B135.
"""

from __future__ import annotations

import random

import pytest

from fakes import OracleDrafter, RandomDrafter, TableTarget
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Scheduler
from slipstream.verify.walk import walk

PROMPTS = [[(5 * i + j) % 97 for j in range(1 + (i * 7) % 23)] for i in range(12)]
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11}


def ids(results: list) -> list[tuple[int, ...]]:
    return [r.token_ids for r in results]


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_rows", [2, 3, 5, 12, 40])
def test_rows_do_not_touch_each_other(num_rows: int, options: dict) -> None:
    target = TableTarget()
    alone = [target.answer(prompt, 30, **options) for prompt in PROMPTS]
    answers = [p + a for p, a in zip(PROMPTS, alone, strict=True)]
    order = list(range(len(PROMPTS)))
    random.Random(num_rows).shuffle(order)
    drafter = OracleDrafter(answers, depth=5, siblings=1, wrong=0.4, taps=(0, 2))
    results = Engine(target, drafter, walk).generate(
        [PROMPTS[i] for i in order], max_new_tokens=30, num_rows=num_rows, **options
    )
    assert ids(results) == [tuple(alone[i]) for i in order]
    assert [r.prompt_index for r in results] == list(range(len(PROMPTS)))
    assert [list(r.prompt_ids) for r in results] == [PROMPTS[i] for i in order]


def test_drafts_of_a_row_do_not_depend_on_its_neighbours() -> None:
    """B60: acceptance in a batch equals acceptance alone, step by step."""
    target = TableTarget()
    answers = [p + target.answer(p, 40) for p in PROMPTS]

    def paths(num_rows: int) -> list[list[tuple[int, ...]]]:
        drafter = OracleDrafter(answers, depth=5, wrong=0.2)
        results = Engine(target, drafter, walk).generate(
            PROMPTS, max_new_tokens=40, num_rows=num_rows, trace=True
        )
        return [[step.verdict.path for step in r.steps] for r in results]

    alone = paths(1)
    assert alone == paths(4)
    assert {len(path) for row in alone for path in row} == set(range(1, 7))


def test_a_row_without_drafts_does_not_break_the_batch() -> None:
    """B61: one row a token from its limit, one fresh, one whose lookup finds nothing."""
    target = TableTarget(max_length=64)
    prompts = [[1, 2, 3] * 20 + [1], [9, 8, 7], list(range(40, 60))]
    results = Engine(target, NgramDrafter(), walk).generate(
        prompts, max_new_tokens=12, num_rows=3, trace=True
    )
    assert [list(r.token_ids) for r in results] == [
        target.answer(p, min(12, 64 - len(p))) for p in prompts
    ]
    widths = {step.tree.budget for r in results for step in r.steps}
    assert 0 in widths


@pytest.mark.parametrize("make", [NoDrafter, NgramDrafter, RandomDrafter])
def test_a_call_leaves_nothing_for_the_next(make: type) -> None:
    """B51: A, B, A on one engine; the first and third are equal, and B is as on a fresh one."""
    target = TableTarget()
    first, second = [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8]
    engine = Engine(target, make(), walk)
    seen = [engine.generate(p, max_new_tokens=30, **SAMPLED) for p in (first, second, first)]
    fresh = Engine(target, make(), walk).generate(second, max_new_tokens=30, **SAMPLED)
    assert seen[0].token_ids == seen[2].token_ids != seen[1].token_ids
    assert seen[1].token_ids == fresh.token_ids


def test_many_requests_leak_nothing() -> None:
    """B53, B55: 50 requests of random acceptance; free rows, drafter rows and tau stay."""
    target = TableTarget()
    prompts = [[i, i + 1, i + 2] for i in range(50)]
    answers = [p + target.answer(p, 20) for p in prompts]
    drafter = OracleDrafter(answers, depth=4, wrong=0.3)
    engine = Engine(target, drafter, walk)
    engine.generate(prompts, max_new_tokens=20, num_rows=4)
    assert drafter.rows == set() and drafter.contexts == {}
    assert target.caches[-1].lengths == [0, 0, 0, 0]
    taus = [engine.generate(prompts[0], max_new_tokens=20).tau for _ in range(10)]
    assert len(set(taus)) == 1
    assert len(target.caches) == 2, "a call with the same shape makes no new cache"


def test_scheduler_hands_out_each_row_once() -> None:
    target = TableTarget()
    engine = Engine(target, NoDrafter(), walk)
    requests = [engine.request([1, 2], i) for i in range(5)]
    scheduler = Scheduler(target.new_cache(2, 64), 2, requests)
    first, second = scheduler.admit(), scheduler.admit()
    assert scheduler.admit() is None and scheduler.num_free == 0
    assert {first.slot, second.slot} == {0, 1}
    scheduler.retire(first)
    third = scheduler.admit()
    assert third is requests[2] and third.slot == 0 and scheduler.has_work
    for request in (second, third):
        scheduler.retire(request)
    assert scheduler.num_free == 2


def test_a_seed_is_a_seed_alone_in_a_batch_and_later() -> None:
    """B135."""
    target = TableTarget(scale=1.0)
    prompt, others = [4, 5, 6], [[1], [2, 3]]
    engine = Engine(target, RandomDrafter(), walk)

    def say(prompts: list, seed: int) -> tuple[int, ...]:
        options = {"temperature": 1.0, "seed": seed, "max_new_tokens": 25, "num_rows": 3}
        return engine.generate(prompts, **options)[prompts.index(prompt)].token_ids

    alone = say([prompt], 1)
    assert alone == say([others[0], prompt, others[1]], 1) == say([prompt], 1)
    assert alone != say([prompt], 2)
