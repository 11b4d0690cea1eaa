"""Training in several processes: killed at any moment, or sharing its batches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from training_processes import make_store, run

SCRIPT = Path(__file__).resolve().parents[1] / "training_processes.py"


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "store")


def call(*arguments):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_ten_kills_change_no_bit(store, tmp_path):
    """SIGKILL at random moments, resume: weights, optimizer and drafters of an unbroken run."""
    ends = int(call(SCRIPT, "kill", store.folder, tmp_path / "runs"))
    whole = tmp_path / "runs" / "whole"
    names = ["state-00000024.safetensors"]
    names += [f"{kind}/model.safetensors" for kind in ("last", "best", "milestone")]
    for end in range(ends):
        cut = tmp_path / "runs" / f"cut-{end}"
        for name in names:
            ours, theirs = load_file(cut / name), load_file(whole / name)
            assert ours.keys() == theirs.keys()
            assert all(bool((ours[key] == theirs[key]).all()) for key in ours), name
        assert [r["step"] for r in records(cut)] == list(range(1, 25))
        for one, other in zip(records(cut), records(whole), strict=True):
            assert {**one, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.full
def test_two_processes_have_the_loss_curve_of_one(store, tmp_path):
    """The batches of a step are dealt out, gradients averaged: the same run but for rounding."""
    run(store, tmp_path / "one")
    call("-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", 0,
         "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0",
         SCRIPT, "run", store.folder, tmp_path / "two")  # fmt: skip
    one, two = records(tmp_path / "one"), records(tmp_path / "two")
    assert len(one) == len(two) == 24
    for ours, theirs in zip(two, one, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        for key in ("loss", "gradient_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3)
    assert two[-1]["held_out_loss"] == pytest.approx(one[-1]["held_out_loss"], rel=2e-3)
    assert two[-1]["loss"] < two[0]["loss"]
