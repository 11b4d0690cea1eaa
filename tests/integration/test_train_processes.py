"""Training in several processes: killed at any moment, or sharing its batches."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
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
    ends = int(call(SCRIPT, "kill", store.folder, tmp_path / "runs", "{}"))
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


def in_two(store, folder, **changes):
    call("-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", 0,
         "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0",
         SCRIPT, "run", store.folder, folder, json.dumps(changes))  # fmt: skip
    return records(folder)


def check_same(ours, theirs, *, rounding=2e-3):
    """One run and another: the same but for rounding."""
    assert len(ours) == len(theirs) == 24
    for one, other in zip(ours, theirs, strict=True):
        assert one["tokens"] == other["tokens"]
        for key in ("loss", "gradient_norm"):
            assert one[key] == pytest.approx(other[key], rel=rounding)
    ends = [curve[-1]["held_out_loss"] for curve in (ours, theirs)]
    assert ends[0] == pytest.approx(ends[1], rel=rounding)
    assert ours[-1]["loss"] < ours[0]["loss"]


@pytest.mark.full
@pytest.mark.parametrize("method", ["eagle3", "dspark"])
def test_two_processes_have_the_loss_curve_of_one(store, tmp_path, method):
    """The batches of a step are dealt out, gradients averaged: the same run but for rounding.

    The path head of `dspark` learns alone, on blocks of several widths.
    """
    run(store, tmp_path / "one", method=method)
    check_same(in_two(store, tmp_path / "two", method=method), records(tmp_path / "one"))


def check_states(ours, theirs, *, rounding=2e-3):
    """The last states of two runs: the same names and shapes, weights but for rounding."""
    one, other = (load_file(folder / "state-00000024.safetensors") for folder in (ours, theirs))
    assert {k: v.shape for k, v in one.items()} == {k: v.shape for k, v in other.items()}
    for name in one:
        if name.startswith("model."):
            assert torch.allclose(one[name], other[name], atol=rounding), name


def shorten(run, folder):
    """A copy of a run that was killed before its last state was written."""
    shutil.copytree(run, folder)
    (folder / "state-00000024.safetensors").unlink()
    return folder


@pytest.mark.parametrize(
    ("rounding", "changes"),
    [
        (2e-3, {}),
        # Muon multiplies its momentum in bfloat16, here in two halves
        pytest.param(3e-2, {"optimizer": "muon", "recompute": True}, marks=pytest.mark.full),
        pytest.param(2e-3, {"method": "dspark"}, marks=pytest.mark.full),
    ],
)
def test_a_sharded_run_is_the_whole_one(store, tmp_path, rounding, changes):
    """Parts in two processes: the curve, the files and the states of one, resumed by either."""
    one, two = tmp_path / "one", tmp_path / "two"
    run(store, one, **changes)
    check_same(in_two(store, two, shard=True, **changes), records(one), rounding=rounding)
    check_states(two, one, rounding=rounding)
    for kind in ("last", "best", "milestone"):
        ours, theirs = (load_file(folder / kind / "model.safetensors") for folder in (two, one))
        assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    on, back = shorten(one, tmp_path / "on"), shorten(two, tmp_path / "back")
    check_same(in_two(store, on, shard=True, **changes), records(one), rounding=rounding)
    check_states(on, one, rounding=rounding)
    run(store, back, **changes)
    check_same(records(back), records(two), rounding=rounding)
    check_states(back, two, rounding=rounding)
