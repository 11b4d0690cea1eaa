"""Prompt lookup against its plain twin, and its cost."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from fakes import TableTarget
from slipstream.drafters.ngram import NgramDrafter, NgramIndex
from slipstream.engine.engine import Engine
from slipstream.errors import SettingError
from slipstream.verify.walk import walk


def row(tokens: list[int], key: int = 0, max_depth: int = 99, max_nodes: int = 99) -> object:
    return SimpleNamespace(key=key, tokens=tokens, max_depth=max_depth, max_nodes=max_nodes)


def plain_twin(tokens: list[int], smallest: int, largest: int) -> int | None:
    """Search backwards for each size."""
    for size in range(largest, smallest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) > size and tokens[end - size : end] == tokens[-size:]:
                return end
    return None


@pytest.mark.parametrize("seed", range(20))
def test_index_finds_what_a_search_finds(seed: int) -> None:
    chooser = random.Random(seed)
    smallest = chooser.randint(1, 2)
    largest = chooser.randint(smallest, 4)
    index, tokens = NgramIndex(smallest, largest), [chooser.randrange(4)]
    for _ in range(60):
        index.extend(tokens)
        assert index.find(tokens) == plain_twin(tokens, smallest, largest)
        tokens += [chooser.randrange(4) for _ in range(chooser.randint(1, 3))]


def drafted(tokens: list[int], **room: int) -> list[int]:
    return NgramDrafter().propose([row(tokens, **room)])[0].tokens.tolist()


def test_longest_then_latest_match() -> None:
    assert drafted([1, 2, 3, 9, 7, 3, 8, 1, 2, 3])[:3] == [3, 9, 7]
    assert drafted([5, 1, 5, 2, 5])[:2] == [5, 2]


def test_nothing_known_is_nothing_drafted() -> None:
    assert drafted([1, 2, 3]) == [3]
    assert drafted([4]) == [4]


def test_a_loop_is_drafted_whole() -> None:
    assert drafted([7, 1, 2, 1, 2]) == [2, 1, 2, 1, 2, 1, 2, 1, 2]
    assert drafted([6, 6, 6]) == [6] * 9


@pytest.mark.parametrize(("room", "length"), [({"max_depth": 3}, 3), ({"max_nodes": 2}, 2)])
def test_room_is_respected(room: dict[str, int], length: int) -> None:
    assert len(drafted([1, 2] * 9, **room)) == 1 + length
    assert drafted([1, 2] * 9, **dict.fromkeys(room, 0)) == [2]


def test_rows_are_apart_and_forgotten() -> None:
    drafter = NgramDrafter()
    drafter.open(row([1, 2, 3, 1], key=1), None)
    assert drafter.propose([row([9, 2, 8, 1], key=2)])[0].budget == 0
    assert drafter.propose([row([1, 2, 3, 1], key=1)])[0].budget > 0
    for key in (1, 2, 3):
        drafter.close(row([], key=key))
    assert drafter._rows == {}


def test_a_step_indexes_new_tokens_only() -> None:
    class Counting(list):
        reads = 0

        def __getitem__(self, at: object) -> object:
            Counting.reads += 1
            return super().__getitem__(at)

    tokens = Counting([i % 50 for i in range(4000)])
    drafter = NgramDrafter()
    drafter.open(row(tokens), None)
    Counting.reads = 0
    tokens.append(0)
    drafter.propose([row(tokens)])
    assert Counting.reads < 20


def test_it_is_believed_on_repeating_text() -> None:
    target = TableTarget(order=1, seed=3)
    answer = target.answer([1], 100)
    assert len(set(answer)) < 60, "a table of order 1 must loop"
    result = Engine(target, NgramDrafter(), walk).generate([1], max_new_tokens=100)
    assert list(result.token_ids) == answer and result.tau > 2


@pytest.mark.parametrize(
    "sizes", [{"budget": 0}, {"depth": 0}, {"smallest": 0}, {"smallest": 3, "largest": 2}]
)
def test_sizes_are_checked(sizes: dict[str, int]) -> None:
    with pytest.raises(SettingError):
        NgramDrafter(**sizes)
