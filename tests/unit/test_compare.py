"""`benchmarks/compare.py`: two files on disk, one exit status."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "mt_bench_greedy.json"


@pytest.fixture(scope="module")
def compare():
    return runpy.run_path(str(ROOT / "benchmarks" / "compare.py"))["main"]


def test_a_result_is_no_worse_than_itself(compare, capsys):
    assert compare([str(RESULT), str(RESULT)]) == 0
    shown = capsys.readouterr().out
    assert "no worse than" in shown and "eagle3+lookup on mt_bench" in shown


def test_a_slower_method_is_worse(compare, tmp_path, capsys):
    value = json.loads(RESULT.read_text(encoding="utf-8"))
    value["environment"]["is_busy"] = False  # seconds of a busy machine are not judged
    before, slower = tmp_path / "before.json", tmp_path / "slower.json"
    before.write_text(json.dumps(value), encoding="utf-8")
    for sample in value["samples"]:
        if sample["method"] == "ngram":
            sample["decode_seconds"] *= 1.3
    slower.write_text(json.dumps(value), encoding="utf-8")
    assert compare([str(before), str(slower)]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" worse")]
    assert len(lines) == 2 and all("ngram" in line for line in lines)  # speed-up and tokens/s
    assert compare([str(before), str(slower), "--tolerance", "0.5"]) == 0


def test_what_is_no_result_is_an_error(compare, tmp_path, capsys):
    (tmp_path / "o.json").write_text("{}", encoding="utf-8")
    assert compare([str(RESULT), str(tmp_path / "o.json")]) == 2
    assert "is not a bench result" in capsys.readouterr().err
