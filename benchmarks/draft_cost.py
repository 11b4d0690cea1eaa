"""Seconds to draft 4, 8 and 16 tokens: EAGLE-3 token by token, DFlash as one block.

    python benchmarks/draft_cost.py                     # the default model's shape
    python benchmarks/draft_cost.py --out FILE.json     # kept with its conditions

Random weights; no checkpoint is needed. Every round drafts once with every network, so that all
are measured under the same load; medians are printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slipstream.bench.draft_cost import measure
from slipstream.bench.environment import busy_share, describe
from slipstream.bench.results import check_output, dumps, write_whole
from slipstream.cli.main import exit_status
from slipstream.target.hf import load_target


def main() -> None:
    """Measure, print a table, keep it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.out:
        check_output(asked.out, overwrite=True)
    target = load_target(asked.model, dtype=asked.dtype, threads=asked.threads)
    busy = busy_share()
    found = measure(target, rounds=asked.rounds)
    found |= {"environment": describe(target), "busy_share": busy}
    print(f"{'':<16}{'tokens':>8}{'ms':>9}{'passes':>9}{'heads':>8}{'dispatches':>12}")
    for row in found["rows"]:
        name = f"{row['method']}, {row['layers']} layers"
        counts = f"{row['passes']:>9}{row['head_calls']:>8}{row['dispatches']:>12}"
        print(f"{name:<16}{row['tokens']:>8}{1000 * row['seconds']:>9.2f}{counts}")
    if asked.out:
        write_whole(asked.out, dumps(found))


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
