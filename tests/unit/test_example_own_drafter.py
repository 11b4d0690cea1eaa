"""The example of a user's own drafter runs, is believed, and changes nothing."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import slipstream
from fakes import TableTarget

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_drafter.py"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLE))
    target = TableTarget(order=1, seed=3)
    assert example["main"]([1, 2, 3], target, 80)
    printed = capsys.readouterr().out
    tau = float(printed.split("tokens per target pass: ")[1].split()[0])
    assert tau > 1.5 and "same tokens as plain decoding: True" in printed


def test_it_leaves_nothing_behind() -> None:
    drafter = runpy.run_path(str(EXAMPLE))["Bigrams"]()
    engine = slipstream.load(TableTarget(order=1), drafter=drafter)
    engine.generate([[i, i + 1] for i in range(7)], max_new_tokens=20, num_rows=3)
    assert drafter.maps == {}
