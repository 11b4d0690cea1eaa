"""Tokens per second of our engine beside `transformers` generate: same prompts, type and threads.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/against_transformers.py [--dtypes bfloat16,int4]

MT-bench first turns, greedy, prompt by prompt in turn. Each side is timed over whole answers,
prefill included. Writes benchmarks/results/against_transformers.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import slipstream
from slipstream.bench import environment
from slipstream.bench.tasks import read_task
from slipstream.target.hf import load_target, write_dequantised
from slipstream.target.source import resolve

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtypes", default="bfloat16,int4")
    parser.add_argument("--methods", default="none,ngram,eagle3")
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    engines, target = {}, None
    for dtype in given.dtypes.split(","):
        target = load_target(given.model, dtype=dtype, device="cpu", threads=given.threads)
        for method in given.methods.split(","):
            engines[f"{method} {dtype}"] = slipstream.load(target, method)
    folder = resolve(given.model, write_dequantised)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    watch, tokens, seconds = environment.Watch(), defaultdict(int), defaultdict(float)
    for number, row in enumerate(read_task("mt_bench")[: given.limit + 1]):
        ids = target.tokenizer.encode_chat([{"role": "user", "content": row.text}])
        counts, spent = {}, {}
        begun = time.perf_counter()
        answer = plain.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=given.max_new_tokens,
            do_sample=False,
        )
        spent["transformers"] = time.perf_counter() - begun
        counts["transformers"] = answer.shape[1] - len(ids)
        for name, engine in engines.items():
            begun = time.perf_counter()
            result = engine.generate(list(ids), max_new_tokens=given.max_new_tokens)
            spent[name], counts[name] = time.perf_counter() - begun, len(result.token_ids)
        if number:  # the first prompt warms up
            for name in counts:
                tokens[name] += counts[name]
                seconds[name] += spent[name]
    rates = {name: tokens[name] / seconds[name] for name in tokens}
    base = rates["transformers"]
    rows = [{"name": n, "tokens_per_second": r, "times": r / base} for n, r in rates.items()]
    report = {
        "environment": environment.describe(target),
        "others_share": watch.others(),
        "num_prompts": given.limit,
        "max_new_tokens": given.max_new_tokens,
        "rows": rows,
    }
    for row in rows:
        print(f"{row['name']:24} {row['tokens_per_second']:7.1f} tokens/s  {row['times']:.2f}x")
    (RESULTS / "against_transformers.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
