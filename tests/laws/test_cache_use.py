"""The loop's use of the cache: it holds all of a row but its root, before and after every step.

Bug reports B46, B57, B58, B150.
"""

from __future__ import annotations

import pytest

from fakes import OracleDrafter, RandomDrafter, TableTarget
from slipstream.engine.engine import Engine
from slipstream.engine.meter import Meter
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.step import prefill, step
from slipstream.verify.walk import walk

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], list(range(30))]


def answers_of(target: TableTarget, num_tokens: int) -> list[list[int]]:
    return [p + target.answer(p, num_tokens) for p in PROMPTS]


@pytest.mark.parametrize("eos", [(), (17, 40)], ids=["no-eos", "eos"])
def test_cache_is_the_row_without_its_root(eos: tuple[int, ...]) -> None:
    target = TableTarget(eos_ids=eos)
    drafter = OracleDrafter(answers_of(target, 60), depth=5, siblings=2, wrong=0.3, taps=(1,))
    engine, meter, cache = Engine(target, drafter, walk), Meter(), target.new_cache(2, 200)
    requests = [engine.request(p, i, max_new_tokens=50) for i, p in enumerate(PROMPTS)]
    scheduler = Scheduler(cache, 2, requests)
    num_steps = 0
    while scheduler.has_work:
        while (row := scheduler.admit()) is not None:
            row.capacity = 200
            while not row.is_prefilled:
                prefill(row, target, cache, drafter, meter, 4)
            assert cache.rows[row.slot] == row.tokens[:-1]
        rows = list(scheduler.running)
        steps = step(rows, target, cache, drafter, walk, meter)
        num_steps += len(steps)
        for row, taken in zip(rows, steps, strict=True):
            assert cache.rows[row.slot] == row.tokens[:-1], "also when a stop cut the path"
            assert taken.verdict.path[0] == 0
            assert row.tokens[-len(taken.emitted) :] == list(taken.emitted)
            if row.is_finished:
                scheduler.retire(row)
    assert num_steps > 20
    assert drafter.contexts == {}


@pytest.mark.parametrize("chunk", [1, 7, 16, 40, 256])
def test_features_do_not_depend_on_the_chunk_size(chunk: int) -> None:
    """B57, B58: the oracle checks one feature row per token but the root, at every step."""
    target, prompt = TableTarget(), [(3 * i) % 97 for i in range(40)]
    answer = target.answer(prompt, 30)
    opened: list[int] = []

    class Watching(OracleDrafter):
        def open(self, row: object, features: object) -> None:
            opened.append(features.shape[0])
            super().open(row, features)

    drafter = Watching([prompt + answer], depth=4, wrong=0.4, taps=(0, 2, 4))
    result = Engine(target, drafter, walk, chunk=chunk).generate(prompt, max_new_tokens=30)
    assert list(result.token_ids) == answer
    assert opened == [40]
    assert max(len(call[0][1]) for call in target.calls) == max(5, min(chunk, 40))


def test_a_drafters_context_keeps_up_for_many_rounds() -> None:
    """B46, B150: after each of 50+ rounds its features are those of the tokens but the root."""
    target, prompt = TableTarget(), [8, 8, 8]
    drafter = OracleDrafter(
        [prompt + target.answer(prompt, 150)], depth=4, siblings=2, wrong=0.4, taps=(2,)
    )
    result = Engine(target, drafter, walk).generate(prompt, max_new_tokens=150)
    assert len(drafter.verdicts) >= 50 and result.tau > 1.5
    perfect = OracleDrafter([prompt + target.answer(prompt, 150)], depth=4, taps=(2,))
    Engine(target, perfect, walk).generate(prompt, max_new_tokens=150)
    assert all(v.num_accepted == 4 and v.is_bonus for v in perfect.verdicts)


def test_widest_trees_always_fit() -> None:
    """A drafter that draws 90 nodes is cut to the room of its row, never refused by the cache."""
    target = TableTarget(max_length=40)
    engine = Engine(target, RandomDrafter(90, overdraw=True), walk, max_nodes=10)
    result = engine.generate([1, 2, 3], max_new_tokens=100, trace=True)
    assert list(result.token_ids) == target.answer([1, 2, 3], 37)
    assert max(s.tree.budget for s in result.steps) == 10
    assert target.caches[0].max_length == 50
