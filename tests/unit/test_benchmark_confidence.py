"""The benchmark of confidence sees every node of its fixed tree, and counts what was accepted."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import slipstream
from slipstream.types import DraftTree, Verdict

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "confidence.py"


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(SCRIPT))


def test_it_counts_by_depth_place_and_context(script: dict) -> None:
    """Two contexts whose trees look alike, of which one is accepted whole and one not at all."""
    tree = DraftTree(
        torch.tensor([5, 6, 7]), torch.tensor([-1, 0, 1]), log_probs=torch.tensor([0.0, -0.5, -0.5])
    )
    found = script["summarise"](
        {"sure": [(tree, Verdict((0, 1, 2), next_token=9))], "not": [(tree, Verdict((0,), 9))]}
    )
    assert found["num_nodes"] == 4
    assert found["places"] == [
        {"place": [0], "accepted": {"sure": 1.0, "not": 0.0}},
        {"place": [0, 0], "accepted": {"sure": 1.0, "not": 0.0}},
    ]
    (first,), (second,) = (found["by_depth"][depth]["bins"] for depth in ("1", "2"))
    assert first["count"] == 2 and first["acceptance"] == 0.5
    assert second["count"] == 1 and second["acceptance"] == 1.0, "of nodes whose parent was kept"


def test_it_keeps_what_it_found(
    script: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake:
        target = "loaded"

        def generate(self, text: str, **_options: object) -> object:
            tree = DraftTree.chain([1, 2])
            step = type("Step", (), {"tree": tree, "verdict": Verdict((0, 1), next_token=3)})
            return type("Result", (), {"steps": (step,) * len(text[:3])})

    asked = []
    monkeypatch.setattr(
        slipstream, "load", lambda target, name, **_o: asked.append((target, name)) or Fake()
    )
    monkeypatch.setitem(script["main"].__globals__, "describe", lambda _target: {"model": "m"})
    out = tmp_path / "confidence.json"
    monkeypatch.setattr(sys, "argv", ["confidence.py", "--out", str(out), "--limit", "1"])
    script["main"]()
    kept = json.loads(out.read_text())
    assert asked == [("smollm2-135m", "eagle2"), ("loaded", "eagle3")]
    assert kept["settings"]["budget"] == 14 and set(kept["methods"]) == {"eagle2", "eagle3"}
    assert len(kept["methods"]["eagle3"]["places"][0]["accepted"]) == 4, "one prompt of each task"
