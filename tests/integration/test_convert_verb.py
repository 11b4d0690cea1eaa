"""`slipstream convert` as it is typed."""

from __future__ import annotations

import json


def test_to_and_back(slipstream, model, drafter, tmp_path):
    code, out, err = slipstream(
        "convert", "--from", drafter, "--to", "vllm", "--model", model, "--output",
        tmp_path / "vllm", "--json",
    )  # fmt: skip
    assert code == 0, err
    said = json.loads(out)
    assert (said["from"], said["to"], said["method"]) == ("slipstream", "vllm", "eagle3")
    assert said["max_logit_difference"] <= 1e-5 * max(1.0, said["largest_logit"])
    assert str(tmp_path / "vllm" / "config.json") in said["files"]
    code, out, err = slipstream(
        "convert", "--from", tmp_path / "vllm", "--model", model, "--output", tmp_path / "back"
    )
    assert code == 0, err
    assert "from vllm (eagle3): architecture Eagle3LlamaForCausalLM" in out
    assert "the same logits" in out
    code, out, err = slipstream(
        "generate", "--model", model, "--drafter", tmp_path / "vllm", "--prompt", "hello",
        "--max-new-tokens", "4", "--json",
    )  # fmt: skip
    assert code == 0, err  # a foreign folder drafts without a conversion


def test_mistakes_have_one_clear_line(slipstream, model, drafter, tmp_path):
    code, _, err = slipstream(
        "convert", "--from", drafter, "--to", "sglang", "--output", tmp_path / "x"
    )
    assert code == 2 and "no dialect 'sglang'" in err and "specforge" in err
    code, _, err = slipstream(
        "convert", "--from", tmp_path / "nowhere", "--to", "eagle", "--output", tmp_path / "x"
    )
    assert code == 2 and "is no folder" in err
    code, _, err = slipstream(
        "convert", "--from", drafter, "--to", "medusa", "--model", model, "--output", tmp_path / "x"
    )
    assert code == 2 and "has no place for an EAGLE-3" in err
    (tmp_path / "x").mkdir()
    code, _, err = slipstream(
        "convert", "--from", drafter, "--to", "eagle", "--model", model, "--output", tmp_path / "x"
    )
    assert code == 2 and "exists" in err
