"""Stopping rules inside an accepted path: the first event wins, only emitted tokens count.

Bug reports B27, B29, B31, B32, B37, B40, B41.
"""

from __future__ import annotations

import pytest

from fakes import OracleDrafter, TableTarget
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request
from slipstream.errors import PromptTooLongError
from slipstream.sampling import Sampler
from slipstream.types import Sampling
from slipstream.verify.walk import walk

PROMPT = [5, 6, 7]


def request(limit: int = 10, stop_ids: tuple[int, ...] = ()) -> Request:
    return Request(
        key=0,
        prompt_index=0,
        tokens=list(PROMPT),
        sampler=Sampler(Sampling(), 97),
        limit=limit,
        stop_ids=frozenset(stop_ids),
        capacity=64,
        widest=8,
    )


@pytest.mark.parametrize(
    ("stop_at", "cap", "num_emitted", "reason"),
    [(3, 5, 3, "stop"), (5, 3, 3, "length"), (4, 4, 4, "stop"), (9, 6, 6, "length")],
)
def test_first_event_wins(stop_at: int, cap: int, num_emitted: int, reason: str) -> None:
    """B32: a chunk of 6 ids crosses a stop and the cap."""
    row = request(limit=cap, stop_ids=(80 + stop_at,))
    emitted = row.accept([81, 82, 83, 84, 85, 86])
    assert emitted == tuple(range(81, 81 + num_emitted))
    assert row.tokens == [*PROMPT, *emitted]
    assert row.finish_reason == reason


def test_room_shrinks_with_every_token() -> None:
    row = request(limit=4)
    assert (row.max_depth, row.max_nodes) == (3, 8)
    row.accept([1])
    assert row.max_depth == 2
    row.accept([1, 2])
    assert row.max_depth == 0 and not row.is_finished
    row.capacity = len(row.tokens) + 2
    assert row.max_nodes == 2
    row.accept([3])
    assert row.finish_reason == "length" and row.max_depth == 0


@pytest.mark.parametrize("index", range(12))
def test_stops_at_an_end_token_anywhere_in_a_block(index: int) -> None:
    """B27: each token of the answer in turn is declared the end; blocks of 8 are accepted."""
    answer = TableTarget().answer(PROMPT, 20)
    end = answer[index]
    expected = answer[: answer.index(end) + 1]
    target = TableTarget(eos_ids=(end,))
    drafter = OracleDrafter([PROMPT + answer], depth=8)
    pieces = list(Engine(target, drafter, walk).stream(PROMPT, max_new_tokens=20))
    result = pieces[-1].result
    assert list(result.token_ids) == expected and result.finish_reason == "stop"
    assert sum((p.token_ids for p in pieces), ()) == result.token_ids
    assert result.tau * result.num_target_passes == pytest.approx(len(expected) - 1)


def test_a_refused_end_token_ends_nothing() -> None:
    """B29: the drafter says the end id where the target says another one."""
    answer = TableTarget().answer(PROMPT, 20)
    end = next(i for i in range(97) if i not in answer)

    class Ending(OracleDrafter):
        def _other(self, token: int) -> int:
            return end

    drafter = Ending([PROMPT + answer], depth=4, wrong_positions=range(5, 60, 3))
    result = Engine(TableTarget(eos_ids=(end,)), drafter, walk).generate(PROMPT, max_new_tokens=20)
    assert list(result.token_ids) == answer and result.finish_reason == "length"


@pytest.mark.parametrize("ends", [(), (96, 95), (95,)])
def test_lookup_works_with_any_end_ids(ends: tuple[int, ...]) -> None:
    """B31: none, a list, one; any id of the list stops."""
    answer = TableTarget().answer([1, 2] * 8, 30)
    moved = TableTarget(eos_ids=tuple(answer[10] if e == 95 else 96 for e in ends))
    result = Engine(moved, NgramDrafter(), walk).generate([1, 2] * 8, max_new_tokens=30)
    first = next((i for i, t in enumerate(answer) if t in moved.spec.eos_ids), 29)
    assert list(result.token_ids) == answer[: first + 1]
    assert result.finish_reason == ("stop" if ends else "length")


def test_stop_ids_of_the_call_are_added_to_the_targets() -> None:
    answer = TableTarget().answer(PROMPT, 20)
    engine = Engine(TableTarget(eos_ids=(answer[9],)), NoDrafter(), walk)
    assert (
        len(engine.generate(PROMPT, stop=[answer[4], 96]).token_ids) == answer.index(answer[4]) + 1
    )
    assert len(engine.generate(PROMPT).token_ids) == answer.index(answer[9]) + 1


@pytest.mark.parametrize("cap", range(1, 6))
def test_lookup_never_passes_the_cap(cap: int) -> None:
    """B37."""
    target = TableTarget(order=1)
    prompt = [1, 2, 3, 4] * 6
    drafter = NgramDrafter(budget=8, depth=8)
    result = Engine(target, drafter, walk).generate(prompt, max_new_tokens=cap, trace=True)
    assert list(result.token_ids) == target.answer(prompt, cap)
    assert result.finish_reason == "length"
    assert all(step.tree.num_drafted < cap for step in result.steps)


@pytest.mark.parametrize("num_prompt", [48, 56, 62, 63])
def test_drafts_are_clipped_to_the_context(num_prompt: int) -> None:
    """B40, B41: context 64, chains of 16 that are always right."""
    target = TableTarget(max_length=64)
    prompt = [(3 * i) % 97 for i in range(num_prompt)]
    answer = target.answer(prompt, 20)
    drafter = OracleDrafter([prompt + answer], depth=16)
    result = Engine(target, drafter, walk).generate(prompt, max_new_tokens=1000)
    assert list(result.token_ids) == answer[: 64 - num_prompt]
    assert result.finish_reason == "length"
    assert all(max(positions) < 64 for call in target.calls for _, _, positions in call)


def test_a_prompt_that_fills_the_context_is_refused_before_anything_runs() -> None:
    target = TableTarget(max_length=64)
    engine = Engine(target, NoDrafter(), walk)
    with pytest.raises(PromptTooLongError, match=r"prompt 1 has 64 tokens, expected at most 63"):
        engine.generate([[1, 2], [1] * 64])
    assert target.calls == []
