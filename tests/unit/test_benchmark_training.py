"""Numbers of the scripts that time training and judge predictions."""

from __future__ import annotations

import argparse
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


def test_every_ablation_changes_what_its_method_has():
    """One thing at a time, by a setting that exists and is not the base's."""
    from slipstream.cli.train import _parsed
    from slipstream.train import recipes

    script = runpy.run_path(str(FOLDER / "ablations.py"))
    for method, variants in script["VARIANTS"].items():
        recipe, base = recipes.get(method), script["BASES"][method]
        names = [variant.name for variant in variants]
        assert names[0] == "base" and len(set(names)) == len(names)
        for variant in variants[1:]:
            assert variant.phases != script["Variant"]("base").phases, variant
            for phase in variant.phases:
                for name, value in phase.options:
                    assert base.get(name) != value, variant
                    if name.startswith("--set "):
                        given = _parsed([f"{name.removeprefix('--set ')}={value}"])
                        assert recipe.settings(**given) != recipe.settings(), variant


@pytest.fixture
def ablation(tmp_path, monkeypatch):
    """Trains a variant of the script by its name; the runs are made up, and told."""
    script, ran = runpy.run_path(str(FOLDER / "ablations.py")), []

    def run(command, **_options):
        told = dict(zip(command[4::2], command[5::2], strict=False))
        ran.append(told)
        place = Path(told["--output"])
        (place / "drafter").mkdir(parents=True)
        is_worse = told.get("--optimizer") == "muon"
        if is_worse:  # than the drafter it went on from
            (place / "worse").mkdir()
        depths = int(told.get("--num-unrolled", 3))
        record = {"seconds": 2.0, "tokens": 9, "held_out_loss": 3.0}
        record |= {"held_out_prefix_accuracy": [0.25] * depths, "tau": 1.5}
        lines = [{"step": 1, "seconds": 1.0}, record]
        (place / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        return argparse.Namespace(returncode=int(is_worse))

    monkeypatch.setattr(script["subprocess"], "run", run)
    asked = argparse.Namespace(
        data=Path("own"), other=Path("others"), model="m", method="eagle3", steps=10, rows=2,
        precision="bf16", seed=0, drafter=None, work=tmp_path / "work",
    )  # fmt: skip

    def train(name, **changes):
        vars(asked).update(changes)
        variants = {variant.name: variant for variant in script["VARIANTS"][asked.method]}
        row = script["train"](variants[name], asked)
        assert not asked.work.exists()
        return row, ran

    return train


def test_other_text_comes_first_and_its_seconds_count(ablation):
    row, ran = ablation("half the steps, other text before")
    assert row["seconds"] == 4.0 and row["tokens"] == 9 and row["chain_tau"] == 1.75
    assert [told["--data"] for told in ran] == ["others", "own"]
    assert [told["--steps"] for told in ran] == ["5", "5"]
    assert ran[1]["--drafter"].endswith("phase-0/drafter") and "--initial" not in ran[1]


def test_all_are_judged_three_drafts_deep(ablation):
    """What unrolls fewer has learned fewer; it is asked as deep as the others, without learning."""
    row, ran = ablation("1 unrolled step")
    assert [told["--num-unrolled"] for told in ran] == ["1", "3"]
    assert ran[1]["--learning-rate"] == "1e-12" and ran[1]["--steps"] == "1"
    assert row["seconds"] == 2.0 and row["chain_tau"] == 1.75
    row, _ = ablation("5 unrolled steps")
    assert row["chain_tau"] == 1.75 and len(row["held_out_prefix_accuracy"]) == 5


def test_a_run_that_goes_on_keeps_the_network_and_counts_where_it_is_worse(ablation):
    row, ran = ablation("Muon", method="dflash", drafter=Path("zoo/dflash"))
    assert row["chain_tau"] == 1.75 and ran[0]["--drafter"] == "zoo/dflash"
    assert "--initial" not in ran[0]
    _, ran = ablation("narrower blocks only for 50, then half")
    assert ran[1]["--set"] == "narrow=1" and ran[2]["--drafter"].endswith("phase-0/drafter")


def test_runs_that_go_on_leave_out_other_networks(monkeypatch, tmp_path, capsys):
    script, ran = runpy.run_path(str(FOLDER / "ablations.py")), []

    def fake(variant, _asked):
        ran.append(variant.name)
        return {"name": variant.name, "held_out_prefix_accuracy": [0.5], "chain_tau": 1.5,
                "seconds": 1.0, "others_share": 0.0}  # fmt: skip

    names = script["main"].__globals__
    monkeypatch.setitem(names, "train", fake)
    out = tmp_path / "ablations.json"
    words = ["--data", "own", "--method", "dflash", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["ablations.py", *words, "--drafter", "some/where/dflash"])
    assert script["exit_status"](script["main"]) == 0
    assert "base" in ran and "D-PACE weighting" in ran
    assert not {"plain read-out", "1 layer", "5 layers"} & set(ran)
    assert json.loads(out.read_text())["settings"]["drafter"] == "dflash"
    monkeypatch.setattr("sys.argv", ["ablations.py", *words])  # another question: another file
    assert script["exit_status"](script["main"]) == 2
    assert "another run" in capsys.readouterr().err
