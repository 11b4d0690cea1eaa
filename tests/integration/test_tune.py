"""`slipstream tune`: JSON keys, parts, exports, and the user's mistakes."""

import json

import pytest

from slipstream.tune import cost, tuner

KEYS = {
    "cost_curve",
    "draft_cost",
    "acceptance",
    "best",
    "predicted_speedup",
    "measured_speedup",
    "advice",
    "exports",
}


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("ab", "cd")), "utf-8")
    return path


def test_the_whole_of_it_with_exports(slipstream, model, drafter, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(tuner, "MEASURED_DEPTHS", (1, 2))
    monkeypatch.setattr(cost, "NUM_ROUNDS", 1)
    code, out, err = slipstream(
        "tune", "--json", "--dtype", "float32", "--model", model, "--method", "eagle3",
        "--drafter", drafter, "--prompts", prompts, "--max-new-tokens", 16,
        "--export", tmp_path / "exports", "--output", tmp_path / "tune.json",
    )  # fmt: skip
    assert code == 0, err
    value = json.loads(out)
    assert set(value) >= KEYS
    assert set(value["best"]) >= {"method", "tree", "budget", "depth", "topk"}
    assert value["best"]["method"] == "none" and "Do not speculate here" in value["advice"][0]
    assert value["exports"] == ["README.txt"]
    assert json.loads((tmp_path / "tune.json").read_text())["kind"] == "slipstream tune"


def test_draft_cost_alone(slipstream, model, drafter, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "NUM_ROUNDS", 1)
    code, out, err = slipstream(
        "tune", "--json", "--dtype", "float32", "--model", model, "--method", "eagle3",
        "--drafter", drafter, "--prompts", prompts, "--only", "draft-cost", "--lengths", "1,4",
        "--output", tmp_path / "part.json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out) == json.loads((tmp_path / "part.json").read_text())
    taken = json.loads(out)["draft_cost"]
    assert set(taken) == {"1", "4"} and all(seconds > 0 for seconds in taken.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "draft-cots"), "draft-cost"),
        (("--lengths", "4,x"), "lengths"),
        (("--lengths", "1,2,4,8"), "without --only draft-cost"),
        (("--only", "cost-curve", "--lengths", "4"), "without --only draft-cost"),
        (("--only", "draft-cost", "--export", "somewhere"), "nothing with --only"),
        (("--only", "draft-cost", "--methods", "none"), "one that drafts"),
        (("--lengths", "0"), "lengths"),
        (("--method", "eagle3", "--methods", "ngram"), "one of the two"),
        (("--methods", "eagel3"), "eagle3"),
        (("--drafter", "somewhere"), "--method"),
        (("--limit", "1"), "raise --limit"),
    ],
)
def test_mistakes_are_one_readable_error(slipstream, model, arguments, said):
    code, out, err = slipstream("tune", "--model", model, *arguments)
    assert (code, out) == (2, "")
    assert said in err and "Traceback" not in err
