"""The load benchmark counts what its clients saw."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import slipstream
from fakes import ByteTokenizer, TableTarget
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.verify.walk import walk

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "load.py"


class Prompt(NamedTuple):
    text: str


@pytest.fixture(scope="module")
def load() -> dict:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("count", [1, 5])
def test_closed_loop_clients(load: dict, count: int) -> None:
    target = TableTarget(257, tokenizer=ByteTokenizer(), max_length=128)
    engine = Engine(target, NoDrafter(), walk)
    row = load["measure"](
        "plain", engine, count, seconds=0.5, num_rows=2, prompts=["ab", "c"], limit=4
    )
    assert (
        row.method == "plain" and row.clients == count and row.requests > count and row.errors == 0
    )
    assert row.tau == 1.0 and 0 < row.between_tokens[0] <= row.between_tokens[2]
    assert row.tokens_per_second * row.seconds >= 3 * row.requests
    assert 0 < row.first_token[0] <= row.first_token[1]


def test_every_method_is_beside_plain_decoding(
    load: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TableTarget(257, tokenizer=ByteTokenizer(), max_length=128)
    asked = []

    def fake_load(model: object, method: str, **settings: object) -> Engine:
        asked.append((model, method, settings))
        return Engine(target, NoDrafter(), walk)

    monkeypatch.setattr(slipstream, "load", fake_load)
    monkeypatch.setitem(load["main"].__globals__, "describe", lambda _target: {})
    monkeypatch.setitem(load["main"].__globals__, "read_task", lambda _task: [Prompt("ab")])
    out = tmp_path / "load.json"
    words = "load.py --methods eagle3+lookup:budget=auto --clients 1,2 --seconds 0.2 --out"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(out)])
    load["main"]()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["method"], row["clients"]) for row in rows] == [
        ("none", 1), ("eagle3+lookup:budget=auto", 1), ("none", 2), ("eagle3+lookup:budget=auto", 2)
    ]  # fmt: skip
    assert rows[0]["over_plain"] == rows[2]["over_plain"] == 1.0 and rows[1]["over_plain"] > 0
    assert asked[0][:2] == ("smollm2-135m", "none") and asked[1][0] is target
    assert asked[1][2] == {"max_length": 2048, "lookup": True, "budget": "auto"}


def test_percentiles(load: dict) -> None:
    assert load["percentiles"]([float(n) for n in range(101)]) == (50.0, 95.0, 99.0)
    assert load["percentiles"]([]) == (0.0, 0.0, 0.0)
