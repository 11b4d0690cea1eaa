"""The work a pass cannot do without, and the limit that follows."""

from __future__ import annotations

import torch

from fakes import tiny_model
from slipstream.bench import profile as profiling
from slipstream.bench.profile import Machine, measure_machine, profile, times, work_of
from slipstream.target.hf import HFTarget


def test_work_is_counted_from_the_shapes() -> None:
    target = HFTarget(tiny_model(), decoder="fused")  # 4 layers, hidden 48, heads 6 and 2 of 16
    work = work_of(target, n=3, context=10, num_rows=2)
    projections = 4 * 48 * 16 * (6 + 2 + 2 + 6)
    assert work["projections"] == (4 * projections, 2 * 6 * projections)
    assert work["mlp"] == (4 * 4 * 3 * 48 * 64, 2 * 6 * 4 * 3 * 48 * 64)
    assert work["head"] == (4 * 48 * 97, 2 * 6 * 48 * 97)
    assert work["attention"] == (4 * 2 * 4 * 13 * 2 * 2 * 16, 4 * 4 * 6 * 13 * 6 * 16)


def test_a_limit_is_the_larger_of_reading_and_multiplying() -> None:
    machine = Machine(bandwidth=10.0, rate=100.0)
    assert machine.limit(50, 100) == 5.0
    assert machine.limit(10, 1000) == 10.0


def test_a_devices_work_is_waited_for_before_both_readings(monkeypatch) -> None:
    """A device that computes for 10 s per call, while the call itself returns at once."""
    clock, queued = [0.0], [3.0]  # something was asked before

    def wait(_device) -> None:
        clock[0] += queued[0]
        queued[0] = 0.0

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: clock[0])
    run = lambda: queued.__setitem__(0, queued[0] + 10.0)  # noqa: E731
    assert times(run, 2, torch.device("cuda")) == [10.0, 10.0]
    assert times(run, 1, torch.device("cpu")) == [0.0]


def test_the_stock_decoder_has_a_whole_only() -> None:
    machine = measure_machine(torch.float32, torch.device("cpu"))
    assert machine.bandwidth > 1e6 and machine.rate > 1e6
    target = HFTarget(tiny_model())
    assert [part.name for part in profile(target, machine, n=2, context=5)] == ["pass"]
    fused = HFTarget(tiny_model(), decoder="fused")
    names = [part.name for part in profile(fused, machine, n=2, context=5)]
    assert names == ["projections", "mlp", "other", "pass"]
