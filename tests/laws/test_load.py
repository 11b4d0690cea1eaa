"""An answer does not depend on load: whatever runs beside it, it is what it is alone.

Arrivals and aborts are random; rows share each pass, so speculation shrinks and grows with load.
"""

from __future__ import annotations

import queue
import random
import threading
from typing import Any

import pytest
import torch

from fakes import OracleDrafter, RandomDrafter, TableTarget, random_eagle3, tiny_target
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.engine.blocks import Blocks
from slipstream.engine.engine import Engine
from slipstream.engine.loop import Loop
from slipstream.engine.meter import Meter
from slipstream.engine.shaping import Penalties
from slipstream.engine.throttle import Throttle
from slipstream.types import DraftTree, Verdict
from slipstream.verify.walk import walk


def settings_of(index: int) -> dict:
    """Mixed lengths, temperatures, seeds, penalties and budgets."""
    chance = random.Random(index)
    return {
        "max_new_tokens": chance.randint(1, 8),
        "temperature": chance.choice([0.0, 0.7, 1.3]),
        "top_p": chance.choice([1.0, 0.9]),
        "seed": chance.randrange(5),
        "budget": chance.choice([None, None, 0, 3]),
        "penalties": chance.choice([None, Penalties(repetition=1.3, frequency=0.5)]),
        "stop": chance.choice([(), (chance.randrange(97),)]),
    }


def prompt_of(index: int) -> list[int]:
    chance = random.Random(1000 + index)
    return [chance.randrange(97) for _ in range(chance.randint(1, 24))]


def loop_of(
    engine: Engine,
    num_rows: int,
    prefill_tokens: int | None = 8,
    keeps_prefixes: bool = False,
    blocks: Blocks | None = None,
) -> tuple[Loop, object]:
    slots = engine.max_length + 64
    cache = engine.target.new_cache(num_rows, slots)
    loop = Loop(
        engine.target, engine.drafter, walk, cache, Meter(), num_rows=num_rows, chunk=8,
        prefill_tokens=prefill_tokens, throttle=Throttle(64, pass_tokens=20), blocks=blocks,
        keeps_prefixes=keeps_prefixes,
    )  # fmt: skip
    return loop, cache


def serve_randomly(
    engine: Engine,
    count: int,
    *,
    aborted: int,
    num_rows: int = 5,
    blocks: Blocks | None = None,
    keeps_prefixes: bool = False,
) -> dict:
    """Submit `count` requests at random turns, abort some; the answers of the others by index."""
    chance = random.Random(7)
    loop, cache = loop_of(engine, num_rows, blocks=blocks, keeps_prefixes=keeps_prefixes)
    requests = [engine.request(prompt_of(i), i, **settings_of(i)) for i in range(count)]
    doomed = set(chance.sample(range(count), aborted))
    coming, done, num_submitted = list(requests), {}, 0
    while coming or loop.scheduler.has_work:
        for _ in range(chance.choice([0, 0, 1, 4])):
            if coming:
                loop.submit(coming.pop(0))
                num_submitted += 1
        if doomed and chance.random() < 0.2:
            index = min(doomed)
            if index < num_submitted:
                doomed.discard(index)
                loop.abort(requests[index])
        for row in loop.turn():
            if row.is_finished:
                done[row.prompt_index] = row.result()
        assert loop.scheduler.check() == ""
    assert loop.leaks() == ""
    loop.scheduler.forget()
    assert loop.leaks() == "" and cache.lengths == [0] * num_rows
    assert loop.scheduler.blocks.usage == 0
    assert (loop.scheduler.num_put_off > 0) == (blocks is not None)
    assert all(request.is_finished for request in requests)
    return {i: result for i, result in done.items() if result.finish_reason != "abort"}


@pytest.fixture(scope="module")
def alone_on_a_model() -> tuple[object, list]:
    """A tiny float32 model, and what it answers to 200 requests one by one."""
    target = tiny_target(num_hidden_layers=1)
    plain = Engine(target, NoDrafter(), walk, max_length=96)
    return target, [plain.generate(prompt_of(i), **settings_of(i)) for i in range(200)]


@pytest.mark.parametrize("num_blocks", [None, 14])
def test_200_requests_on_a_model_equal_their_solo_runs(
    alone_on_a_model: tuple, num_blocks: int | None
) -> None:
    """With room for all, and with so little that running rows are put off and resumed."""
    target, answers = alone_on_a_model
    engine = Engine(target, NgramDrafter(), walk, max_length=96)
    blocks = None if num_blocks is None else Blocks(num_blocks, size=4)
    done = serve_randomly(engine, 200, aborted=10, blocks=blocks, keeps_prefixes=bool(blocks))
    assert len(done) >= 190
    for index, result in done.items():
        alone = answers[index]
        assert result.token_ids == alone.token_ids, index
        assert result.finish_reason == alone.finish_reason


@pytest.mark.parametrize("blocks", [None, Blocks(9, size=4)])
def test_a_network_drafter_keeps_no_row(blocks: Blocks | None) -> None:
    target = tiny_target()
    drafter = random_eagle3(target, tree="dynamic", budget=8, depth=2, topk=2)
    engine = Engine(target, drafter, walk, max_length=96)
    done = serve_randomly(engine, 24, aborted=4, blocks=blocks)
    plain = Engine(target, NoDrafter(), walk, max_length=96)
    for index, result in done.items():
        assert result.token_ids == plain.generate(prompt_of(index), **settings_of(index)).token_ids
    assert len(drafter._pending) == 0


@pytest.mark.parametrize("drafter", [RandomDrafter(12), RandomDrafter(40, overdraw=True)])
def test_any_tree_and_any_share(drafter: RandomDrafter) -> None:
    target = TableTarget(scale=1.0)
    done = serve_randomly(Engine(target, drafter, walk, max_length=96), 60, aborted=8)
    plain = Engine(target, NoDrafter(), walk, max_length=96)
    for index, result in done.items():
        alone = plain.generate(prompt_of(index), **settings_of(index))
        assert result.token_ids == alone.token_ids


def test_speculation_shrinks_with_load_and_zero_is_allowed() -> None:
    target = TableTarget()
    prompts = [[i, i + 1] for i in range(24)]
    drafter = OracleDrafter([p + target.answer(p, 20) for p in prompts], depth=8)
    engine = Engine(target, drafter, walk, max_length=96)
    widths = {}
    for num_rows in (1, 4, 24):
        loop, _ = loop_of(engine, num_rows, prefill_tokens=None)
        requests = [engine.request(p, max_new_tokens=20, trace=True) for p in prompts[:num_rows]]
        for request in requests:
            loop.submit(request)
        for _ in loop.run():
            pass
        widths[num_rows] = max(step.tree.budget for r in requests for step in r.steps[:1])
        assert [r.emitted for r in requests] == [target.answer(p, 20) for p in prompts[:num_rows]]
    assert widths == {1: 8, 4: 4, 24: 0}, "untried, the widest that is allowed comes first"
    crowded = max(len(call) for call in target.calls)
    assert crowded > 1
    for call in target.calls:
        if len(call) > 1:  # a decoding pass
            assert sum(len(tokens) for _, tokens, _ in call) <= max(20, len(call))


def test_a_long_prompt_does_not_stall_running_rows() -> None:
    """One chunk of it, then a step of the others; and so on."""
    target = TableTarget()
    engine = Engine(target, NoDrafter(), walk, max_length=300)
    loop, _ = loop_of(engine, 2)
    first = engine.request([1, 2, 3], max_new_tokens=60)
    loop.submit(first)
    list(loop.turn())
    long = engine.request(list(range(80)), max_new_tokens=2)
    loop.submit(long)
    before = len(first.emitted)
    for turn in range(1, 10):
        list(loop.turn())
        assert len(first.emitted) == before + turn
    assert not long.is_prefilled
    list(loop.turn())
    assert long.is_prefilled
    for _ in loop.run():
        pass
    assert first.emitted == target.answer([1, 2, 3], 60)
    assert long.emitted == target.answer(list(range(80)), 2)


@pytest.mark.parametrize("prefill_tokens", [1, 3, 8, 20])
def test_a_prompt_comes_in_pieces_as_small_as_asked_for(prefill_tokens: int) -> None:
    target = TableTarget()
    engine = Engine(target, NoDrafter(), walk, max_length=300)
    loop, _ = loop_of(engine, 1, prefill_tokens=prefill_tokens)
    request = engine.request(list(range(40)), max_new_tokens=4)
    loop.submit(request)
    for _ in loop.run():
        pass
    sizes = [len(tokens) for call in target.calls for _, tokens, _ in call]
    assert max(sizes) == min(prefill_tokens, 8) and sum(sizes) == 40 + 3
    assert request.emitted == target.answer(list(range(40)), 4)


def test_a_finished_request_holds_no_features() -> None:
    """Its reader may be slow; the row's own copy serves the next turn."""
    target = TableTarget()
    engine = Engine(target, OracleDrafter([], taps=(1,)), walk, max_length=96)
    loop, _ = loop_of(engine, 2, keeps_prefixes=True)
    request = engine.request([1, 2, 3], max_new_tokens=8)
    loop.submit(request)
    for row in loop.run():
        if not row.is_finished:
            assert row.features and loop.scheduler.usage > 0
    assert loop.scheduler.usage == 0 and loop.scheduler.blocks.usage > 0, "kept is not in use"
    assert request.features == [] and len(loop.scheduler.kept[0].features) == 10


class Notes:
    """In place of a throttle: nothing is drafted in the steps told, and notes are kept."""

    def __init__(self, rests: set[int]) -> None:
        self.rests, self.notes = rests, []

    def choose(self, num_rows: int) -> int:
        return 0 if len(self.notes) in self.rests else 2

    def note(self, num_rows: int, width: int, *, catches_up: bool, **found: object) -> None:
        self.notes.append((width, catches_up))


def test_the_throttle_is_told_when_a_drafter_catches_up() -> None:
    """At a row's first draft and after a rest, and only if something is drafted."""
    engine = Engine(TableTarget(), NoDrafter(), walk, max_length=96)
    loop, _ = loop_of(engine, 2, prefill_tokens=None)
    loop._throttle = Notes(rests={0, 3, 4})
    loop.submit(engine.request([1, 2, 3], max_new_tokens=9))
    loop.submit(engine.request([4, 5, 6], max_new_tokens=9, budget=0))
    for _ in loop.run():
        pass
    expected = [(0, False), (2, True), (2, False), (0, False), (0, False), (2, True), (2, False)]
    assert loop._throttle.notes == [*expected, (2, False)]


def test_first_come_first_served() -> None:
    target, order = TableTarget(), []
    engine = Engine(target, NoDrafter(), walk, max_length=64)
    loop, _ = loop_of(engine, 2)
    for index in range(8):
        loop.submit(engine.request([index, 1], index, max_new_tokens=5))
    for row in loop.run():
        if len(row.emitted) == 1:
            order.append(row.prompt_index)
    assert order == list(range(8))


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_abort_frees_row_and_drafter(after: int) -> None:
    target = TableTarget()
    prompt = list(range(20))
    drafter = OracleDrafter([prompt + target.answer(prompt, 40)], depth=3, taps=(1,))
    engine = Engine(target, drafter, walk, max_length=96)
    loop, cache = loop_of(engine, 1)
    request, waiting = (engine.request(prompt, max_new_tokens=40) for _ in range(2))
    loop.submit(request)
    loop.submit(waiting)
    for _ in range(after):
        list(loop.turn())
    loop.abort(request)
    loop.abort(request)  # twice is once
    assert request.finish_reason == "abort" and drafter.rows == set()
    for _ in loop.run():
        pass
    assert waiting.emitted == target.answer(prompt, 40)
    assert loop.leaks() == "" and cache.lengths == [0] and drafter.contexts == {}


def test_a_turn_that_breaks_off_leaves_nothing_behind() -> None:
    """Row 0 has its last token when row 1's verdict fails: it keeps its answer, and no row."""
    target = TableTarget()
    prompts = [list(range(20)), list(range(30, 50))]
    answers = [target.answer(prompt, 9) for prompt in prompts]
    assert answers[0][0] != answers[1][0]
    drafter = OracleDrafter([p + a for p, a in zip(prompts, answers, strict=True)], depth=3)
    engine = Engine(target, drafter, walk, max_length=96)
    loop, cache = loop_of(engine, 2, prefill_tokens=None)

    def verify(tree: DraftTree, *rest: Any) -> Verdict:
        if int(tree.tokens[0]) == answers[1][0]:
            raise RuntimeError("a fault of a rule")
        return walk(tree, *rest)

    loop._verify = verify
    first = engine.request(prompts[0], max_new_tokens=2)
    second, later = (engine.request(prompts[1], max_new_tokens=9) for _ in range(2))
    for request in (first, second):
        loop.submit(request)
    with pytest.raises(RuntimeError, match="fault of a rule"):
        list(loop.turn())
    assert first.is_finished and not second.is_finished
    loop.close()
    assert first.emitted == answers[0][:2] and first.finish_reason == "length"
    assert second.finish_reason == "abort"
    assert not loop.scheduler.has_work and drafter.rows == set() and loop.leaks() == ""
    loop._verify = walk
    loop.submit(later)
    for _ in loop.run():
        pass
    assert later.emitted == answers[1] and cache.lengths == [0, 0]


def test_a_leak_is_seen() -> None:
    engine = Engine(TableTarget(), NoDrafter(), walk, max_length=64)
    loop, cache = loop_of(engine, 2)
    cache.rows[1] = [1, 2]
    assert "row 1 is free and holds 2 keys" in loop.leaks()


def test_threads_may_submit_and_abort_at_any_time() -> None:
    target = TableTarget()
    engine = Engine(target, RandomDrafter(6), walk, max_length=96)
    service = engine.serve(num_rows=3, max_waiting=100)
    ended: queue.Queue = queue.Queue()

    def ask(start: int) -> None:
        for index in range(start, start + 8):
            request = engine.request(prompt_of(index), index, **settings_of(index))
            service.submit(request, lambda p, i=index: p.result and ended.put((i, p.result)))
            if index % 5 == 0:
                service.abort(request)

    threads = [threading.Thread(target=ask, args=(8 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    results = dict(ended.get(timeout=30) for _ in range(32))
    for thread in threads:
        thread.join()
    assert service.drain(10) and service.leaks() == ""
    service.close()
    plain = Engine(target, NoDrafter(), walk, max_length=96)
    for index, result in results.items():
        alone = plain.generate(prompt_of(index), **settings_of(index)).token_ids
        assert result.token_ids == alone[: result.num_tokens]
        assert result.finish_reason == "abort" or result.token_ids == alone
    assert torch.is_grad_enabled()


def chat_turns(target: TableTarget, num_turns: int) -> list[list[int]]:
    """Prompts of a chat: each is the one before, its answer of 10 tokens and two more."""
    prompts = [[5, 6, 7, 8]]
    for turn in range(num_turns - 1):
        last = prompts[-1]
        prompts.append([*last, *target.answer(last, 10), 40 + turn, 41 + turn])
    return prompts


@pytest.mark.parametrize("taps", [(), (0, 2)])
def test_a_next_turn_is_prefilled_from_where_the_last_ended(taps: tuple[int, ...]) -> None:
    """The oracle checks its features: one per token, whoever computed it."""
    target = TableTarget(max_length=200)
    prompts = chat_turns(target, 4)
    answers = [p + target.answer(p, 10) for p in prompts]
    drafter = OracleDrafter(answers, depth=3, wrong=0.2, taps=taps)
    engine = Engine(target, drafter, walk)
    service = engine.serve(num_rows=2)
    for turn, prompt in enumerate(prompts):
        ended: queue.Queue = queue.Queue()
        target.calls.clear()
        request = engine.request(prompt, max_new_tokens=10)
        service.submit(request, lambda piece, to=ended: piece.result and to.put(piece.result))
        assert list(ended.get(timeout=10).token_ids) == target.answer(prompt, 10)
        fresh = len(target.calls[0][0][1])  # tokens of the prefill pass
        assert fresh == (len(prompt) if turn == 0 else 3), "the answer's last token and two more"
    assert service.drain(10) and service.leaks() == ""
    service.close()
    assert drafter.rows == set()


def test_chats_that_take_turns_keep_their_rows() -> None:
    """All begin with the template's words: that alone is no reason to take another chat's row."""
    target = TableTarget(max_length=200)
    header = list(range(20, 29))
    chats = {
        name: [*header, *(start + i for i in range(12))] for name, start in (("a", 40), ("b", 60))
    }
    engine = Engine(target, NoDrafter(), walk)
    loop, _cache = loop_of(engine, 4, keeps_prefixes=True)
    for turn in range(3):
        for name, prompt in chats.items():
            target.calls.clear()
            loop.submit(engine.request(prompt, max_new_tokens=10))
            for _ in loop.run():
                pass
            ran = sum(len(tokens) for call in target.calls for _, tokens, _ in call) - 9
            assert ran == (len(prompt) if turn == 0 else 3), (name, turn)
            chats[name] = [*prompt, *target.answer(prompt, 10), 80 + turn, 81 + turn]
    assert len(loop.scheduler.kept) == 2


def test_kept_prefixes_change_nothing_and_the_longest_unused_goes_first() -> None:
    target = TableTarget(max_length=96)
    chance = random.Random(3)
    stems = [[chance.randrange(97) for _ in range(12)] for _ in range(4)]
    prompts = [
        [*chance.choice(stems)[: chance.randint(1, 12)], chance.randrange(97)] for _ in range(60)
    ]
    drafter = OracleDrafter(
        [p + target.answer(p, 9) for p in prompts], depth=3, wrong=0.3, taps=(1,)
    )
    engine = Engine(target, drafter, walk)
    loop, cache = loop_of(engine, 3, keeps_prefixes=True)
    requests = [engine.request(p, i, max_new_tokens=9) for i, p in enumerate(prompts)]
    for request in requests:
        loop.submit(request)
        if chance.random() < 0.3:
            list(loop.turn())
        if chance.random() < 0.1:
            loop.abort(chance.choice(requests))
    for _ in loop.run():
        pass
    for request, prompt in zip(requests, prompts, strict=True):
        whole = target.answer(prompt, 9)
        assert request.emitted == whole[: len(request.emitted)]
        assert request.finish_reason == "abort" or len(request.emitted) == 9
    assert loop.leaks() == "" and drafter.rows == set()
    loop.scheduler.forget()
    assert cache.lengths == [0, 0, 0] and loop.leaks() == ""
    prefilled = sum(len(tokens) for call in target.calls for _, tokens, _ in call if len(call) == 1)
    assert prefilled < sum(len(prompt) for prompt in prompts) + 60 * 9
