"""Numbers of the scripts that time training and judge predictions."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def steps(seconds):
    return [{"seconds": each, "loss": 2.0, "accuracy": 0.5} for each in seconds]


def test_the_first_step_is_not_counted():
    row = runpy.run_path(str(FOLDER / "training_throughput.py"))["row"]
    found = row(("speculators", "sdpa"), steps([9, 2, 4]), steps([8, 1, 2]), [100, 200])
    assert found["num_steps"] == 2 and found["tokens_per_second"] == 300 / 6
    assert found["ours_over_it"] == 2.0 and found["ours_over_it_ci"] == (2.0, 2.0)


def test_errors_of_predictions_are_shares_of_what_was_measured():
    script = runpy.run_path(str(FOLDER / "predictions.py"))
    numbers = {"predicted_tau": 2.2, "measured_tau": 2.0}
    numbers |= {"predicted_speedup": 0.9, "measured_speedup": 1.0}
    row = script["with_errors"](numbers)
    assert row["tau_error"] == pytest.approx(0.1)
    assert row["speedup_error"] == pytest.approx(-0.1)
    medians = script["medians"]([row, row | {"tau_error": -0.3}])
    assert medians["median_tau_error"] == pytest.approx(0.2)
    assert script["medians"]([]) == {}


def test_a_trainer_of_ours_that_cannot_run_is_told_and_kept(tmp_path, monkeypatch, capsys):
    script = runpy.run_path(str(FOLDER / "training_throughput.py"))
    names, out = script["main"].__globals__, tmp_path / "out.json"

    def start(_wanted, _job, errors, **_places):
        errors["ours_training", "by text"] = "exit status 1: no torch"
        return {}

    monkeypatch.setitem(names, "prepare", lambda *_: ({}, [100], {"cpu": "c"}))
    monkeypatch.setitem(names, "start", start)
    monkeypatch.setitem(names, "take_turns", lambda *_: {("speculators", "sdpa"): steps([9, 2])})
    monkeypatch.setattr(sys, "argv", ["training_throughput.py", "--out", str(out)])
    assert script["exit_status"](script["main"]) == 1
    assert "no torch" in capsys.readouterr().out
    kept = json.loads(out.read_text(encoding="utf-8"))
    assert kept["rows"] == [] and "no torch" in kept["errors"]["ours_training by text"]
