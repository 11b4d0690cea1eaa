"""Where a target pass spends its time, against what the machine could do at best.

A part has to read its weights once and to multiply: it cannot be faster than bytes over measured
bandwidth, nor than operations over the measured rate. Both are measured here, in the same process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slipstream.target.compiled import CompiledDecoder
from slipstream.target.fused import FusedDecoder
from slipstream.target.hardware import threads_of
from slipstream.target.hf import HFTarget
from slipstream.types import DraftTree

STREAM_BYTES = 1 << 28  # read to measure bandwidth
SQUARE = 1024  # of the product that measures the rate
REPEATS = 9
CHUNK = 256


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a pass.

    Args:
        name: projections, attention, mlp, head, other, or pass for the whole.
        seconds: measured, median.
        limit_seconds: the least that bandwidth and rate allow.
        num_bytes: read.
        num_operations: multiplications and additions.
    """

    name: str
    seconds: float
    limit_seconds: float
    num_bytes: int
    num_operations: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine does at best, with the threads that the target uses.

    Args:
        bandwidth: bytes/s of reading.
        rate: operations/s of a large product in the target's number type.
    """

    bandwidth: float
    rate: float

    def limit(self, num_bytes: int, num_operations: int) -> float:
        """The least seconds for so much reading and multiplying."""
        return max(num_bytes / self.bandwidth, num_operations / self.rate)


def measure_machine(dtype: torch.dtype, device: torch.device) -> Machine:
    """Bandwidth and rate, the best of several runs: a limit is not a median."""
    stream = torch.zeros(STREAM_BYTES // 8, dtype=torch.int64, device=device)
    read = min(times(lambda: stream.sum(), REPEATS, device))
    multiplied = []
    # Some processors multiply narrow numbers slower than they could multiply them widened.
    for each in {dtype, torch.float32}:
        square = torch.ones(SQUARE, SQUARE, dtype=each, device=device)
        multiplied.append(min(times(lambda square=square: square @ square, REPEATS, device)))
    return Machine(STREAM_BYTES / read, 2 * SQUARE**3 / min(multiplied))


def profile(
    target: HFTarget, machine: Machine, *, n: int, context: int, num_rows: int = 1
) -> list[Part]:
    """Every part of a pass over chains of n tokens, the whole pass last.

    The compiled decoder times its own parts. For the fused one the products are timed alone, and
    what is left of the pass is `other`; the stock one has no parts of ours.

    Args:
        target: loaded.
        machine: its limits.
        n: tokens per row, root included.
        context: committed tokens of each row.
        num_rows: rows in the pass.
    """
    run = pass_of(target, n=n, context=context, num_rows=num_rows)
    twin, samples, seconds = target.twin, [], []
    for _ in range(REPEATS):
        seconds += times(run, 1, target.spec.device)
        if isinstance(twin, CompiledDecoder):
            samples.append(twin.seconds())
    whole = statistics.median(seconds)
    medians: dict[str, float] = {}
    if samples:
        medians = {name: statistics.median(each[name] for each in samples) for name in samples[0]}
    elif twin is not None:
        medians = _products_alone(twin, target, n * num_rows)
        medians["other"] = 0.0
    if medians:
        medians["other"] += max(0.0, whole - sum(medians.values()))
    work = work_of(target, n=n, context=context, num_rows=num_rows)
    parts = [
        Part(name, medians[name], machine.limit(*work[name]), *work[name])
        for name in medians
        if name in work
    ]
    if medians:
        parts.append(Part("other", medians["other"], 0.0, 0, 0))
    limit = sum(machine.limit(*each) for each in work.values())
    num_bytes, num_operations = (sum(column) for column in zip(*work.values(), strict=True))
    return [*parts, Part("pass", whole, limit, num_bytes, num_operations)]


def work_of(
    target: HFTarget, *, n: int, context: int, num_rows: int = 1
) -> dict[str, tuple[int, int]]:
    """Bytes and operations that each part cannot do without."""
    shape, spec = target.draft_shape(), target.spec
    size, count = shape["head_size"], n * num_rows
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = shape["num_heads"], shape["num_kv_heads"]
    weights = {
        "projections": spec.num_layers * hidden * size * (2 * heads + 2 * kv_heads),
        "mlp": spec.num_layers * 3 * hidden * inner,
        "head": hidden * spec.vocab_size,
    }
    stored = _bytes_per_weight(target)
    keys = num_rows * spec.num_layers * (context + n) * 2 * kv_heads * size
    work = {
        name: (int(number * stored[name]), 2 * count * number) for name, number in weights.items()
    }
    seen = spec.num_layers * count * (context + n)
    work["attention"] = (keys * spec.dtype.itemsize, 4 * seen * heads * size)
    return work


def pass_of(target: HFTarget, *, n: int, context: int, num_rows: int = 1) -> Callable[[], object]:
    """One pass over chains of n tokens behind a filled cache, ready to be called many times."""
    size = target.spec.vocab_size
    cache = target.new_cache(num_rows, context + n)
    prompt = [(7 * i + 3) % size for i in range(context)]
    slots = range(num_rows)
    for slot in slots:
        for start in range(0, context, CHUNK):
            chunk = DraftTree.chain(prompt[start : start + CHUNK])
            target.forward([chunk], cache, [slot], last_only=True)
            cache.commit(slot, range(len(chunk)))
    trees = [DraftTree.chain([(11 * i + 5) % size for i in range(n)])] * num_rows

    def run() -> object:
        for slot in slots:
            cache.rollback(slot)
        with threads_of(target.spec.decoder):
            return target.forward(trees, cache, list(slots))

    run()
    return run


def times(run: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each call, until the device has done what it was told."""
    found = []
    for _ in range(repeats):
        begun = _now(device)
        run()
        found.append(_now(device) - begun)
    return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":  # a call returns when its kernels are launched, not when they end
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _products_alone(twin: FusedDecoder, target: HFTarget, count: int) -> dict[str, float]:
    """Seconds of all layers' projections and of all MLPs' products, nothing between them."""
    shape, spec = target.draft_shape(), target.spec
    widths = (
        shape["hidden_size"],
        shape["num_heads"] * shape["head_size"],
        shape["intermediate_size"],
    )
    x, attended, inner = (
        torch.zeros(1, count, width, dtype=spec.dtype, device=spec.device) for width in widths
    )

    def projections() -> None:
        for layer in twin.layers:
            layer.qkv(x)
            layer.output(attended, x)

    def mlp() -> None:
        for layer in twin.layers:
            layer.gate_up(x)
            layer.down(inner, x)

    with torch.no_grad():
        return {
            "projections": statistics.median(times(projections, REPEATS, spec.device)),
            "mlp": statistics.median(times(mlp, REPEATS, spec.device)),
        }


def _bytes_per_weight(target: HFTarget) -> dict[str, float]:
    """Bytes of a stored weight, by part."""
    twin, plain = target.twin, float(target.spec.dtype.itemsize)
    if not isinstance(twin, CompiledDecoder):
        return dict.fromkeys(("projections", "mlp", "head"), plain)
    layer = twin.layers[0]
    return {
        "projections": layer.qkv.num_bytes / layer.qkv.num_weights,
        "mlp": layer.down.num_bytes / layer.down.num_weights,
        "head": twin.head.num_bytes / twin.head.num_weights,
    }
