"""Scripts of `benchmarks/` tell a mistake in one message, before anything is loaded or measured."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import slipstream
from slipstream.cli.main import exit_status
from slipstream.errors import SettingError
from slipstream.target import hf

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
WITH_OUT = (
    "ablations", "acceptance", "block_sampling", "confidence", "draft_cost", "load", "memory",
    "predictions", "training_throughput", "trees", "engines/run", "engines/validate", "peers/run",
)  # fmt: skip


@pytest.fixture
def told(monkeypatch, capsys):
    """Runs a script that may load nothing; its exit status and what it said."""

    def loads(*_arguments, **_options):
        raise AssertionError("loaded")

    for place, name in ((slipstream, "load"), (hf, "load_target"), (hf, "load_tokenizer")):
        monkeypatch.setattr(place, name, loads)

    def run(name, *words):
        path = FOLDER / f"{name}.py"
        monkeypatch.syspath_prepend(str(path.parent))
        monkeypatch.setattr(sys, "argv", [path.name, *words])
        script = runpy.run_path(str(path))
        with monkeypatch.context() as lent:
            if name == "memory":
                lent.setattr(script["subprocess"], "run", loads)
            code = script["exit_status"](script["main"])
        return code, capsys.readouterr().err

    monkeypatch.setattr(sys, "path", [*sys.path])  # scripts put their own folders there
    before = {*sys.modules}
    yield run
    for name in {*sys.modules} - before:  # two folders have a run.py
        if FOLDER in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


@pytest.mark.parametrize("name", WITH_OUT)
def test_a_missing_folder_is_told_first(told, tmp_path, name):
    given = {"engines/run": ("vllm",), "ablations": ("--data", "features")}.get(name, ())
    code, said = told(name, *given, "--out", str(tmp_path / "nowhere" / "x.json"))
    assert code == 2 and "nowhere does not exist" in said and "hint: " in said


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("load", ("--methods", "eagel3"), "Did you mean: eagle3"),
        ("load", ("--clients", "1,x"), "clients is '1,x'"),
        ("load", ("--clients", "0"), "clients is '0'"),
        ("confidence", ("--methods", "eagel3"), "Did you mean: eagle3"),
        ("confidence", ("--tasks", "mt_bank"), "mt_bench"),
        ("memory", ("--methods", "eagel3"), "Did you mean: eagle3"),
        ("predictions", ("--methods", "eagel3"), "Did you mean: eagle3"),
        ("predictions", ("--methods", "eagle3=nowhere"), "nowhere"),
        ("predictions", ("--tasks", "mt_bank"), "mt_bench"),
        ("passes", ("--axes", "n,rows"), "no axis 'rows'"),
        ("passes", ("--axes", ","), "axes is ','"),
        ("acceptance", ("--task", "mt_bank"), "mt_bench"),
        ("block_sampling", ("--drafter", "nowhere"), "nowhere"),
        ("training_throughput", ("--drafter", "nowhere"), "nowhere"),
    ],
)
def test_a_misspelt_name_is_told_first(told, name, words, says):
    code, said = told(name, *words)
    assert code == 2 and says in said and "Traceback" not in said


def test_a_script_ends_with_its_own_status():
    assert exit_status(lambda: None) == 0
    assert exit_status(lambda: 1) == 1


def test_a_script_tells_what_went_wrong(capsys):
    def wrong(error):
        raise error

    assert exit_status(lambda: wrong(SettingError("limit", 0, "1", "type 1"))) == 2
    assert capsys.readouterr().err == "error: limit is 0, expected 1\nhint: type 1\n"
    assert exit_status(lambda: wrong(KeyboardInterrupt())) == 130
    assert exit_status(lambda: wrong(OSError(28, "no space left", "x"))) == 2
    assert "error: x: no space left" in capsys.readouterr().err
