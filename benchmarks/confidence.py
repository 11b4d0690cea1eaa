"""Does a drafter know when it is right, and does acceptance depend on the place in the tree?

    python benchmarks/confidence.py --out benchmarks/results/confidence.json
    python benchmarks/confidence.py --methods eagle3 --tasks mt_bench,gsm8k --temperature 1

EAGLE-2's two observations (arXiv:2406.16858, sections 3.1 and 3.2) with drafters of one's own:
acceptance of each place of a tree, one value per prompt, and the drafter's confidence beside the
share accepted. The tree has a fixed shape, every node of it drafted at every step: one that grows
where the drafter is sure would only show places where it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream import methods as catalogue
from slipstream.bench import calibration
from slipstream.bench.calibration import Judged
from slipstream.bench.environment import describe
from slipstream.bench.results import check_output, dumps, write_whole
from slipstream.bench.tasks import read_task
from slipstream.cli.bench_scripts import on_one_target, split
from slipstream.cli.main import exit_status
from slipstream.report.drafting_figures import MOST_PLACES

KIND = "slipstream confidence"
DEPTH, CHILDREN = 3, 2


def decode(
    engine: Any, questions: Sequence[tuple[str, str]], *, num_tokens: int, temperature: float
) -> dict[str, list[Judged]]:
    """Answer, and keep every tree with what was accepted of it.

    Args:
        engine: with a tree of fixed shape.
        questions: name and text of each.
        num_tokens: per answer.
        temperature: of the answers.
    """
    found = {}
    for name, text in questions:
        result = engine.generate(
            text, max_new_tokens=num_tokens, temperature=temperature, trace=True
        )
        found[name] = calibration.judged(result.steps)
    return found


def summarise(contexts: Mapping[str, Sequence[Judged]]) -> dict[str, Any]:
    """Reliability of paths and of each depth, and acceptance by place and context."""
    nodes = calibration.nodes(tree for trees in contexts.values() for tree in trees)
    places = calibration.by_place(contexts, max_places=MOST_PLACES)
    return {
        "num_nodes": len(nodes),
        "joint": calibration.joint(nodes).to_dict(),
        "by_depth": {str(d): one.to_dict() for d, one in calibration.by_depth(nodes).items()},
        "places": [
            {"place": list(place), "accepted": {name: round(s, 4) for name, s in shares.items()}}
            for place, shares in places.items()
        ],
    }


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--methods", default="eagle2,eagle3")
    parser.add_argument("--tasks", default="mt_bench,gsm8k,humaneval,summarization")
    parser.add_argument("--limit", type=int, default=8, help="prompts a task")
    parser.add_argument("--tokens", type=int, default=96, help="per answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.out is not None:
        check_output(asked.out, overwrite=True)
    names = [catalogue.get(name).name for name in split("methods", asked.methods)]
    questions = [
        (f"{task} {row.id}", row.text)
        for task in split("tasks", asked.tasks)
        for row in read_task(task, limit=asked.limit)
    ]
    shape = {"tree": "kary", "depth": DEPTH, "topk": CHILDREN}
    shape["budget"] = sum(CHILDREN**depth for depth in range(1, DEPTH + 1))
    wanted = [(name, {**shape, "verifier": "walk"}) for name in names]
    engines = on_one_target(asked.model, wanted, dtype=asked.dtype)
    settings = {name: value for name, value in vars(asked).items() if name != "out"} | shape
    methods: dict[str, Any] = {}
    for name, engine in zip(names, engines, strict=True):
        methods[name] = summarise(
            decode(engine, questions, num_tokens=asked.tokens, temperature=asked.temperature)
        )
        print(f"{name}: {methods[name]['num_nodes']} nodes, ECE of paths "
              f"{methods[name]['joint']['ece']:.3f}")  # fmt: skip
        for one in methods[name]["places"]:
            shares = sorted(one["accepted"].values())
            low, middle, high = shares[0], shares[len(shares) // 2], shares[-1]
            print(f"  place {one['place']}: {low:.2f} to {high:.2f}, median {middle:.2f}")
        if asked.out is not None:
            report = {"kind": KIND, "environment": describe(engine.target), "settings": settings}
            write_whole(asked.out, dumps(report | {"methods": methods}))


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
