"""`slipstream serve` before a model is loaded: refusals, and the commands of other engines."""

from __future__ import annotations

import json
import shlex
import socket

import pytest

from slipstream.errors import SettingError
from slipstream.serve.distributed import handover
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


def test_plain_and_missing_methods() -> None:
    plain = handover("vllm", PLAIN, source=None, **WHERE)
    assert plain.convert == () and not any("spec" in word for word in plain.command)
    with pytest.raises(SettingError, match="lookahead, expected one that vllm has"):
        handover("vllm", Setting("lookahead", "static", 8, 4, 1), source=None, **WHERE)


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
    ],
)
def test_refusals(slipstream: object, arguments: list[str], words: str) -> None:
    code, out, err = slipstream("serve", *arguments)
    assert (code, out) == (2, "") and words in err and "Traceback" not in err


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
