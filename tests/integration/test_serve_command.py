"""`slipstream serve` before a model is loaded: refusals, and the commands of other engines."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cli.options import Setup
from slipstream.errors import SettingError, SlipstreamError
from slipstream.formats import detect
from slipstream.serve.distributed import CHECKED, ENGINES, handover
from slipstream.tune import exports
from slipstream.tune.optimum import PLAIN, Setting

WHERE = {"host": "0.0.0.0", "port": 9000, "folder": "out", "model": "m", "loadable": "org/m"}


def test_vllm_gets_a_chain_of_the_depth() -> None:
    tree = Setting("eagle3", "dynamic", 16, 4, 4)
    found = handover("vllm", tree, source="zoo:eagle3", max_length=2048, **WHERE)
    words = list(found.command)
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": "out", "num_speculative_tokens": 4}
    assert words[:3] == ["vllm", "serve", "org/m"]
    assert words[words.index("--max-model-len") + 1] == "2048"
    assert found.convert[:6] == ("slipstream", "convert", "--from", "zoo:eagle3", "--to", "vllm")
    assert any("chain of 4" in note for note in found.notes)
    assert [shlex.split(line) for line in str(found).splitlines()] == [
        list(found.convert), words,
    ]  # fmt: skip


def test_sglang_gets_the_tree() -> None:
    tree = Setting("eagle3", "dynamic", 16, 4, 4, lookup=True)
    found = handover("sglang", tree, source="folder", **WHERE)
    words = list(found.command)
    for flag, value in (
        ("--speculative-algorithm", "EAGLE3"),
        ("--speculative-num-steps", "4"),
        ("--speculative-eagle-topk", "4"),
        ("--speculative-num-draft-tokens", "17"),
        ("--speculative-draft-model-path", "out"),
    ):
        assert words[words.index(flag) + 1] == value
    assert "specforge" in found.convert
    assert any("prompt lookup" in note for note in found.notes)


@pytest.mark.parametrize(
    ("engine", "method"),
    [("vllm", m) for m in exports._VLLM if m != "ngram"]
    + [("sglang", m) for m in exports._SGLANG if m != "ngram"],
)
def test_every_method_is_converted_to_files_that_exist(engine: str, method: str) -> None:
    """The dialect has a place for the method's network, and the engine reads it."""
    found = handover(engine, Setting(method, "chain", 4, 4, 1), source="folder", **WHERE)
    network = {"eagle2": "eagle", "hass": "eagle", "ddtree": "dflash"}.get(method, method)
    dialect = detect.dialect_for(found.convert[found.convert.index("--to") + 1], network)
    reads = {"vllm": "vLLM", "sglang": "SGLang"}[engine]
    assert reads in dialect.readers or (engine, network) == ("sglang", "dflash")
    has_note = any("slot j of a block" in note for note in found.notes)
    assert has_note == (network == "dflash")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_whole_model_drafts_as_it_is(slipstream: object, engine: str) -> None:
    code, out, err = slipstream(
        "serve", "--engine", engine, "--method", "chain", "--model", "o/m", "--drafter", "o/small",
        "--no-start",
    )  # fmt: skip
    words = shlex.split(out)
    assert code == 0 and len(out.splitlines()) == 1 and "convert" not in words, err
    if engine == "vllm":
        config = json.loads(words[words.index("--speculative-config") + 1])
        assert (config["method"], config["model"]) == ("draft_model", "o/small")
    else:
        assert words[words.index("--speculative-draft-model-path") + 1] == "o/small"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_small_network_of_our_own_is_exported_as_a_whole_model(
    slipstream: object, engine: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "slipstream-language"}')
    told = ("serve", "--engine", engine, "--method", "chain", "--model", "o/m", "--no-start")
    code, out, err = slipstream(*told, "--drafter", tmp_path)
    convert, command = map(shlex.split, out.splitlines())
    assert code == 0 and convert[convert.index("--to") + 1] == "transformers", err
    written = convert[convert.index("--output") + 1]
    assert any(written in word for word in command)
    code, out, err = slipstream(*told, "--drafter", "o/small", "--output", tmp_path / "x")
    assert (code, out) == (2, "") and "loads o/small as it is" in err


@pytest.mark.parametrize("engine", ENGINES)
def test_a_shifted_block_drafter_is_refused_before_anything_is_done(
    slipstream: object, engine: str, tmp_path: Path
) -> None:
    """Both engines take slot j for token j; what ships says the token after."""
    (tmp_path / "config.json").write_text('{"dflash_config": {"shift_label": true}}')
    told = ("serve", "--engine", engine, "--method", "ddtree", "--model", "o/m", "--drafter")
    code, out, err = slipstream(*told, tmp_path, "--no-start")
    assert (code, out) == (2, "") and "token after their own" in err and "is_shifted=false" in err
    (tmp_path / "config.json").write_text('{"dflash_config": {"shift_label": false}}')
    code, out, err = slipstream(*told, tmp_path, "--no-start")
    assert code == 0 and out.startswith("slipstream convert"), err


def test_plain_and_missing_methods() -> None:
    plain = handover("vllm", PLAIN, source=None, **WHERE)
    assert plain.convert == () and not any("spec" in word for word in plain.command)
    with pytest.raises(SettingError, match="lookahead, expected one that vllm has"):
        handover("vllm", Setting("lookahead", "static", 8, 4, 1), source=None, **WHERE)


def fake_engine(folder: Path, engine: str, version: str) -> dict[str, str]:
    """An environment in which an engine is installed that says how it was called."""
    about = folder / f"{engine}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n")
    program = folder / "vllm"
    program.write_text('#!/bin/sh\necho "started: $@"\necho "key: $VLLM_API_KEY"\n')
    program.chmod(0o755)
    module = folder / "sglang"
    module.mkdir()
    (module / "launch_server.py").write_text("import sys\nprint('started:', *sys.argv[1:])\n")
    return os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
    }


@pytest.mark.parametrize(
    ("engine", "version", "options", "is_started"),
    [
        ("vllm", CHECKED["vllm"] + ".1", (), True),
        ("vllm", CHECKED["vllm"] + ".1", ("--no-start",), False),
        ("vllm", "0.1.0", (), False),
        ("sglang", CHECKED["sglang"], (), True),
    ],
)
def test_an_installed_engine_is_started_if_its_flags_are_known(
    tmp_path: Path, engine: str, version: str, options: tuple, is_started: bool
) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "slipstream", "serve", "--engine", engine, "--method", "ngram",
            "--model", "o/m", "--port", "7777", *options,
        ],
        env=fake_engine(tmp_path, engine, version), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said, *started = done.stdout.splitlines()
    assert version in done.stderr and ("look at its --help" in done.stderr) == (version == "0.1.0")
    assert bool(started) == is_started
    if is_started:
        words = shlex.split(said)[1 if engine == "vllm" else 3 :]
        assert started[0] == "started: " + " ".join(words) and "7777" in words


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("by_environment", [True, False])
def test_the_key_reaches_the_engine_and_is_not_printed(
    tmp_path: Path, engine: str, by_environment: bool
) -> None:
    """Without it the engine would open its API to everybody."""
    given = () if by_environment else ("--api-key", "s3cret")
    environment = fake_engine(tmp_path, engine, CHECKED[engine])
    done = subprocess.run(
        [
            sys.executable, "-m", "slipstream", "serve", "--engine", engine, "--method", "ngram",
            "--model", "o/m", *given,
        ],
        env=environment | ({"SLIPSTREAM_API_KEY": "s3cret"} if by_environment else {}),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said, started, *key = done.stdout.splitlines()
    assert done.returncode == 0 and "s3cret" not in said + done.stderr
    assert "the API key is not printed" in done.stderr
    if engine == "vllm":
        assert key == ["key: s3cret"] and "s3cret" not in started
    else:
        assert started.endswith("--api-key s3cret")


@pytest.mark.parametrize(
    ("engine", "rows"), [("vllm", "--max-num-seqs"), ("sglang", "--max-running-requests")]
)
def test_name_dtype_and_rows_are_handed_over(slipstream: object, engine: str, rows: str) -> None:
    code, out, _ = slipstream(
        "serve", "--engine", engine, "--method", "ngram", "--model", "o/m", "--served-name", "s",
        "--dtype", "float16", "--num-rows", "8",
    )  # fmt: skip
    words = shlex.split(out)
    for flag, value in (("--served-model-name", "s"), ("--dtype", "float16"), (rows, "8")):
        assert words[words.index(flag) + 1] == value
    plain = shlex.split(slipstream("serve", "--engine", engine, "--method", "ngram")[1])
    assert code == 0 and not {"--served-model-name", "--dtype", rows} & set(plain)


@pytest.mark.real
def test_nothing_is_started_before_the_drafter_is_exported(
    slipstream: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.serve import distributed

    monkeypatch.setattr(distributed, "version", lambda _: CHECKED["vllm"] + ".0")
    monkeypatch.setattr("os.execvp", lambda *_: pytest.fail("started"))
    code, out, _ = slipstream("serve", "--engine", "vllm", "--method", "eagle3")
    assert code == 0 and out.startswith("slipstream convert") and len(out.splitlines()) == 2


def test_tuned_settings_are_handed_over(slipstream: object, tmp_path: Path) -> None:
    tuned = {
        "best": {"method": "ngram", "tree": "chain", "budget": 5, "depth": 5, "topk": 1,
                 "lookup": False, "name": "ngram:chain,depth=5"},
        "lengths_by_rows": {"1": {"depth": 6, "predicted_speedup": 2.0},
                            "8": {"depth": 0, "predicted_speedup": 1.0}},
    }  # fmt: skip
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(tuned))
    code, out, err = slipstream("serve", "--engine", "vllm", "--tuned", path, "--model", "o/m")
    words = shlex.split(out)
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert code == 0 and config["method"] == "ngram" and config["num_speculative_tokens"] == 6
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 7, 6], [8, 8, 0]]
    assert "one length" not in err
    path.write_text(json.dumps(tuned | {"best": tuned["best"] | {"method": "none"}}))
    code, out, err = slipstream("serve", "--engine", "vllm", "--tuned", path, "--model", "o/m")
    assert code == 0 and "speculative" not in out
    for text in ("{}", "[", '{"best": {"method": "none"}, "lengths_by_rows": []}'):
        path.write_text(text)
        code, out, err = slipstream("serve", "--engine", "vllm", "--tuned", path)
        assert code == 2 and "a result of `slipstream tune`" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "tgi"], "no engine 'tgi'"),
        (["--num-rows", "0"], "num-rows is 0"),
        (["--timeout", "0"], "timeout is 0"),
        (["--drain", "inf"], "drain is inf"),
        (["--max-length", "0"], "max-length is 0"),
        (["--output", "x"], "output is x, expected nothing here"),
        (["--method", "egale3"], "Did you mean"),
        (["--api-key", ""], "api-key is empty"),
        (["--engine", "vllm", "--api-key", " "], "api-key is empty"),
        (["--engine", "vllm", "--api-key", "a", "--api-key", "b"], "given 2 times"),
        (["--engine", "vllm", "--dtype", "int8"], "dtype is int8"),
        (["--engine", "sglang", "--budget", "auto"], "budget is auto"),
        (["--engine", "vllm", "--timeout", "600"], "timeout is 600.0, expected nothing with"),
        (["--engine", "sglang", "--threads", "2"], "threads is 2, expected nothing with"),
        (["--engine", "sglang", "--verifier", "walk"], "verifier is walk, expected nothing with"),
    ],
)
def test_refusals(slipstream: object, arguments: list[str], words: str) -> None:
    code, out, err = slipstream("serve", *arguments)
    assert (code, out) == (2, "") and words in err and "Traceback" not in err


def test_a_key_that_is_set_to_nothing_is_refused(
    slipstream: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "")
    code, _, err = slipstream("serve", "--engine", "vllm", "--method", "ngram", "--model", "o/m")
    assert code == 2 and "api-key is empty" in err and "unset SLIPSTREAM_API_KEY" in err


@pytest.mark.parametrize(
    ("method", "verifier", "rule"),
    [
        ("specinfer", None, "walk"),
        ("sequoia", None, "walk"),
        ("specinfer", "with-replacement", "with-replacement"),
        ("ngram", None, "walk"),
    ],
)
def test_the_rule_is_one_that_load_does_not_change(
    slipstream: object, monkeypatch: pytest.MonkeyPatch, method: str, verifier: str, rule: str
) -> None:
    """Its noise is keyed; another one is used if asked for, with a note."""
    seen = []

    def load(setup: Setup, **_: object) -> None:
        seen.append(setup.rule())
        raise SlipstreamError("seen enough")

    monkeypatch.setattr(Setup, "load", load)
    monkeypatch.setattr("slipstream.assemble.locate", lambda *_: None)
    given = () if verifier is None else ("--verifier", verifier)
    code, _, err = slipstream("serve", "--method", method, "--port", "0", *given)
    assert (code, seen) == (2, [rule]) and "seen enough" in err
    assert ("depends on the load" in err) == (rule != "walk")


def test_a_taken_port_is_one_error(slipstream: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, out, err = slipstream("serve", "--method", "none", "--port", port)
    assert (code, out) == (2, "") and "in use" in err


def test_the_other_engines_command_is_the_only_output(slipstream: object) -> None:
    code, out, err = slipstream(
        "serve", "--engine", "sglang", "--method", "ngram", "--model", "o/m"
    )
    assert code == 0 and out.startswith("python -m sglang.launch_server --model-path o/m")
    assert len(out.splitlines()) == 1 and "NGRAM" in out and "note: " in err
