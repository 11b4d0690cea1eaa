"""A row that has drafted nothing for long drafts on as if it had drafted all along."""

from __future__ import annotations

import pytest
import torch

from fakes import (
    growth,
    random_dflash,
    random_eagle,
    random_eagle3,
    random_language,
    tiny_target,
)
from slipstream.drafters.chain import ChainDrafter
from slipstream.drafters.pending import Pending
from slipstream.engine.engine import Engine
from slipstream.engine.loop import Loop
from slipstream.engine.meter import Meter
from slipstream.verify.walk import walk

PAUSE = 80  # steps, more than a drafter reads at once
MAKERS = {
    "eagle": random_eagle,
    "eagle3": random_eagle3,
    "chain": random_language,
    "whole model": lambda target: ChainDrafter.from_target(
        tiny_target("llama", num_hidden_layers=1), target, growth()
    ),
    "dflash": random_dflash,
}


class Pauses:
    """In place of a throttle: nothing is drafted in the first steps."""

    def __init__(self, num_steps: int) -> None:
        self._left = num_steps

    def choose(self, num_rows: int) -> int:
        self._left -= 1
        return 0 if self._left >= 0 else 64

    def note(self, num_rows: int, width: int, **found: object) -> None: ...


def trees_by_place(target, drafter, pause: int) -> tuple[dict[int, tuple], list[int]]:
    """Each turn's tree by the length of the text it grew from, and the answer."""
    engine = Engine(target, drafter, walk)
    request = engine.request([3, 1, 4, 1, 5], 0, max_new_tokens=PAUSE + 40, trace=True)
    loop = Loop(
        target, drafter, walk, target.new_cache(1, 512), Meter(),
        num_rows=1, chunk=8, throttle=Pauses(pause),
    )  # fmt: skip
    loop.submit(request)
    list(loop.run())
    place, found = len(request.tokens) - sum(len(s.emitted) for s in request.steps), {}
    for step in request.steps:
        found[place] = (step.tree.tokens.tolist(), step.tree.parents.tolist())
        place += len(step.emitted)
    return found, request.tokens


@pytest.mark.parametrize("name", MAKERS)
def test_after_a_pause_a_row_drafts_what_it_would_have_drafted(name):
    target = tiny_target()
    drafter = MAKERS[name](target)
    always, answer = trees_by_place(target, drafter, 0)
    paused, same = trees_by_place(target, drafter, PAUSE)
    assert answer == same
    drafted = {place: tree for place, tree in paused.items() if len(tree[0]) > 1}
    common = drafted.keys() & always.keys()
    assert min(drafted) >= PAUSE and len(common) > 5
    assert all(drafted[place] == always[place] for place in common)


def test_what_was_taken_is_read_once():
    pending = Pending()
    pending.add(1, torch.arange(6.0).view(3, 2))
    pending.add(1, torch.ones(1, 2))
    assert pending.take(1).shape == (4, 2) and pending.take(1).shape == (0, 2)
    pending.add(1, torch.ones(2, 2))
    assert pending.count(1) == 2 and pending.take(1).shape == (2, 2)
    pending.close(1)
    pending.close(1)
    assert pending.count(1) == 0
