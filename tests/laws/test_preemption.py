"""Rows that do not fit are put off and resumed with the same tokens; every block comes back."""

from __future__ import annotations

import random

import pytest

from fakes import OracleDrafter, RandomDrafter, TableTarget
from slipstream.drafters.none import NoDrafter
from slipstream.engine.blocks import Blocks
from slipstream.engine.engine import Engine
from slipstream.engine.loop import Loop
from slipstream.engine.meter import Meter
from slipstream.engine.shaping import Penalties
from slipstream.errors import SettingError
from slipstream.verify.walk import walk


def loop_of(engine: Engine, num_rows: int, blocks: Blocks, **options: object) -> Loop:
    slots = engine.max_length + 64
    cache = engine.target.new_cache(num_rows, slots)
    return Loop(
        engine.target, engine.drafter, walk, cache, Meter(), num_rows=num_rows, chunk=8,
        prefill_tokens=8, blocks=blocks, **options,
    )  # fmt: skip


def run(loop: Loop, requests: list) -> None:
    for request in requests:
        loop.submit(request)
    while loop.scheduler.has_work:
        list(loop.turn())
        assert loop.scheduler.check() == ""


@pytest.mark.parametrize("total", [10, 13, 200])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_do_not_depend_on_room(total: int, keeps: bool, temperature: float) -> None:
    """The oracle checks its features after each resumption; penalties count the whole answer."""
    target = TableTarget(scale=1.0, max_length=64)
    prompts = [[n, 5, 6, *range(n)] for n in range(12)]
    options = {"max_new_tokens": 24, "temperature": temperature, "seed": 4}
    answers = [p + target.answer(p, 24, temperature=temperature, seed=4) for p in prompts]
    drafter = OracleDrafter(answers, depth=3, wrong=0.3, siblings=1, taps=(1,))
    engine = Engine(target, drafter, walk)
    loop = loop_of(engine, 6, Blocks(total, size=4), keeps_prefixes=keeps)
    penalties = Penalties(frequency=0.3, repetition=1.1)
    requests = [
        engine.request(p, i, penalties=penalties if i % 3 == 0 else None, num_top=1, **options)
        for i, p in enumerate(prompts)
    ]
    run(loop, requests)
    plain = Engine(target, NoDrafter(), walk)
    for index, request in enumerate(requests):
        shaped = penalties if index % 3 == 0 else None
        alone = plain.generate(prompts[index], penalties=shaped, num_top=1, **options)
        result = request.result()
        assert result.token_ids == alone.token_ids and result.scores == alone.scores, index
        assert len(request.drafted) == 24 and result.num_accepted >= 0
        assert sum(result.reach) * result.num_target_passes == pytest.approx(result.num_accepted)
    assert (loop.scheduler.num_put_off > 0) == (total < 20)
    loop.scheduler.forget()
    assert loop.leaks() == "" and loop.scheduler.blocks.num_free == total
    assert drafter.rows == set() and drafter.contexts == {}


def test_ten_aborts_at_any_moment_give_every_block_back() -> None:
    chance = random.Random(2)
    target = TableTarget(max_length=64)
    engine = Engine(target, RandomDrafter(8), walk)
    loop = loop_of(engine, 4, Blocks(12, size=4), keeps_prefixes=True)
    requests = [engine.request([n, 1, 2], n, max_new_tokens=30) for n in range(20)]
    for request in requests:
        loop.submit(request)
    doomed = chance.sample(requests, 10)
    while loop.scheduler.has_work:
        list(loop.turn())
        if doomed and chance.random() < 0.2:
            loop.abort(doomed.pop())
        assert loop.scheduler.check() == ""
    assert doomed == [] and loop.scheduler.num_put_off > 0
    for request in requests:
        whole = target.answer(request.tokens[:3], 30)
        assert request.emitted == whole[: len(request.emitted)]
    loop.scheduler.forget()
    assert loop.scheduler.blocks.num_free == 12 and loop.leaks() == ""


def test_the_youngest_gives_way_and_is_the_next_to_come_back() -> None:
    engine = Engine(TableTarget(max_length=64), NoDrafter(), walk)
    loop = loop_of(engine, 3, Blocks(9, size=4))
    requests = [engine.request([n] * 7, n, max_new_tokens=20) for n in range(4)]
    finished, put_off = [], []
    for request in requests:
        loop.submit(request)
    while loop.scheduler.has_work:
        before = list(loop.scheduler.running)
        finished += [row.prompt_index for row in loop.turn() if row.is_finished]
        waiting = [row.prompt_index for row in loop.scheduler.waiting]
        assert waiting == sorted(waiting), "the queue stays in order of arrival"
        put_off += [row.prompt_index for row in before if row in loop.scheduler.waiting]
    assert finished == [0, 1, 2, 3] and 0 not in put_off and 2 in put_off


def test_drafts_get_narrower_and_prefixes_go_before_anyone_is_put_off() -> None:
    target = TableTarget(max_length=64)
    prompt = [1, 2, 3, 4]
    drafter = OracleDrafter([prompt + target.answer(prompt, 30)], depth=8)
    engine = Engine(target, drafter, walk)
    loop = loop_of(engine, 2, Blocks(9, size=4), keeps_prefixes=True)
    run(loop, [engine.request([9, 8, 7], max_new_tokens=4)])
    assert len(loop.scheduler.kept) == 1
    request = engine.request(prompt, max_new_tokens=30, budget=8, trace=True)
    run(loop, [request])
    assert request.emitted == target.answer(prompt, 30) and loop.scheduler.num_put_off == 0
    assert [len(kept.tokens) for kept in loop.scheduler.kept.values()] == [33]
    assert request.steps[0].tree.budget == 8, "the kept prefix made room"
    sizes = [len(request.tokens) - 30 + 1]
    for step in request.steps:
        assert sizes[-1] + step.tree.budget <= 36, "no draft past nine blocks"
        sizes.append(sizes[-1] + len(step.emitted))


def test_admission_leaves_a_block_for_each_running_row() -> None:
    engine = Engine(TableTarget(max_length=64), NoDrafter(), walk)
    loop = loop_of(engine, 4, Blocks(4, size=4))
    for n in range(3):
        loop.submit(engine.request([n] * 4, n, max_new_tokens=2))
    assert loop.scheduler.admit().prompt_index == 0
    assert loop.scheduler.admit().prompt_index == 1
    assert loop.scheduler.admit() is None, "one block is left, two rows run"
    loop.close()
    assert loop.leaks() == "" and loop.scheduler.blocks.num_free == 4


def test_a_broken_ledger_is_seen() -> None:
    engine = Engine(TableTarget(), NoDrafter(), walk)
    for break_it, words in (
        (lambda s: s.blocks.hold(1, 4), "row 1 is free and holds 1 blocks"),
        (lambda s: s.blocks.release(0), "row 0 has 7 keys in 0 blocks"),
        (lambda s: s.running.clear(), r"rows \[1\] are free and \[\] run"),
        (lambda s: s.running[0].tokens.append(1), "row 0 has 7 keys of 9 tokens"),
    ):
        loop = loop_of(engine, 2, Blocks(50, size=4))
        loop.submit(engine.request(list(range(7)), max_new_tokens=9))
        loop.scheduler.provide()
        list(loop._prefill())
        assert loop.scheduler.check() == ""
        break_it(loop.scheduler)
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(loop.scheduler.check())


def test_a_server_needs_room_for_one_request() -> None:
    engine = Engine(TableTarget(max_length=64), NoDrafter(), walk)
    with pytest.raises(SettingError, match="cache-tokens is 100, expected 128 or more"):
        engine.serve(cache_tokens=100)
    service = engine.serve(num_rows=4, cache_tokens=128)
    assert service.cache_usage == 0
    service.close()
