"""How long a pass of the target takes by the tokens in it: measured here, smoothed, remembered.

Speculation lives off one fact: checking n tokens takes less time than n passes of one token. By
how much depends on machine, model and number type, so it is measured, never assumed.

Paper: Ringel and Romano 2026, CaDDTree, arXiv:2606.01813 (profile every width, take medians).
Differs: few widths, measured in turn so that a machine that slows down slows all of them; the
curve may rise in steps and is only made non-decreasing, not convex.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from slipstream.errors import SettingError
from slipstream.target.hardware import threads_of
from slipstream.target.protocol import Target
from slipstream.types import DraftTree

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = 256
REPEATS = 5
CHUNK = 256
_LAYOUT = 2  # raise when the meaning of a remembered curve changes


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a pass over n tokens, root included; straight between the measured widths.

    Args:
        sizes: measured widths, ascending, the first is 1.
        seconds: of each, not decreasing.
        context: committed tokens they were measured after.

    Raises:
        SettingError: sizes do not ascend from 1, or a time is not above 0 or below the one before.

    Example:
        >>> CostCurve((1, 3), (1.0, 2.0), context=256)(2)
        1.5
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    context: int

    def __post_init__(self) -> None:
        ascends = all(a < b for a, b in pairwise(self.sizes)) and self.sizes[:1] == (1,)
        if not ascends or len(self.sizes) != len(self.seconds):
            raise SettingError("widths", list(self.sizes), "ascending from 1, a time for each")
        if self.seconds[0] <= 0 or any(a > b for a, b in pairwise(self.seconds)):
            raise SettingError("seconds", list(self.seconds), "above 0 and not decreasing")

    def __call__(self, n: float) -> float:
        """Seconds of a pass over n tokens; beyond the widest the last slope goes on."""
        if len(self.sizes) == 1:
            return self.seconds[0]
        right = min(max(bisect_left(self.sizes, n), 1), len(self.sizes) - 1)
        low, high = self.sizes[right - 1 : right + 1]
        before, after = self.seconds[right - 1 : right + 1]
        return before + (after - before) * (n - low) / (high - low)


def measure(
    target: Target,
    *,
    sizes: Sequence[int] = SIZES,
    context: int = CONTEXT,
    repeats: int = REPEATS,
) -> CostCurve:
    """Time real passes over trees of every width, one row, nothing kept.

    The widths take turns, `repeats` times, and each counts with its median.

    Args:
        target: what is timed.
        sizes: widths, ascending from 1.
        context: committed tokens before the tree, cut to what the target has room for.
        repeats: passes per width.

    Raises:
        SettingError: repeats is below 1, or the widths do not ascend from 1.
    """
    if repeats < 1:
        raise SettingError("repeats", repeats, "1 or more")
    room = target.spec.max_length
    sizes = tuple(n for n in sizes if n < room)
    context = max(1, min(context, room - max(sizes, default=1)))
    cache = target.new_cache(1, context + max(sizes, default=1))
    ids = [(7 * i + 3) % target.spec.vocab_size for i in range(context)]
    for start in range(0, context, CHUNK):
        chunk = ids[start : start + CHUNK]
        target.forward([DraftTree.chain(chunk)], cache, [0], last_only=True)
        cache.commit(0, tuple(range(len(chunk))))
    trees = [_tree(n) for n in sizes]
    found: list[list[float]] = [[] for _ in sizes]
    for turn in range(repeats + 1):
        for tree, times in zip(trees, found, strict=True):
            with threads_of(target.spec.decoder):
                begun = _now(target)
                target.forward([tree], cache, [0])
                taken = _now(target) - begun
            cache.rollback(0)
            if turn:  # the first turn warms up
                times.append(taken)
    medians = [statistics.median(times) for times in found]
    return CostCurve(sizes, tuple(non_decreasing(medians)), context)


def non_decreasing(values: Sequence[float]) -> list[float]:
    """The closest non-decreasing values by least squares (pool adjacent violators).

    Example:
        >>> non_decreasing([1.0, 3.0, 2.0, 4.0])
        [1.0, 2.5, 2.5, 4.0]
    """
    pools: list[tuple[float, int]] = []  # mean, count
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            above, several = pools.pop()
            mean = (mean * count + above * several) / (count + several)
            count += several
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def remembered(target: Target, folder: Path) -> CostCurve:
    """The curve of this machine, model and number type; measured when it is first asked for.

    Args:
        target: whose passes are timed.
        folder: of remembered curves; one that cannot be written only costs the time again.
    """
    path = folder / f"cost-{_fingerprint(target)}.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return CostCurve(tuple(value["sizes"]), tuple(value["seconds"]), value["context"])
    except (OSError, ValueError, KeyError, TypeError, SettingError):
        curve = measure(target)
    value = {"sizes": curve.sizes, "seconds": curve.seconds, "context": curve.context}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(value), encoding="utf-8")
        partial.replace(path)
    except OSError:
        pass  # a read-only home: the curve is good all the same
    return curve


def _fingerprint(target: Target) -> str:
    """Whatever changes the time of a pass."""
    spec = target.spec
    device = str(spec.device)
    if spec.device.type == "cuda":
        device = torch.cuda.get_device_name(spec.device)
    facts = [
        _LAYOUT,
        platform.node(),
        platform.machine(),
        device,
        torch.__version__,
        torch.get_num_threads(),
        spec.name,
        str(spec.dtype),
        spec.decoder,
        spec.weights,
        spec.num_layers,
        spec.hidden_size,
        spec.vocab_size,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _tree(n: int) -> DraftTree:
    """A tree of n nodes with siblings, so that the pass needs its mask."""
    return DraftTree(torch.zeros(n, dtype=torch.int64), (torch.arange(n) - 1).div(2).floor().long())


def _now(target: Target) -> float:
    if target.spec.device.type == "cuda":
        torch.cuda.synchronize(target.spec.device)
    return time.perf_counter()


class StepCost:
    """What a step costs by the tokens in its pass: the pass, and what drafting has taken so far.

    Trees that pay for themselves (`trees.budget`) weigh the whole step: drafting is paid for
    whatever the tree, and the more it takes, the larger a tree pays. It is learned while decoding.

    Args:
        curve: seconds of a pass.
    """

    _SHARE = 0.1  # of the newest step in the running mean

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self.overhead = 0.0  # seconds of a step besides its pass
        self._num_learned = 0

    def __call__(self, n: int) -> float:
        """Seconds of a step whose pass holds n tokens."""
        return self.curve(n) + self.overhead

    def learn(self, seconds: float) -> None:
        """Take in what a step took besides its pass."""
        self._num_learned += 1
        share = max(self._SHARE, 1 / self._num_learned)
        self.overhead += share * (seconds - self.overhead)
