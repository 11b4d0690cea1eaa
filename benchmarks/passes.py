"""Seconds of a target pass against tokens, context and rows, beside the machine's limit.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/passes.py [--dtype bfloat16 --decoder fused]

Writes benchmarks/results/passes_<weights>_<decoder>.json and one SVG per axis.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

from slipstream.bench import environment
from slipstream.bench.profile import Machine, measure_machine, pass_of, times, work_of
from slipstream.bench.results import dumps, write_whole
from slipstream.cli.bench_scripts import split
from slipstream.cli.checks import check_name
from slipstream.cli.main import exit_status
from slipstream.report.charts import line_chart
from slipstream.target.hf import HFTarget, load_target

RESULTS = Path(__file__).parent / "results"
AXES = {
    "n": [{"n": n, "context": 256, "num_rows": 1} for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)],
    "context": [
        {"n": n, "context": context, "num_rows": 1}
        for n in (1, 16)
        for context in (256, 1024, 2048, 4096, 8000)
    ],
    "num_rows": [{"n": 8, "context": 256, "num_rows": rows} for rows in (1, 2, 4, 8, 16)],
}
LABELS = {"n": "tokens in the pass", "context": "committed tokens", "num_rows": "rows of 8 tokens"}


def main() -> None:
    """Measure every axis and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--decoder", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--axes", default=",".join(AXES))
    given = parser.parse_args()
    axes = split("axes", given.axes)
    for axis in axes:
        check_name("axis", axis, tuple(AXES))
    target = load_target(
        given.model, dtype=given.dtype, decoder=given.decoder, threads=given.threads
    )
    watch = environment.Watch()
    machine = measure_machine(target.spec.dtype, target.spec.device)
    found = {axis: measure(target, machine, axis, given.repeats) for axis in axes}
    report = {
        "environment": environment.describe(target),
        "decoder": target.spec.decoder,
        "weights": target.spec.weights or str(target.spec.dtype).removeprefix("torch."),
        "others_share": watch.others(),
        "bandwidth": machine.bandwidth,
        "rate": machine.rate,
        "axes": found,
    }
    stem = f"passes_{report['weights'].partition(',')[0]}_{target.spec.decoder}"
    write_whole(RESULTS / f"{stem}.json", dumps(report))
    for axis, rows in found.items():
        write_whole(RESULTS / f"{stem}_{axis}.svg", draw(axis, rows, report))


def measure(
    target: HFTarget, machine: Machine, axis: str, repeats: int
) -> list[dict[str, float | int]]:
    """Median seconds of every point of an axis, and what bandwidth and rate allow."""
    rows = []
    for point in AXES[axis]:
        if point["context"] + point["n"] > target.spec.max_length:
            continue
        seconds = statistics.median(times(pass_of(target, **point), repeats, target.spec.device))
        work = work_of(target, **point)
        attention = machine.limit(*work["attention"])
        limit = sum(machine.limit(*each) for each in work.values())
        rows.append(
            {**point, "seconds": seconds, "limit_seconds": limit, "attention_seconds": attention}
        )
        print(axis, rows[-1])
    return rows


def draw(axis: str, rows: list[dict[str, float | int]], report: dict) -> str:
    """Measured and least milliseconds along an axis."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f", n = {row['n']}" if axis == "context" else ""
        series.setdefault(f"measured{name}", []).append((row[axis], 1e3 * row["seconds"]))
        series.setdefault(f"limit{name}", []).append((row[axis], 1e3 * row["limit_seconds"]))
    place = report["environment"]
    title = (
        f"{place['model']}, {report['weights']}, {report['decoder']}, "
        f"{torch.get_num_threads()} threads"
    )
    return line_chart(series, title=title, x_label=LABELS[axis], y_label="ms per pass")


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
