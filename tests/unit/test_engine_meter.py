"""Counts and clocks. Bug reports B121, B122, B124."""

from __future__ import annotations

import pytest

from fakes import OracleDrafter, TableTarget
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.meter import Meter, Tally
from slipstream.types import DraftTree, Step, Verdict
from slipstream.verify.walk import walk

PROMPT = [1, 2, 3]


class Clock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowTarget(TableTarget):
    """A prompt costs 10 seconds, a pass over a tree 1."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, *args: object, last_only: bool = False, **options: object) -> object:
        self.clock.now += 10.0 if last_only else 1.0
        return super().forward(*args, last_only=last_only, **options)


def test_prefill_is_not_decoding() -> None:
    """B124: prefill 10 s, then 1 s for each of 10 passes; both arms say the same."""
    results = []
    for drafter in (NoDrafter(), OracleDrafter([PROMPT + TableTarget().answer(PROMPT, 11)])):
        clock = Clock()
        engine = Engine(SlowTarget(clock), drafter, walk, meter=Meter(clock))
        results.append(engine.generate(PROMPT, max_new_tokens=11))
    plain, drafted = results
    assert plain.prefill_seconds == drafted.prefill_seconds == 10.0
    assert plain.target_seconds == plain.decode_seconds == 10.0
    assert plain.seconds == 20.0 and plain.num_target_passes == 10
    assert drafted.target_seconds == drafted.num_target_passes == 2
    assert plain.token_ids == drafted.token_ids


def test_a_batched_step_is_shared_by_its_rows() -> None:
    clock = Clock()
    engine = Engine(SlowTarget(clock), NoDrafter(), walk, meter=Meter(clock))
    results = engine.generate([[1], [2], [3], [4]], max_new_tokens=5, num_rows=4)
    assert [r.target_seconds for r in results] == [1.0] * 4
    assert sum(r.seconds for r in results) == pytest.approx(clock.now - 100.0)


def test_spans_and_the_rest() -> None:
    clock, waits = Clock(), []
    meter = Meter(clock, synchronise=lambda: waits.append(1))
    meter.start()
    clock.now += 0.5
    with meter.span("draft"):
        clock.now += 2.0
    with meter.span("target"):
        clock.now += 3.0
    clock.now += 0.25
    lap = meter.lap()
    assert (lap.draft, lap.target, lap.other) == (2.0, 3.0, 0.75)
    assert lap.share(4).target == 0.75
    assert len(waits) == 6
    meter.start()
    assert meter.lap().draft == 0.0


@pytest.mark.parametrize(("wrong", "tau"), [(0.0, 5.0), (1.0, 1.0)])
def test_both_definitions_of_accepted_length(wrong: float, tau: float) -> None:
    """B122: K = 4, always right: 5 with the target's own token, 4 drafts; never right: 1 and 0."""
    target = TableTarget()
    drafter = OracleDrafter([PROMPT + target.answer(PROMPT, 80)], depth=4, wrong=wrong)
    result = Engine(target, drafter, walk).generate(PROMPT, max_new_tokens=41)
    assert result.tau == tau and result.mean_accepted == tau - 1
    assert sum(result.reach) == tau - 1
    assert result.alpha == ((1.0,) * 4 if wrong == 0 else (0.0,) * 4)


@pytest.mark.parametrize("index", range(1, 10))
def test_tokens_behind_an_end_are_not_counted(index: int) -> None:
    """B121: the metric equals emitted tokens over passes, as the ids say."""
    answer = TableTarget().answer(PROMPT, 30)
    target = TableTarget(eos_ids=(answer[index],))
    drafter = OracleDrafter([PROMPT + answer], depth=4)
    result = Engine(target, drafter, walk).generate(PROMPT, max_new_tokens=30, trace=True)
    assert sum(len(step.emitted) for step in result.steps) == len(result.token_ids) - 1
    assert len(result.steps) == result.num_target_passes
    if result.steps:
        assert result.tau == (len(result.token_ids) - 1) / len(result.steps)
    assert result.tau == pytest.approx(1 + sum(result.reach))


def test_reach_and_alpha_by_hand() -> None:
    tally, tree = Tally(), DraftTree.chain([1, 2, 3])
    for emitted in ((7,), (2, 8), (2, 3, 9), (2, 3)):
        tally.add(Step(tree, Verdict((0,), 7), emitted))
    assert tally.tau == 2.0
    assert tally.reach == (0.75, 0.25)
    assert tally.alpha == (0.75, pytest.approx(1 / 3))
    assert Tally().tau == 1.0 and Tally().reach == () and Tally().alpha == ()


def test_one_token_needs_no_pass() -> None:
    result = Engine(TableTarget(), NoDrafter(), walk).generate(PROMPT, max_new_tokens=1)
    assert (result.num_tokens, result.num_target_passes, result.tau) == (1, 0, 1.0)
