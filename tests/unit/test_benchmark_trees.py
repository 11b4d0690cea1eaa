"""The benchmark of tree building measures every kind there is, on any target."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from fakes import tiny_target
from slipstream.trees import kinds

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "trees.py"


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(SCRIPT))


def test_it_builds_every_kind_that_branches(script: dict) -> None:
    built = {name: build() for name, build in script["builds"](20, 97).items()}
    assert set(built) == (set(kinds.KINDS) - {"chain"}) | {"marginals"}
    assert {tree.budget for tree in built.values()} == {20}
    again = script["builds"](20, 97)["dynamic"]()
    assert torch.equal(again.tokens, built["dynamic"].tokens)  # the scores are the same each time


def test_it_measures_against_a_pass(script: dict) -> None:
    found = script["measure"](tiny_target(), nodes=6, rounds=2)
    assert found["nodes"] == 6 and found["pass_seconds"] > 0
    for row in found["rows"]:
        assert row["share"] == pytest.approx(row["seconds"] / found["pass_seconds"])


def test_it_keeps_what_it_found(
    script: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "trees.json"
    words = ["trees.py", "--out", str(out), "--nodes", "4", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setitem(script["main"].__globals__, "load_target", lambda *_, **__: tiny_target())
    script["main"]()
    kept = json.loads(out.read_text())
    assert kept["environment"]["model"] == "tiny-llama"
    assert "a pass over 5 tokens" in capsys.readouterr().out
