"""Two results against each other: what counts as worse, and what cannot be compared."""

from __future__ import annotations

import copy

import pytest

from slipstream.bench import against
from slipstream.errors import DataError, SettingError

ENVIRONMENT = {
    "model": "m", "cpu": "c", "instructions": "AMX", "num_threads": 2, "dtype": "float32",
    "is_busy": False,
}  # fmt: skip
SETTINGS = {"max_new_tokens": 64, "top_k": 0, "top_p": 1.0, "seed": 0}


def sample(method: str, index: int, passes: int, seconds: float) -> dict:
    return {
        "task": "qa",
        "method": method,
        "temperature": 0.0,
        "num_rows": 1,
        "id": f"p{index}",
        "num_prompt_tokens": 5 + index,
        "num_tokens": 41,
        "num_target_passes": passes,
        "decode_seconds": seconds * (1 + index % 3),
    }


def result(passes: int = 20, seconds: float = 1.0, plain: float = 2.0, prompts: int = 12) -> dict:
    samples = [sample("none", i, 40, plain) for i in range(prompts)]
    samples += [sample("eagle3", i, passes + i % 2, seconds) for i in range(prompts)]
    return {"environment": dict(ENVIRONMENT), "settings": dict(SETTINGS), "samples": samples}


def verdicts(comparison: against.Comparison) -> dict[tuple[str, str], str]:
    return {(change.method, change.measure): change.verdict for change in comparison.changes}


def test_the_same_result_is_the_same():
    found = against.compare(result(), result())
    assert not found.is_worse and set(verdicts(found).values()) == {"same"}
    assert set(verdicts(found)) == {
        ("none", "decode_tokens_per_second"),
        ("eagle3", "decode_tokens_per_second"),
        ("eagle3", "tau"),
        ("eagle3", "speedup"),
    }
    assert all(change.ratio == pytest.approx(1) for change in found.changes)


def test_a_shorter_accepted_length_fails_the_gate():
    found = against.compare(result(), result(passes=22))
    assert found.is_worse and verdicts(found)[("eagle3", "tau")] == "worse"
    (change,) = (each for each in found.changes if each.measure == "tau")
    assert change.old == pytest.approx(40 / 20.5) and change.new == pytest.approx(40 / 22.5)
    assert change.ratio_ci[0] <= change.ratio <= change.ratio_ci[1] < 1
    back = against.compare(result(passes=22), result())
    assert not back.is_worse and verdicts(back)[("eagle3", "tau")] == "better"


def test_times_may_drift_by_the_tolerance_and_no_more():
    slower = result(seconds=1.04)
    assert not against.compare(result(), slower).is_worse
    assert against.compare(result(), slower, tolerance=0.02).is_worse
    assert verdicts(against.compare(result(), result(seconds=1.2)))[("eagle3", "speedup")] == (
        "worse"
    )


def test_noise_is_not_worse():
    """One slow prompt of twelve moves the mean and not the whole interval."""
    noisy = result()
    noisy["samples"][-1]["decode_seconds"] *= 3
    found = against.compare(result(), noisy)
    (change,) = (each for each in found.changes if each.measure == "speedup")
    assert change.ratio < 0.95 and change.verdict == "same"


def test_a_slower_target_shows_in_tokens_per_second_alone():
    found = against.compare(result(), result(seconds=1.5, plain=3.0))
    assert verdicts(found)[("eagle3", "speedup")] == "same"
    assert verdicts(found)[("none", "decode_tokens_per_second")] == "worse"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cpu": "other"}, "other cpu"),
        ({"instructions": "AVX2"}, "other instructions"),
        ({"is_busy": True}, "busy in the new run"),
    ],
)
def test_other_machines_and_busy_ones_compare_by_ratio_only(change, says):
    new = result(seconds=1.5, plain=3.0)
    new["environment"] |= change
    found = against.compare(result(), new)
    assert not found.is_worse and says in found.notes[0]
    assert {measure for _, measure in verdicts(found)} == {"tau", "speedup"}


def test_speedups_of_different_machines_are_told_and_not_judged():
    """One name of processor, and instructions that make wider passes dearer."""
    new = result(seconds=2.0)
    assert verdicts(against.compare(result(), new))[("eagle3", "speedup")] == "worse"
    new["environment"]["instructions"] = "AVX2"
    found = against.compare(result(), new)
    assert not found.is_worse and verdicts(found)[("eagle3", "speedup")] == "other machine"
    worse = against.compare(result(), new | result(passes=22) | {"environment": new["environment"]})
    assert worse.is_worse and verdicts(worse)[("eagle3", "tau")] == "worse", "a count is judged"


def test_a_result_that_does_not_say_its_instructions_is_judged_with_a_note():
    old = result()
    del old["environment"]["instructions"]
    found = against.compare(old, result(seconds=2.0))
    assert verdicts(found)[("eagle3", "speedup")] == "worse"
    assert "the old result does not say" in found.notes[0]
    on_gpu = result()
    on_gpu["environment"] |= {"instructions": None, "accelerator": "H"}
    assert against.compare(on_gpu, copy.deepcopy(on_gpu)).notes == ()


def test_only_shared_prompts_count():
    new = result(prompts=12)
    for each in new["samples"][6:12] + new["samples"][18:]:
        each["id"] = "another"
    found = against.compare(result(), new)
    assert {change.num_prompts for change in found.changes} == {6}


def test_what_is_missing_is_named():
    new = result()
    new["samples"] = [each for each in new["samples"] if each["method"] == "none"]
    found = against.compare(result(), new)
    assert found.missing == ("eagle3 on qa at temperature 0, 1 rows",)


def test_one_prompt_is_never_proof():
    found = against.compare(result(prompts=1), result(prompts=1, passes=40))
    assert not found.is_worse and found.changes[0].ratio_ci is None


@pytest.mark.parametrize(
    ("place", "key", "value", "says"),
    [
        ("environment", "model", "other", "model m, the new one with other"),
        ("settings", "max_new_tokens", 8, "max-new-tokens 64"),
        ("settings", "seed", 3, "seed 0"),
    ],
)
def test_other_questions_are_refused(place, key, value, says):
    new = result()
    new[place][key] = value
    with pytest.raises(DataError, match=says):
        against.compare(result(), new)


def test_nothing_in_common_is_known_before_anything_is_measured():
    key, prompt = ("qa", "eagle3", 0.0, 1), ("qa", "p3", 8)
    against.check_shared(result(), [key], [prompt])
    for other_key, other_prompt in (
        (("qa", "eagle3", 1.0, 1), prompt),
        (("rag", "eagle3", 0.0, 1), prompt),
        (key, ("qa", "p3", 9)),
        (key, ("rag", "p3", 8)),
    ):
        with pytest.raises(DataError, match="share no prompt"):
            against.check_shared(result(), [other_key], [other_prompt])


def test_nothing_in_common_is_refused():
    new = copy.deepcopy(result())
    for each in new["samples"]:
        each["task"] = "rag"
    with pytest.raises(DataError, match="share no prompt"):
        against.compare(result(), new)
    with pytest.raises(SettingError, match=r"\[0, 1\)"):
        against.compare(result(), result(), tolerance=1.0)
