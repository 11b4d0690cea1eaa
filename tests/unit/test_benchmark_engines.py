"""The comparison of two engines' acceptance; the engines themselves run elsewhere."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("engines_run", ROOT / "benchmarks/engines/run.py")


@pytest.fixture(scope="module")
def run():
    import sys

    module = importlib.util.module_from_spec(SPEC)
    sys.modules[SPEC.name] = module
    SPEC.loader.exec_module(module)
    return module


def rows(accepted, steps=10):
    """Each step gives one token more than it accepts; prefill gives one."""
    return [{"tokens": [i] * (1 + steps + a), "steps": steps} for i, a in enumerate(accepted)]


def test_equal_engines_are_close(run):
    found = run.compare(rows([5, 6, 7, 4]), rows([5, 6, 7, 4]))
    assert found["ours"] == found["theirs"] == 1.55
    assert found["is_close"] and found["same_answers"] == 4
    assert found["difference_ci"] == [0.0, 0.0]


def test_a_drafter_that_is_misread_is_not_close(run):
    found = run.compare(rows([5, 6, 7, 4] * 10), rows([1, 0, 1, 0] * 10))
    assert not found["is_close"] and found["difference"] < -0.4
    assert found["difference_ci"][1] < 0


def test_a_small_difference_within_noise_is_close(run):
    ours = [5, 6, 7, 4, 6, 5, 8, 3]
    found = run.compare(rows(ours), rows([a + d for a, d in zip(ours, [2, -2] * 4, strict=True)]))
    assert found["is_close"]


def test_every_engine_has_its_side(run):
    for name, engine in run.ENGINES.items():
        assert (run.HERE / f"{name}_side.py").is_file()
        assert engine.packages and engine.dialect


@pytest.mark.parametrize(
    ("tree", "gives"),
    [
        (None, {"tree": "chain", "depth": 5, "budget": 5}),
        ([4, 3, 12], {"tree": "dynamic", "topk": 4, "depth": 3, "budget": 12}),
    ],
)
def test_both_engines_draft_the_same_shape(tree, gives, run):
    assert run.shape_of(argparse.Namespace(chain=5, tree=tree)) == gives
