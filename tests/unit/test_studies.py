"""Claims as experiments: the ratio, its interval, the verdict, and what ships."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from slipstream.bench import studies
from slipstream.bench.specs import parse_specs
from slipstream.bench.tasks import read_task
from slipstream.errors import UnknownNameError

WHERE = {"environment": {"model": "m"}, "settings": {"max_new_tokens": 8, "temperatures": [0.0]}}


def samples(method: str, tau: float, *, task: str = "mt_bench", seed: int = 0) -> list[dict]:
    """Twelve answers of about so many tokens a pass."""
    numbers = random.Random(seed)
    return [
        {
            "method": method, "task": task, "prompt_index": index, "num_target_passes": 40,
            "tau": tau * numbers.uniform(0.95, 1.05),
        }
        for index in range(12)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("better", "worse", "verdict"),
    [(2.0, 1.5, "holds"), (1.5, 2.0, "does not hold"), (2.0, 2.0, "undecided")],
)
def test_a_pair_is_judged_by_its_whole_interval(better: float, worse: float, verdict: str) -> None:
    study = studies.get("eagle3")
    one, other = study.methods
    result = WHERE | {"samples": samples(one, better) + samples(other, worse, seed=1)}
    found = studies.judge(study, result)
    assert found["verdict"] == verdict and found["result"]["num_prompts"] == 12
    low, high = found["result"]["interval"]
    assert low < found["result"]["ratio"] < high
    assert found["result"]["ratio"] == pytest.approx(better / worse, rel=0.05)
    assert list(found["result"]["tau"]) == [one, other]


def test_prompts_are_paired() -> None:
    """What both setups share, here how easy a prompt is, leaves the interval of the ratio."""
    study = studies.get("tree")
    one, other = study.methods
    easy = samples(other, 1.5)
    for index, sample in enumerate(easy):
        sample["tau"] = 1 + index
    hard = [sample | {"method": one, "tau": 1.01 * sample["tau"]} for sample in easy]
    found = studies.judge(study, WHERE | {"samples": easy + hard})
    assert found["verdict"] == "holds"
    assert found["result"]["interval"] == pytest.approx((1.01, 1.01))


def test_one_prompt_decides_nothing() -> None:
    study = studies.get("hass")
    result = WHERE | {"samples": [samples(m, 2.0 + i)[0] for i, m in enumerate(study.methods)]}
    found = studies.judge(study, result)
    assert found["verdict"] == "undecided" and found["result"]["interval"] is None


@pytest.mark.parametrize("name", ["hass", "lookup"])
def test_answers_of_one_token_decide_nothing(name: str) -> None:
    study = studies.get(name)
    of_setups = [samples(method, 1.0) for method in study.methods]
    none = [sample | {"num_target_passes": 0} for of in of_setups for sample in of]
    found = studies.judge(study, WHERE | {"samples": none})
    assert found["verdict"] == "undecided" and found["result"]["num_prompts"] == 0


def test_the_claim_about_tasks_compares_with_the_best_other_one() -> None:
    study = studies.get("lookup")
    taus = {"summarization": 2.0, "mt_bench": 1.2, "gsm8k": 1.6}
    drawn = [
        s for i, (t, tau) in enumerate(taus.items()) for s in samples("ngram", tau, task=t, seed=i)
    ]
    found = studies.judge(study, WHERE | {"samples": drawn})
    assert found["verdict"] == "holds"
    assert found["result"]["ratio"] == pytest.approx(2.0 / 1.6, rel=0.05)
    assert studies.missing(study, ["mt_bench", "gsm8k"]) and not studies.missing(study, list(taus))


@pytest.mark.parametrize("name", studies.STUDIES)
def test_every_study_can_be_run_and_ships_its_result(name: str) -> None:
    study = studies.get(name)
    assert {spec.name for spec in parse_specs(",".join(study.methods))} == {"none", *study.methods}
    for task in studies.TASKS:
        assert read_task(task, limit=1)
    found = studies.committed(study)
    assert found["name"] == name and found["claim"] == study.claim
    assert found["verdict"] == studies.verdict_of(tuple(found["result"]["interval"]))
    ET.fromstring(Path(found["figure"]).read_text(encoding="utf-8"))


def test_an_unknown_study_is_told_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="eagle3"):
        studies.get("eagle4")


def test_what_ships_is_json_of_the_keys_that_scripts_read() -> None:
    value = json.loads((studies.RESULTS / "tree.json").read_text(encoding="utf-8"))
    assert {"name", "verdict", "result"} <= value.keys()
