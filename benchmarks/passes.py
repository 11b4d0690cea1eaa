"""Seconds of a target pass against tokens, context and rows, beside the machine's limit.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/passes.py [--dtype bfloat16 --decoder fused]

Writes benchmarks/results/passes_<weights>_<decoder>.json and one SVG per axis. Attention is beside
every point three times: what bandwidth and rate allow, what the pass itself spent in it, and what
torch's own attention takes for all layers in the same number type, called alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from slipstream.bench import environment
from slipstream.bench.profile import (
    REPEATS,
    Machine,
    measure_machine,
    profile,
    times,
    work_of,
)
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
    found = {axis: measure(target, machine, axis) for axis in axes}
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


def measure(target: HFTarget, machine: Machine, axis: str) -> list[dict[str, float | int | None]]:
    """Median seconds of every point of an axis, of its attention, and what the machine allows."""
    rows = []
    for point in AXES[axis]:
        if point["context"] + point["n"] > target.spec.max_length:
            continue
        parts = {part.name: part for part in profile(target, machine, **point)}
        whole, inside = parts["pass"], parts.get("attention")
        alone = times(attention_alone(target, **point), REPEATS, target.spec.device)
        rows.append(
            {
                **point,
                "seconds": whole.seconds,
                "limit_seconds": whole.limit_seconds,
                "attention_limit_seconds": machine.limit(*work_of(target, **point)["attention"]),
                "attention_seconds": None if inside is None else inside.seconds,
                "attention_call_seconds": statistics.median(alone),
            }
        )
        print(axis, rows[-1])
    return rows


def attention_alone(
    target: HFTarget, *, n: int, context: int, num_rows: int
) -> Callable[[], object]:
    """Torch's attention of every layer of a pass, each over keys and values of its own."""
    shape, spec = target.draft_shape(), target.spec
    heads, kv_heads, size = shape["num_heads"], shape["num_kv_heads"], shape["head_size"]
    make = partial(torch.randn, dtype=spec.dtype, device=spec.device)
    queries = make(num_rows, heads, n, size)
    kept = [make(2, num_rows, kv_heads, context + n, size) for _ in range(spec.num_layers)]
    sees = torch.ones(n, context + n, dtype=torch.bool, device=spec.device).tril(context)

    def run() -> None:
        for keys, values in kept:
            F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=None if n == 1 else sees, enable_gqa=True
            )

    run()
    return run


def draw(axis: str, rows: list[dict], report: dict) -> str:
    """Measured and least milliseconds along an axis."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f", n = {row['n']}" if axis == "context" else ""
        series.setdefault(f"measured{name}", []).append((row[axis], 1e3 * row["seconds"]))
        series.setdefault(f"limit{name}", []).append((row[axis], 1e3 * row["limit_seconds"]))
        if axis == "context":
            alone = 1e3 * row["attention_call_seconds"]
            series.setdefault(f"torch's attention alone{name}", []).append((row[axis], alone))
    place = report["environment"]
    title = (
        f"{place['model']}, {report['weights']}, {report['decoder']}, "
        f"{torch.get_num_threads()} threads"
    )
    return line_chart(series, title=title, x_label=LABELS[axis], y_label="ms per pass")


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
