"""`slipstream doctor --drafter`: one line a check, and an exit status."""

import json

import pytest


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a cat?"}\n{"prompt": "three seas"}\n')
    return path


def test_a_random_drafter_fails_with_a_line_a_check(slipstream, model, drafter, prompts):
    command = ("doctor", "--drafter", drafter, "--model", model, "--prompts", prompts,
               "--dtype", "float32", "--max-new-tokens", 16)  # fmt: skip
    code, out, err = slipstream(*command, "--json")
    assert code == 1, err
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert set(checks["files"]) == {"name", "ok", "detail"} and "mask" in checks
    assert checks["decoding"]["ok"] and not all(check["ok"] for check in checks.values())
    code, out, _ = slipstream(*command)
    assert code == 1 and "FAIL" in out and "context length" in out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--prompts", "p.jsonl"), "nothing without --drafter"),
        (("--drafter", "nowhere"), "nowhere"),
        (("--drafter", "zoo:eagle3", "--method", "ngram"), "ngram"),
        (("--drafter", "zoo:eagle3", "--limit", 0), "limit is 0"),
        (("--drafter", "zoo:eagle3", "--thinking", "maybe"), "maybe"),
    ],
)
def test_mistakes_are_told(slipstream, more, says):
    code, out, err = slipstream("doctor", *more)
    assert code == 2 and not out and says in err and "Traceback" not in err


def test_prompts_that_do_not_fit_are_told(slipstream, model, drafter, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 400}) + "\n")
    code, out, err = slipstream("doctor", "--drafter", drafter, "--model", model, "--prompts", path)
    assert code == 2 and not out and "fit" in err
