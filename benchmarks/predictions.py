"""How well `tune` predicts: every task's best and default settings, predicted and measured.

    python benchmarks/predictions.py --tasks mt_bench,gsm8k,humaneval,summarization --limit 12

One half of each task's prompts is recorded, the other half is decoded. Run it on an idle machine;
it writes benchmarks/results/predictions.json with the median errors.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from slipstream.cli import options as o
from slipstream.cli.tasks import encode_tasks, read_texts
from slipstream.cli.tune import loader
from slipstream.tune.tuner import tune

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Tune on every task and put predictions beside measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", default="ngram,eagle3")
    parser.add_argument("--tasks", default="mt_bench,gsm8k,humaneval,summarization")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "predictions.json")
    asked = parser.parse_args()

    load = loader(o.Setup(asked.model, "none", dtype=asked.dtype), None)
    decoding = o.Decoding(asked.max_new_tokens, asked.temperature)
    texts = read_texts(asked.tasks, None, asked.limit)
    rows, environment = [], {}
    for task, prompts in encode_tasks(load("none").target, texts, raw=False).items():
        found = tune(load, asked.methods.split(","), prompts, decoding.arguments())
        environment = found.environment
        for row in found.judged:
            if row["measured_tau"] is None:
                continue
            errors = {
                f"{name}_error": row[f"predicted_{name}"] / row[f"measured_{name}"] - 1
                for name in ("tau", "speedup")
            }
            rows.append({"task": task, **row, **errors})
            print(task, row["name"], {name: f"{error:+.1%}" for name, error in errors.items()})
    medians = {
        f"median_{name}_error": statistics.median(abs(row[f"{name}_error"]) for row in rows)
        for name in ("tau", "speedup")
    }
    print({name: f"{error:.1%}" for name, error in medians.items()}, f"over {len(rows)} settings")
    settings = {name: value for name, value in vars(asked).items() if name != "out"}
    value = {"environment": environment, "settings": settings, **medians, "rows": rows}
    asked.out.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
