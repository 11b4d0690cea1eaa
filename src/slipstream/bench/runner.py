"""The one runner: methods x prompts, warmed up, interleaved, plain decoding always among them.

Each prompt (or batch of prompts) is answered by every method in turn before the next one is
touched, and the order of the methods rotates, so that a machine that slows down slows all of
them. All methods share one target and one loop; prompts are token ids before the clock starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from slipstream.bench import environment, measures
from slipstream.bench.equality import Judge, judge_for
from slipstream.bench.measures import Sample
from slipstream.bench.results import BenchReport, Equality, make_row
from slipstream.bench.specs import PLAIN
from slipstream.bench.tasks import BenchPrompt, ids_hash
from slipstream.data.loops import ends_in_loop
from slipstream.target.protocol import Target
from slipstream.types import Sampling

WARM_UP_TOKENS = 16

Progress = Callable[[int, int], None]


class Generates(Protocol):
    """What the runner needs of an engine."""

    target: Target

    def generate(self, prompts: list[list[int]], **settings: Any) -> list[Any]:
        """Answer token ids; see `slipstream.engine`."""

    def describe(self) -> dict[str, Any]:
        """How it is set up, for JSON."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How every method answers.

    Args:
        max_new_tokens: per answer.
        temperatures: one pass over everything for each.
        rows: batch sizes, likewise.
        top_k: 0 keeps all tokens.
        top_p: nucleus.
        seed: key of the noise.
    """

    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0,)
    rows: tuple[int, ...] = (1,)
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def sampling(self, temperature: float) -> Sampling:
        """The sampling settings at a temperature."""
        return Sampling(temperature, self.top_k, self.top_p, self.seed)


@dataclass(slots=True)
class Measured:
    """Answers of every method to the same prompts, in the same order."""

    samples: dict[str, list[Sample]]
    is_partial: bool = False


def measure(
    engines: Mapping[str, Generates],
    prompts: Sequence[BenchPrompt],
    arguments: Mapping[str, Any],
    *,
    on_group: Callable[[], None] = lambda: None,
) -> Measured:
    """Answer every prompt with every method, interleaved.

    Args:
        engines: method name → engine.
        prompts: of one task.
        arguments: of `Engine.generate`, `num_rows` included; a batch is `num_rows` prompts.
        on_group: called when a batch was answered by every method.

    Returns:
        What was finished; an interrupt keeps the batches that every method answered.
    """
    names, size = list(engines), arguments["num_rows"]
    measured = Measured({name: [] for name in names})
    for number, start in enumerate(range(0, len(prompts), size)):
        group = prompts[start : start + size]
        shift = number % len(names)
        answered: dict[str, list[Sample]] = {}
        try:
            for name in names[shift:] + names[:shift]:
                answered[name] = _answer(engines[name], group, start, arguments)
        except KeyboardInterrupt:
            measured.is_partial = True
            return measured
        for name in names:
            measured.samples[name] += answered[name]
        on_group()
    return measured


def _answer(
    engine: Generates, group: Sequence[BenchPrompt], start: int, arguments: Mapping[str, Any]
) -> list[Sample]:
    """One batch by one method; time the results do not account for is shared as `other`."""
    began = time.perf_counter()
    results = engine.generate([list(prompt.ids) for prompt in group], **arguments)
    wall = time.perf_counter() - began
    samples = [to_sample(result, start + i) for i, result in enumerate(results)]
    known = sum(s.prefill_seconds + s.decode_seconds for s in samples)
    rest = max(wall - known, 0.0) / len(samples)
    return [replace(sample, other_seconds=sample.other_seconds + rest) for sample in samples]


def to_sample(result: Any, prompt_index: int) -> Sample:
    """What the measures need of an `engine.Result`."""
    return Sample(
        prompt_index=prompt_index,
        token_ids=tuple(result.token_ids),
        num_target_passes=result.num_target_passes,
        reach=tuple(result.reach),
        prefill_seconds=result.prefill_seconds,
        draft_seconds=result.draft_seconds,
        target_seconds=result.target_seconds,
        other_seconds=result.other_seconds,
        finish_reason=result.finish_reason,
        is_loop=ends_in_loop(result.token_ids),
    )


def compare(
    samples: Sequence[Sample], plain: Sequence[Sample], prompts: Sequence[BenchPrompt], judge: Judge
) -> Equality:
    """Judge every answer that is not plain decoding's."""
    ties, different = set(), set()
    for sample, reference in zip(samples, plain, strict=True):
        ids = prompts[sample.prompt_index].ids
        found = judge.judge(sample.prompt_index, ids, reference.token_ids, sample.token_ids)
        if found is not None:
            (ties if found.is_tie else different).add(sample.prompt_index)
    return Equality(frozenset(ties), frozenset(different))


def promises_equality(engine: Generates, sampling: Sampling) -> bool:
    """True where a method's tokens must be plain decoding's, not only their distribution."""
    return sampling.is_greedy or engine.describe().get("verifier") in (None, "walk")


def keeps_the_law(engine: Generates, sampling: Sampling) -> bool:
    """True where answers have the target's law: any rule when greedy, else all but lossy ones."""
    return sampling.is_greedy or bool(engine.describe().get("lossless", True))


def run(
    engines: Mapping[str, Generates],
    tasks: Mapping[str, Sequence[BenchPrompt]],
    settings: RunSettings,
    *,
    load_twin: Callable[[], Target],
    on_progress: Progress = lambda done, total: None,
    on_rows: Callable[[BenchReport], None] = lambda report: None,
) -> BenchReport:
    """Measure every method on every task at every temperature and batch size.

    Args:
        engines: method name → engine, all on one target; plain decoding must be there.
        tasks: task → prompts.
        settings: how to answer.
        load_twin: gives the target in float64, asked only when tokens differ.
        on_progress: told batches done and batches in all.
        on_rows: given the report as it grows, after every task at a temperature and batch size.

    Returns:
        The report; partial after an interrupt, with the rows of what was finished.
    """
    target = engines[PLAIN.name].target
    report = BenchReport(
        environment=environment.describe(target),
        settings=asdict(settings),
        prompts=[
            {"task": task, "num_prompts": len(prompts), "ids_hash": ids_hash(prompts)}
            for task, prompts in tasks.items()
        ],
    )
    before, watch = environment.busy_share(), environment.Watch()
    plan = [(t, n, task) for t in settings.temperatures for n in settings.rows for task in tasks]
    total, done = sum(-(-len(tasks[task]) // n) for _, n, task in plan), 0

    def advance() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    try:
        _warm_up(engines, tasks, settings)
        for temperature, num_rows, task in plan:
            arguments = _arguments(settings, temperature, num_rows)
            measured = measure(engines, tasks[task], arguments, on_group=advance)
            judge = _judge(target, settings.sampling(temperature), measured, tasks[task], load_twin)
            _add_rows(report, engines, measured, tasks[task], judge, arguments, task)
            if measured.is_partial:
                report.is_partial = True
                break
            on_rows(report)
    except KeyboardInterrupt:
        report.is_partial = True
    during = watch.others()
    _note(report, (before, during, environment.busy_share()))
    if max(settings.temperatures) > 0:
        report.notes += _lossy(engines)
    return report


def _arguments(settings: RunSettings, temperature: float, num_rows: int) -> dict[str, Any]:
    return {
        "max_new_tokens": settings.max_new_tokens,
        "temperature": temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "seed": settings.seed,
        "num_rows": num_rows,
    }


def _warm_up(
    engines: Mapping[str, Generates],
    tasks: Mapping[str, Sequence[BenchPrompt]],
    settings: RunSettings,
) -> None:
    """A short answer by every method at every batch size, not counted."""
    prompts = [prompt for group in tasks.values() for prompt in group]
    tokens = min(WARM_UP_TOKENS, settings.max_new_tokens)
    for num_rows in settings.rows:
        arguments = _arguments(settings, settings.temperatures[0], num_rows)
        for engine in engines.values():
            batch = [list(prompt.ids) for prompt in prompts[:num_rows]]
            engine.generate(batch, **(arguments | {"max_new_tokens": tokens}))


def _judge(
    target: Target,
    sampling: Sampling,
    measured: Measured,
    prompts: Sequence[BenchPrompt],
    load_twin: Callable[[], Target],
) -> Judge:
    plain = measured.samples[PLAIN.name]
    pairs = [prompts[s.prompt_index].ids for s in plain], [s.token_ids for s in plain]
    return judge_for(target, sampling, load_twin=load_twin, plain=lambda: pairs)


def _add_rows(
    report: BenchReport,
    engines: Mapping[str, Generates],
    measured: Measured,
    prompts: Sequence[BenchPrompt],
    judge: Judge,
    arguments: Mapping[str, Any],
    task: str,
) -> None:
    plain = measured.samples[PLAIN.name]
    if not plain:
        return
    where = {"temperature": arguments["temperature"], "num_rows": arguments["num_rows"]}
    for name, samples in measured.samples.items():
        is_equal = promises_equality(engines[name], judge.sampling)
        equality = compare(samples, plain, prompts, judge) if is_equal else None
        is_lossless = keeps_the_law(engines[name], judge.sampling)
        row = make_row(task, name, samples, plain, equality=equality, lossless=is_lossless, **where)
        report.rows.append(row)
        report.samples += [
            {"task": task, "method": name, **where, **_brief(sample, prompts)} for sample in samples
        ]


def _brief(sample: Sample, prompts: Sequence[BenchPrompt]) -> dict[str, object]:
    return {
        "prompt_index": sample.prompt_index,
        "id": prompts[sample.prompt_index].id,
        "num_prompt_tokens": len(prompts[sample.prompt_index].ids),
        "num_tokens": sample.num_tokens,
        "num_target_passes": sample.num_target_passes,
        "tau": measures.tau([sample]),
        "prefill_seconds": sample.prefill_seconds,
        "decode_seconds": sample.decode_seconds,
        "finish_reason": sample.finish_reason,
        "is_loop": sample.is_loop,
    }


def _lossy(engines: Mapping[str, Generates]) -> list[str]:
    """A note for every method whose rule changes what is said."""
    described = {name: engine.describe() for name, engine in engines.items()}
    return [
        f"{name}: verifier {how['verifier']} is lossy: above temperature 0 its answers do not "
        "have the target's distribution"
        for name, how in described.items()
        if not how.get("lossless", True)
    ]


def _note(report: BenchReport, busy_shares: Sequence[float | None]) -> None:
    """Say what a reader must know: a busy machine, methods that lose, answers that differ."""
    busy = max((share for share in busy_shares if share is not None), default=None)
    is_busy = busy is not None and busy > environment.BUSY_SHARE
    report.environment |= {"busy_share": busy, "is_busy": is_busy}
    if is_busy:
        report.notes.append(
            f"other programs took {busy:.0%} of the CPU: trust ratios, not seconds, and rerun idle"
        )
    if report.is_partial:
        report.notes.append("interrupted: only prompts that every method finished are counted")
    for row in report.rows:
        name = f"{row.method} on {row.task} at temperature {row.temperature:g}, {row.num_rows} rows"
        if row.different:
            report.notes.append(
                f"{name}: {row.different} answers differ from plain decoding's beyond rounding; "
                "they are left out of its speed-up"
            )
    report.notes += _slower(report)


def _slower(report: BenchReport) -> list[str]:
    """A note for every method that is slower than plain decoding beyond noise somewhere."""
    notes = []
    for method in dict.fromkeys(row.method for row in report.rows if row.method != PLAIN.name):
        rows = [row for row in report.rows if row.method == method and row.speedup is not None]
        slow = [row for row in rows if (row.speedup_ci or (0.0, row.speedup))[1] < 1]
        places = ", ".join(f"{row.task} T={row.temperature:g} rows={row.num_rows}" for row in slow)
        if slow:
            notes.append(f"{method}: slower than plain decoding on {places}")
    return notes
