"""`slipstream profile` on a tiny model: every part beside its limit."""

from __future__ import annotations

import json

import pytest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_stand_beside_their_limits(slipstream, model, tmp_path, dtype):
    chart = tmp_path / "profile.svg"
    code, out, err = slipstream(
        "profile", "--model", model, "--dtype", dtype, "--device", "cpu", "--sizes", "3,1",
        "--context", 20, "--num-rows", 2, "--json", "--output", chart,
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert found["bandwidth"] > 0 and found["rate"] > 0 and found["n"] == 3
    assert [each["n"] for each in found["passes"]] == [3, 1]
    parts = {part["name"]: part for part in found["components"]}
    assert parts["pass"]["seconds"] > parts["pass"]["limit_seconds"] > 0
    inside = [part for name, part in parts.items() if name != "pass"]
    assert {"projections", "mlp", "other"} <= parts.keys()
    assert sum(part["seconds"] for part in inside) >= 0.5 * parts["pass"]["seconds"]
    assert chart.read_text().startswith("<svg")


def test_people_get_a_table(slipstream, model):
    code, out, err = slipstream(
        "profile", "--model", model, "--dtype", "float32", "--sizes", "2", "--context", 8
    )
    assert code == 0, err
    assert "n = 2" in out and "GB/s" in out and "decoder" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sizes", "1,x"], "sizes is '1,x', expected numbers"),
        (["--sizes", "0"], "expected numbers of 1 or more"),
        (["--output", "p.png"], "ends in .svg"),
        (["--context", "0"], "context is 0"),
        (["--dtype", "int9"], "no dtype 'int9'"),
    ],
)
def test_mistakes_are_told(slipstream, arguments, says):
    code, out, err = slipstream("profile", *arguments)
    assert code == 2 and out == "" and says in err


def test_a_context_that_does_not_fit_is_refused(slipstream, model):
    code, _, err = slipstream("profile", "--model", model, "--context", 300, "--dtype", "float32")
    assert code == 2 and "context is 300" in err
