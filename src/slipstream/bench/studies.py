"""Claims of the field as experiments: two setups, the same prompts, an interval, a verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from slipstream.bench import measures
from slipstream.errors import UnknownNameError

TASKS = ("mt_bench", "gsm8k", "humaneval", "summarization")
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
RESULTS = resources.files("slipstream") / "assets" / "studies"


@dataclass(frozen=True, slots=True)
class Study:
    """One claim about tokens per target pass.

    Args:
        name: as typed.
        claim: what is said, in a few words.
        paper: arXiv number of who says it.
        methods: the setup that should be better, then the other, as `slipstream bench` takes
            them; or one setup, whose best task is in question.
        best_task: that task; None where two setups are compared.
    """

    name: str
    claim: str
    paper: str
    methods: tuple[str, ...]
    best_task: str | None = None


_ALL = (
    Study(
        "tree",
        "a tree over a chain",
        "2401.15077",
        ("eagle3:budget=11,depth=4,topk=4", "eagle3:chain,budget=4,depth=4"),
    ),
    Study(
        "dynamic-tree",
        "a dynamic tree over a static one",
        "2406.16858",
        ("eagle2:budget=11", "eagle:budget=11"),
    ),
    Study(
        "eagle",
        "EAGLE-1 over Medusa",
        "2401.15077",
        ("eagle:budget=11", "medusa:budget=11"),
    ),
    Study(
        "hass",
        "HASS over EAGLE-1's weights",
        "2408.15766",
        ("hass:budget=11", "eagle2:budget=11"),
    ),
    Study(
        "eagle3",
        "EAGLE-3 over EAGLE-2",
        "2503.01840",
        ("eagle3:budget=11,depth=4,topk=4", "eagle2:budget=11"),
    ),
    Study(
        "ddtree", "a tree on DFlash over its chain", "2604.12989", ("ddtree:budget=11", "dflash")
    ),
    Study(
        "path-head",
        "a path head over marginals",
        "2607.05147",
        ("dspark:budget=11", "ddtree:budget=11"),
    ),
    Study(
        "lookup",
        "lookup's best task is summarization",
        "2401.07851",
        ("ngram",),
        best_task="summarization",
    ),
)
STUDIES = {study.name: study for study in _ALL}


def get(name: str) -> Study:
    """The study of a name.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in STUDIES:
        raise UnknownNameError("study", name, STUDIES)
    return STUDIES[name]


def judge(study: Study, result: Mapping[str, Any]) -> dict[str, Any]:
    """What a bench result says of a claim.

    The claim holds where the whole 95% interval of a ratio of tokens per pass is above 1. Two
    setups are resampled together, prompt by prompt; the tasks of one setup each by themselves.

    Args:
        study: the claim.
        result: a bench result with the study's setups at one temperature and batch size.

    Returns:
        `name, claim, verdict` and `result`: `ratio, interval, tau` by setup (or by task),
        `num_prompts, tasks, settings, environment`.
    """
    taken: dict[str, dict[tuple[str, int], tuple[float, int]]] = {}
    for sample in result["samples"]:
        passes = sample["num_target_passes"]
        if sample["method"] in study.methods and passes:
            key = sample["task"], sample["prompt_index"]
            taken.setdefault(sample["method"], {})[key] = sample["tau"] * passes, passes
    of_setups = [taken.get(method, {}) for method in study.methods]
    if study.best_task is None:
        ratio, interval, tau, count = _pair(*of_setups)
        tau = dict(zip(study.methods, tau, strict=True))
    else:
        ratio, interval, tau, count = _best(of_setups[0], study.best_task)
    how, where = result["settings"], result["environment"]
    return {
        "name": study.name,
        "claim": study.claim,
        "verdict": verdict_of(interval),
        "result": {
            "ratio": ratio,
            "interval": interval,
            "tau": tau,
            "num_prompts": count,
            "tasks": sorted({task for task, _ in of_setups[0]}),
            "settings": {key: how[key] for key in ("max_new_tokens", "temperatures")},
            "environment": {
                key: where.get(key)
                for key in ("model", "dtype", "cpu", "instructions", "num_threads")
            },
        },
    }


def verdict_of(interval: measures.Interval | None) -> str:
    """Whether a ratio is above 1, by its interval; undecided without one."""
    if interval is None:
        return UNDECIDED
    return HOLDS if interval[0] > 1 else FAILS if interval[1] < 1 else UNDECIDED


def committed(study: Study) -> dict[str, Any]:
    """The result that ships, with the path of its figure."""
    found = json.loads((RESULTS / f"{study.name}.json").read_text(encoding="utf-8"))
    return found | {"figure": str(RESULTS / f"{study.name}.svg")}


def rows_of(study: Study, result: Mapping[str, Any]) -> dict[str, Any]:
    """The result with the study's setups alone, as its figure takes it."""
    rows = [row for row in result["rows"] if row["method"] in study.methods]
    return {**result, "rows": rows}


_Taken = Mapping[tuple[str, int], tuple[float, int]]
_Found = tuple[float | None, measures.Interval | None, Any, int]


def _pair(better: _Taken, worse: _Taken) -> _Found:
    keys = sorted(better.keys() & worse.keys())
    if not keys:  # no answer had a second token
        return None, None, (None, None), 0
    pairs = np.array([[*better[key], *worse[key]] for key in keys])  # [P, 4] tokens, passes
    tokens, passes, other_tokens, other_passes = pairs.T
    interval = None
    taus = [float(tokens.sum() / passes.sum()), float(other_tokens.sum() / other_passes.sum())]
    ratio = taus[0] / taus[1]
    if len(keys) > 1:
        draw = measures.resamples(len(keys))
        above = measures.resampled_ratio(tokens, passes, draw)
        interval = measures.interval(
            above / measures.resampled_ratio(other_tokens, other_passes, draw)
        )
    return ratio, interval, taus, len(keys)


def _best(taken: _Taken, best_task: str) -> _Found:
    by_task: dict[str, np.ndarray] = {
        task: np.array([pair for (own, _), pair in taken.items() if own == task])
        for task in sorted({task for task, _ in taken})
    }
    tau = {task: float(rows[:, 0].sum() / rows[:, 1].sum()) for task, rows in by_task.items()}
    others = [task for task in by_task if task != best_task]
    if best_task not in tau or not others:
        return None, None, tau, len(taken)
    ratio = tau[best_task] / max(tau[task] for task in others)
    if min(map(len, by_task.values())) < 2:
        return ratio, None, tau, len(taken)
    generator = np.random.default_rng(measures.SEED)
    drawn = {}  # other prompts each, so each task is drawn by itself
    for task, rows in by_task.items():
        draw = generator.integers(0, len(rows), (measures.NUM_RESAMPLES, len(rows)))
        drawn[task] = measures.resampled_ratio(rows[:, 0], rows[:, 1], draw)
    most = np.max([drawn[task] for task in others], axis=0)
    return ratio, measures.interval(drawn[best_task] / most), tau, len(taken)


def missing(study: Study, tasks: Sequence[str]) -> str | None:
    """Why these tasks cannot decide the study; None where they can."""
    if study.best_task is None:
        return None
    if study.best_task not in tasks or len(tasks) < 2:
        return f"{study.best_task} and another task"
    return None
