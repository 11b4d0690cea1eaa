"""`study` from end to end, on the claim that needs no trained drafter."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from slipstream.cli.prompts import Prompt

RUN = (
    "--tasks",
    "mt_bench,summarization",
    "--limit",
    2,
    "--max-new-tokens",
    8,
    "--dtype",
    "float32",
)


@pytest.fixture
def short(monkeypatch):
    """The tiny model has no room for the prompts that ship."""

    def read(tasks, prompts, limit):
        rows = [(str(i), Prompt((f"say it again {i}",))) for i in range(limit)]
        return dict.fromkeys(tasks.split(","), rows)

    monkeypatch.setattr("slipstream.cli.study.read_texts", read)


@pytest.mark.usefixtures("short")
def test_other_setups_take_the_place_of_the_studys(slipstream, model, drafter, tmp_path):
    setups = ("--better", f"eagle3:budget=4,depth=2,topk=2,drafter={drafter}", "--worse", "ngram")
    code, out, _ = slipstream(
        "study", "tree", "--model", model, "--threads", 1, *setups, *RUN,
        "--output", tmp_path / "a.svg", "--json",
    )  # fmt: skip
    value = json.loads(out)
    assert code in (0, 1) and list(value["result"]["tau"]) == [setups[1], "ngram"]
    code, out, err = slipstream("study", "tree", "--better", "ngram", "--worse", "ngram")
    assert (code, out) == (2, "") and "another setup" in err
    code, out, err = slipstream("study", "lookup", "--worse", "eagle3")
    assert (code, out) == (2, "") and "one setup" in err


@pytest.mark.usefixtures("short")
def test_a_claim_is_measured_on_the_users_model(slipstream, model, tmp_path):
    figure = tmp_path / "lookup.svg"
    code, out, _ = slipstream(
        "study", "lookup", "--model", model, "--threads", 1, *RUN, "--output", figure, "--json"
    )
    value = json.loads(out)
    assert {"name", "verdict", "result", "figure"} <= value.keys()
    assert value["name"] == "lookup" and value["result"]["num_prompts"] == 4
    assert code == (0 if value["verdict"] == "holds" else 1)
    assert value["figure"] == str(figure)
    ET.fromstring(figure.read_text())

    code, out, err = slipstream("study", "lookup", "--model", model, *RUN, "--output", figure)
    assert (code, out) == (2, "") and "--overwrite" in err
    code, out, err = slipstream(
        "study", "lookup", "--tasks", "mt_bench", "--output", tmp_path / "a.svg"
    )
    assert (code, out) == (2, "") and "summarization" in err


def test_what_ships_is_shown_without_running(slipstream):
    code, out, _ = slipstream("study", "eagle3", "--show", "--json")
    value = json.loads(out)
    assert code == (0 if value["verdict"] == "holds" else 1) and Path(value["figure"]).is_file()
    code, out, _ = slipstream("study", "--json")
    assert code == 0 and "eagle3" in {one["name"] for one in json.loads(out)}
    code, out, err = slipstream("study", "eagle3", "--show", "--limit", 3)
    assert (code, out) == (2, "") and "--show" in err
    code, out, err = slipstream("study", "eagel3")
    assert (code, out) == (2, "") and "eagle3" in err
