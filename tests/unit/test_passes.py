"""The cost curve: measured on a target that takes a known time, smoothed, remembered."""

from __future__ import annotations

import json

import pytest

from fakes import TableTarget
from slipstream.errors import SettingError
from slipstream.target import passes
from slipstream.target.passes import CostCurve, StepCost


class SlowTarget(TableTarget):
    """Takes 2 s a pass and 0.5 s a token more, on a clock of its own."""

    clock = 0.0

    def forward(self, trees, cache, slots, **options):
        self.clock += 2 + 0.5 * sum(len(tree) for tree in trees)
        return super().forward(trees, cache, slots, **options)


def test_the_curve_is_what_the_passes_take(monkeypatch):
    monkeypatch.setattr(passes, "_now", lambda target: target.clock)
    curve = passes.measure(SlowTarget(), sizes=(1, 4, 16), context=8, repeats=3)
    assert curve.sizes == (1, 4, 16) and curve.context == 8
    assert [curve(n) for n in (1, 2, 4, 10, 16, 32)] == [2.5, 3.0, 4.0, 7.0, 10.0, 18.0]


def test_nothing_is_kept_of_the_passes():
    target = TableTarget()
    passes.measure(target, sizes=(1, 2), context=5, repeats=2)
    assert target.caches[-1].lengths == [5]


def test_widths_stay_within_a_small_context():
    curve = passes.measure(TableTarget(max_length=20), repeats=1)
    assert max(curve.sizes) < 20 and curve.context >= 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 2, 3], [1, 2, 3]), ([3, 2, 1], [2, 2, 2]), ([1, 4, 2, 3], [1, 3, 3, 3]), ([], [])],
)
def test_non_decreasing_is_the_closest(values, expected):
    assert passes.non_decreasing(values) == expected


def test_a_curve_that_cannot_be_is_refused():
    for sizes, seconds in (((2, 3), (1, 1)), ((1, 2), (2, 1)), ((1,), (0,)), ((1, 2), (1,))):
        with pytest.raises(SettingError):
            CostCurve(sizes, seconds, context=1)
    with pytest.raises(SettingError):
        passes.measure(TableTarget(), repeats=0)


def test_a_curve_is_measured_once_per_machine_and_model(tmp_path, monkeypatch):
    target, count = TableTarget(), []
    real = passes.measure
    monkeypatch.setattr(passes, "measure", lambda t: count.append(1) or real(t, repeats=1))
    first = passes.remembered(target, tmp_path / "new")
    assert passes.remembered(target, tmp_path / "new") == first and len(count) == 1
    passes.remembered(TableTarget(vocab_size=50), tmp_path / "new")
    assert len(count) == 2
    for path in (tmp_path / "new").iterdir():
        path.write_text(json.dumps({"sizes": [1]}))
    passes.remembered(target, tmp_path / "new")
    assert len(count) == 3


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    assert passes.remembered(TableTarget(), tmp_path / "file").sizes[0] == 1


def test_a_step_costs_its_pass_and_what_drafting_took():
    cost = StepCost(CostCurve((1, 2), (1.0, 2.0), context=1))
    assert cost(2) == 2.0
    cost.learn(0.5)
    assert cost(1) == 1.5
    for _ in range(200):
        cost.learn(0.1)
    assert cost(1) == pytest.approx(1.1, abs=1e-3)
