"""The load benchmark counts what its clients saw."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from fakes import ByteTokenizer, TableTarget
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.verify.walk import walk

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "load.py"


@pytest.fixture(scope="module")
def load() -> dict:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("count", [1, 5])
def test_closed_loop_clients(load: dict, count: int) -> None:
    target = TableTarget(257, tokenizer=ByteTokenizer(), max_length=128)
    engine = Engine(target, NoDrafter(), walk)
    row = load["measure"](engine, count, seconds=0.5, num_rows=2, prompts=["ab", "c"], limit=4)
    assert row.clients == count and row.requests > count and row.errors == 0
    assert row.tau == 1.0 and 0 < row.between_tokens[0] <= row.between_tokens[2]
    assert row.tokens_per_second * row.seconds >= 3 * row.requests
    assert 0 < row.first_token[0] <= row.first_token[1]


def test_percentiles(load: dict) -> None:
    assert load["percentiles"]([float(n) for n in range(101)]) == (50.0, 95.0, 99.0)
    assert load["percentiles"]([]) == (0.0, 0.0, 0.0)
