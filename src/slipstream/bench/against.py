"""Two bench results against each other: what changed beyond noise, and is anything worse?

Rows are matched by task, method, temperature and batch size, prompts by their id and length, and
only what both results hold is compared. Intervals are bootstrapped over those prompts, the same
ones drawn on both sides. They know nothing of how a machine drifts between two runs, so times get
a tolerance on top; accepted length is a count and gets none.

* tau: compared as it is.
* speed-up: each result's own plain decoding is its ruler, so a busy machine does no harm. Between
  machines it is told without a verdict: what a wider pass costs is a matter of the processor.
* tokens per second: judged only between runs on one machine that was idle both times. It shows
  what a speed-up cannot: that the target itself became slower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from slipstream.bench.measures import Interval, interval, resampled_ratio, resamples
from slipstream.bench.specs import PLAIN
from slipstream.errors import DataError, SettingError

TOLERANCE = 0.05  # share by which times may drift between two runs on an idle machine
SAME_QUESTION = ("max_new_tokens", "top_k", "top_p", "seed")
SAME_MACHINE = ("cpu", "instructions", "accelerator", "num_threads", "dtype")
UNJUDGED = "other machine"
RATE = "decode_tokens_per_second"
ROUNDING = 1e-9

NOTHING_SHARED = (
    "the two results share no prompt of any row",
    "run bench with the --tasks, --methods and --temperatures of the old result",
)

Key = tuple[str, str, float, int]  # task, method, temperature, rows
Prompt = tuple[str, str, int]  # task, id, length
Sample = Mapping[str, Any]
Samples = dict[tuple[str, int], Sample]  # by prompt id and prompt length
Measure = Callable[[np.ndarray], np.ndarray]  # drawn prompts [R, P] to pooled values [R]


@dataclass(frozen=True, slots=True)
class Change:
    """One measure of one row, new over old.

    Args:
        task: of both rows.
        method: likewise.
        temperature: likewise.
        num_rows: likewise.
        measure: tau, speedup or decode_tokens_per_second.
        old: value over the shared prompts.
        new: likewise.
        ratio: new over old.
        ratio_ci: its 95% interval over prompts; None below two shared prompts.
        num_prompts: shared by both results.
        verdict: "better" or "worse" when all of the interval is, by more than the tolerance;
            else "same"; "other machine" where that alone may be why.
    """

    task: str
    method: str
    temperature: float
    num_rows: int
    measure: str
    old: float
    new: float
    ratio: float
    ratio_ci: Interval | None
    num_prompts: int
    verdict: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """All changes between two results.

    Args:
        changes: three measures a row, less what cannot be compared.
        missing: rows of the old result that the new one lacks.
        notes: what a reader must know.
    """

    changes: tuple[Change, ...]
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_worse(self) -> bool:
        """True when a measure fell beyond noise: the gate fails."""
        return any(change.verdict == "worse" for change in self.changes)

    def to_dict(self) -> dict[str, object]:
        """The JSON value."""
        return {"is_worse": self.is_worse, **asdict(self)}


def compare(
    old: Mapping[str, Any], new: Mapping[str, Any], *, tolerance: float = TOLERANCE
) -> Comparison:
    """Compare two results, as read from their files.

    Args:
        old: the reference.
        new: what is judged.
        tolerance: share of a time ratio that counts as drift, in [0, 1).

    Raises:
        SettingError: the tolerance is outside its range.
        DataError: they asked different questions, or share no prompt of any row.
    """
    if not 0 <= tolerance < 1:
        raise SettingError("tolerance", tolerance, "in [0, 1)", "0.05 allows 5%")
    check_same_question(old, new)
    before, after = _by_row(old), _by_row(new)
    differing, busy = _differing(old, new), _busy(old, new)
    changes = [
        change
        for key in before
        if key in after
        for measure in _measures(before, after, key)
        if not (differing or busy) or measure[0] != RATE
        if (change := _change(key, *measure, tolerance=tolerance)) is not None
    ]
    if not changes:
        raise DataError(*NOTHING_SHARED)
    if differing:
        changes = [
            replace(change, verdict=UNJUDGED) if change.measure == "speedup" else change
            for change in changes
        ]
    missing = tuple(_name(key) for key in before if key not in after)
    return Comparison(tuple(changes), missing, tuple(_notes(old, new, differing, busy)))


def check_same_question(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse results whose numbers mean different things.

    Raises:
        DataError: another model, answer length, nucleus or seed.
    """
    pairs = [("model", old["environment"]["model"], new["environment"]["model"])]
    pairs += [(n, old["settings"].get(n), new["settings"].get(n)) for n in SAME_QUESTION]
    for name, was, now in pairs:
        if was != now:
            option = name.replace("_", "-")
            raise DataError(
                f"the old result was measured with {option} {was}, the new one with {now}",
                f"run bench with --{option} {was}",
            )


def check_shared(old: Mapping[str, Any], keys: Iterable[Key], prompts: Collection[Prompt]) -> None:
    """Refuse an old result of which nothing will be measured again, before anything is.

    Args:
        old: the reference.
        keys: rows that will be measured.
        prompts: task, id and length of the prompts that will be asked.

    Raises:
        DataError: no row with a prompt in common.
    """
    asked, again = set(prompts), set(keys)
    for key, samples in _by_row(old).items():
        if key in again and any((key[0], *prompt) in asked for prompt in samples):
            return
    raise DataError(*NOTHING_SHARED)


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What tells the two runs' machines apart; what a result does not say tells nothing."""
    where, now = old["environment"], new["environment"]
    unsaid = _unsaid(old, new)
    return [
        name
        for name in SAME_MACHINE
        if where.get(name) != now.get(name) and not (name == "instructions" and unsaid)
    ]


def _unsaid(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The results that do not say what instructions their processor has; results once did not."""
    places = {"old": old["environment"], "new": new["environment"]}
    return [
        name
        for name, place in places.items()
        if place.get("instructions") is None and place.get("accelerator") is None
    ]


def _busy(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The runs that shared their machine."""
    places = {"old": old["environment"], "new": new["environment"]}
    return [name for name, place in places.items() if place.get("is_busy", True)]


def _notes(
    old: Mapping[str, Any], new: Mapping[str, Any], differing: list[str], busy: list[str]
) -> list[str]:
    """What holds some of the two results' numbers from being judged, or may mislead."""
    notes = []
    if differing:
        notes.append(
            f"other {', '.join(differing)}: tokens per second are not compared, speed-ups are not "
            "judged"
        )
    if busy:
        runs = " and ".join(busy)
        notes.append(f"the machine was busy in the {runs} run: tokens per second are not compared")
    if unsaid := _unsaid(old, new):
        notes.append(
            f"the {' and the '.join(unsaid)} result does not say what instructions its processor "
            "has: taken for the same"
        )
    return notes


def _by_row(result: Mapping[str, Any]) -> dict[Key, Samples]:
    """The samples of every row."""
    found: dict[Key, Samples] = {}
    for sample in result["samples"]:
        key = (sample["task"], sample["method"], sample["temperature"], sample["num_rows"])
        prompt = (sample["id"], sample["num_prompt_tokens"])
        found.setdefault(key, {})[prompt] = sample
    return found


def _name(key: Key) -> str:
    task, method, temperature, rows = key
    return f"{method} on {task} at temperature {temperature:g}, {rows} rows"


def _measures(
    old: Mapping[Key, Samples], new: Mapping[Key, Samples], key: Key
) -> Iterator[tuple[str, Measure, Measure, int]]:
    """Name, old and new of what a row can be compared by, over the prompts all four lists hold.

    The last entry is how many prompts those are.
    """
    task, method, temperature, rows = key
    plain = (task, PLAIN.name, temperature, rows)
    lists = [old[key], old.get(plain, {}), new[key], new.get(plain, {})]
    shared = sorted(set.intersection(*(set(each) for each in lists)))
    if not shared:
        return
    mine, ruler, now, now_ruler = ([each[prompt] for prompt in shared] for each in lists)
    count = len(shared)
    if method != PLAIN.name:
        yield "tau", _tau(mine), _tau(now), count
        yield "speedup", _over(mine, ruler), _over(now, now_ruler), count
    yield RATE, _rate(mine), _rate(now), count


def _change(
    key: Key, name: str, old: Measure, new: Measure, count: int, *, tolerance: float
) -> Change | None:
    """One measure judged; None where either side has no value."""
    everyone = np.arange(count)[None]  # [1, P]
    was, now = float(old(everyone)[0]), float(new(everyone)[0])
    if not np.isfinite([was, now]).all() or was <= 0:
        return None
    bounds = None
    if count > 1:
        draw = resamples(count)
        with np.errstate(divide="ignore", invalid="ignore"):
            bounds = interval(new(draw) / old(draw))
    return Change(
        *key,
        measure=name,
        old=was,
        new=now,
        ratio=now / was,
        ratio_ci=bounds,
        num_prompts=count,
        verdict=judge(bounds, 0.0 if name == "tau" else tolerance),
    )


def judge(bounds: Interval | None, tolerance: float) -> str:
    """Worse or better when the whole interval of the ratio is, by more than the tolerance.

    Example:
        >>> judge((0.8, 0.9), 0.05), judge((0.9, 1.1), 0.05), judge((0.93, 0.97), 0.05)
        ('worse', 'same', 'same')
    """
    if bounds is None:
        return "same"
    if bounds[1] < 1 - tolerance - ROUNDING:
        return "worse"
    return "better" if bounds[0] > 1 + tolerance + ROUNDING else "same"


def _decoded(samples: Sequence[Sample]) -> list[float]:
    return [max(sample["num_tokens"] - 1, 0) for sample in samples]


def _tau(samples: Sequence[Sample]) -> Measure:
    passes = [sample["num_target_passes"] for sample in samples]
    return lambda draw: resampled_ratio(_decoded(samples), passes, draw)


def _rate(samples: Sequence[Sample]) -> Measure:
    seconds = [sample["decode_seconds"] for sample in samples]
    return lambda draw: resampled_ratio(_decoded(samples), seconds, draw)


def _over(samples: Sequence[Sample], plain: Sequence[Sample]) -> Measure:
    fast, slow = _rate(samples), _rate(plain)
    return lambda draw: fast(draw) / slow(draw)
