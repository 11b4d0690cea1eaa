"""How well `tune` predicts: settings of every method and tree, predicted and measured.

    python benchmarks/predictions.py --tasks mt_bench,gsm8k,humaneval,summarization --limit 14
    python benchmarks/predictions.py --methods ngram,eagle3,medusa=FOLDER,eagle=FOLDER

One half of each task's prompts is recorded, the other half is decoded: the best setting of every
method, alone and united with lookup, of every kind of tree it drafts, and its default. Run it on an
idle machine. The result is written after every task, with the median errors.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from slipstream import assemble
from slipstream import methods as catalogue
from slipstream.bench.results import check_output, dumps, write_whole
from slipstream.cli import options as o
from slipstream.cli.bench_scripts import split
from slipstream.cli.main import exit_status
from slipstream.cli.tasks import encode_tasks, read_texts
from slipstream.cli.tune import loader
from slipstream.tune.tuner import tune

HERE = Path(__file__).resolve().parent
NUMBERS = ("tau", "speedup")


def main() -> None:
    """Tune on every task and put predictions beside measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--methods", default="ngram,eagle3", help="NAME, or NAME=FOLDER of a drafter"
    )
    parser.add_argument("--tasks", default="mt_bench,gsm8k,humaneval,summarization")
    parser.add_argument("--limit", type=int, default=14, help="prompts a task")
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "predictions.json")
    asked = parser.parse_args()
    check_output(asked.out, overwrite=True)
    decoding = o.Decoding(asked.max_new_tokens, asked.temperature)
    texts = read_texts(asked.tasks, None, asked.limit)
    given = dict(piece.partition("=")[::2] for piece in split("methods", asked.methods))
    for name, folder in given.items():
        if catalogue.get(name).needs_checkpoint:
            assemble.locate(folder or None, name, asked.model)
    made = loader(o.Setup(asked.model, "none", dtype=asked.dtype), None)

    def load(name: str, **options: Any) -> Any:
        return made(name, given.get(name) or None, **options)

    settings = {name: value for name, value in vars(asked).items() if name != "out"}
    settings["methods"] = ",".join(given)
    rows: list[dict[str, Any]] = []
    for task, prompts in encode_tasks(load("none").target, texts, raw=False).items():
        began = time.perf_counter()
        found = tune(load, list(given), prompts, decoding.arguments(), judge_trees=True)
        new = [{"task": task, **with_errors(each)} for each in found.judged if each["measured_tau"]]
        rows += new
        for row in new:
            print(task, row["name"], *(f"{name} {row[f'{name}_error']:+.1%}" for name in NUMBERS))
        print(f"{task}: {time.perf_counter() - began:.0f} s", found.left_out or "", flush=True)
        value = {"environment": found.environment, "settings": settings, **medians(rows)}
        write_whole(asked.out, dumps(value | {"rows": rows}))
    print({name: f"{error:.1%}" for name, error in medians(rows).items()}, len(rows), "settings")


def with_errors(judged: dict[str, Any]) -> dict[str, Any]:
    """A judged setting with how far each prediction was above what was measured."""
    errors = {
        f"{name}_error": judged[f"predicted_{name}"] / judged[f"measured_{name}"] - 1
        for name in NUMBERS
    }
    return {**judged, **errors}


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median of the sizes of the errors."""
    return {
        f"median_{name}_error": statistics.median(abs(row[f"{name}_error"]) for row in rows)
        for name in NUMBERS
        if rows
    }


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
