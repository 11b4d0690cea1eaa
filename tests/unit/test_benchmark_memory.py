"""The benchmark of memory counts weights once, and sees what a process holds."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

import pytest
import torch

from fakes import tiny_model
from slipstream.target.hf import HFTarget

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "memory.py"
linux = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("decoder", ["stock", "fused"])
def test_weights_are_counted_once(script: dict, tied: bool, decoder: str) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    parameters = sum(each.numel() for each in model.parameters())
    final_norm = model.get_decoder().norm.weight.numel()
    target = HFTarget(model, decoder=decoder)
    assert script["weight_bytes"](target) == 4 * (parameters - final_norm)


@linux
def test_it_sees_the_peak(script: dict) -> None:
    size = 64 << 20
    before, _ = script["held"]()
    watch = script["Watch"](every=0.001)
    block = torch.ones(size // 4)
    end = time.monotonic() + 10
    while not watch.anonymous - before > 0.9 * size and time.monotonic() < end:
        time.sleep(0.001)  # until the watcher has looked
    del block
    watch.end()
    assert 0.9 * size < watch.anonymous - before < 3 * size
    assert watch.resident >= watch.anonymous


def test_a_method_without_a_network_needs_no_memory_for_one(script: dict) -> None:
    assert script["drafter_bytes"]("smollm2-135m", "ngram") == 0
    assert script["drafter_bytes"]("smollm2-135m", "eagle3") > 1e7
