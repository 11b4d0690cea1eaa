"""The result file of a bench: one JSON value with a schema version, written whole or not at all.

A row is one method on one task at one temperature and batch size. Names are the glossary's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slipstream.bench import measures
from slipstream.bench.measures import Sample
from slipstream.errors import DataError, OutputError

SCHEMA = 1
KIND = "slipstream bench"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Rates in tokens/s, times in seconds summed over the prompts.

    Args:
        tau: tokens/pass, bonus included. `num_accepted` is the same without the target's own
            token: drafted tokens kept per pass.
        speedup: decoding rate over plain decoding's in the same run, over the prompts whose
            tokens are plain decoding's (ties included); None where there are none.
        prefill_latency: p50, p90 and p99 over answers, seconds from prompt to first token.
        token_latency: likewise, mean seconds per token after the first.
        lossless: the answers have the target's law; False where the rule gives that up.
        loops: share of the answers that end in a repetition loop.
        tau_without_loops: tau over the other answers.
        identical: answers equal to plain decoding's; `ties` part from it at a true tie,
            `different` otherwise. None where the verifier does not promise equality.
        efficiency: speed-up over what tau and the pass times allow.
        other_share: decoding time outside drafting and target passes.
        cost_ratio: drafting over the target pass.
    """

    task: str
    method: str
    temperature: float
    num_rows: int
    num_prompts: int
    num_tokens: int
    tau: float | None
    tau_ci: tuple[float, float] | None
    num_accepted: float | None
    alpha: list[float]
    reach: list[float]
    tokens_per_second: float | None
    decode_tokens_per_second: float | None
    speedup: float | None
    speedup_ci: tuple[float, float] | None
    num_speedup_prompts: int
    prefill_seconds: float
    draft_seconds: float
    target_seconds: float
    other_seconds: float
    draft_seconds_per_pass: float | None
    target_seconds_per_pass: float | None
    cost_ratio: float | None
    other_share: float | None
    efficiency: float | None
    prefill_latency: dict[str, float] | None
    token_latency: dict[str, float] | None
    lossless: bool
    loops: float
    tau_without_loops: float | None
    identical: int | None = None
    ties: int | None = None
    different: int | None = None


@dataclass(frozen=True, slots=True)
class Equality:
    """How a method's answers compare with plain decoding's, by prompt index."""

    ties: frozenset[int] = frozenset()
    different: frozenset[int] = frozenset()


def make_row(
    task: str,
    method: str,
    samples: Sequence[Sample],
    plain: Sequence[Sample],
    *,
    temperature: float,
    num_rows: int,
    equality: Equality | None,
    lossless: bool = True,
) -> Row:
    """Sum one method's answers up.

    Args:
        task: their task.
        method: the method's name as typed.
        samples: its answers.
        plain: plain decoding's, same prompts, same order.
        temperature: of the run.
        num_rows: batch size.
        equality: None where equality is not promised (then every prompt counts for speed-up).
        lossless: the answers have the target's law.
    """
    fair = [
        i for i, s in enumerate(samples) if not equality or s.prompt_index not in equality.different
    ]
    mine, theirs = [samples[i] for i in fair], [plain[i] for i in fair]
    spent, reached = measures.cost(samples), measures.reach(samples)
    tau = measures.tau(samples)
    counts = None
    if equality is not None:
        differ = len(equality.ties) + len(equality.different)
        counts = (len(samples) - differ, len(equality.ties), len(equality.different))
    return Row(
        task=task,
        method=method,
        temperature=temperature,
        num_rows=num_rows,
        num_prompts=len(samples),
        num_tokens=sum(s.num_tokens for s in samples),
        tau=tau,
        tau_ci=measures.tau_interval(samples),
        num_accepted=None if tau is None else tau - 1,
        alpha=measures.alpha(reached),
        reach=reached,
        tokens_per_second=measures.whole_rate(samples),
        decode_tokens_per_second=measures.decode_rate(samples),
        speedup=measures.speedup(mine, theirs),
        speedup_ci=measures.speedup_interval(mine, theirs),
        num_speedup_prompts=len(mine),
        prefill_seconds=sum(s.prefill_seconds for s in samples),
        draft_seconds=sum(s.draft_seconds for s in samples),
        target_seconds=sum(s.target_seconds for s in samples),
        other_seconds=sum(s.other_seconds for s in samples),
        draft_seconds_per_pass=spent and spent.draft_seconds,
        target_seconds_per_pass=spent and spent.target_seconds,
        cost_ratio=spent and spent.cost_ratio,
        other_share=spent and spent.other_share,
        efficiency=measures.efficiency(mine, theirs),
        prefill_latency=measures.prefill_latency(samples),
        token_latency=measures.token_latency(samples),
        lossless=lossless,
        loops=sum(s.is_loop for s in samples) / len(samples) if samples else 0.0,
        tau_without_loops=measures.tau([s for s in samples if not s.is_loop]),
        identical=counts and counts[0],
        ties=counts and counts[1],
        different=counts and counts[2],
    )


@dataclass(slots=True)
class BenchReport:
    """Everything a bench found.

    Args:
        environment: see `environment.describe`, with `busy_share` and `is_busy`.
        settings: how it was run.
        prompts: per task how many, the prompt mode and a hash of their ids.
        rows: the table.
        samples: per answer, numbers without text.
        notes: what a reader must know.
        is_partial: interrupted; the prompts that were finished by every method count.
    """

    environment: dict[str, object]
    settings: dict[str, object]
    prompts: list[dict[str, object]]
    rows: list[Row] = field(default_factory=list)
    samples: list[dict[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_partial: bool = False

    def to_dict(self) -> dict[str, object]:
        """The JSON value."""
        return {"schema": SCHEMA, "kind": KIND, **asdict(self)}


def read(path: Path) -> dict[str, object]:
    """A bench file as a dict.

    Raises:
        DataError: not a bench file, or of another schema.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a bench result: {error}") from error
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise DataError(f'{path} is not a bench result, expected "kind": "{KIND}"')
    if value.get("schema") != SCHEMA:
        raise DataError(f"{path} has schema {value.get('schema')}, expected {SCHEMA}")
    return value


def check_output(path: Path, *, overwrite: bool) -> None:
    """Refuse an output file that cannot or must not be written, before anything is measured.

    Raises:
        OutputError: it exists and `overwrite` is off, or its folder is missing.
    """
    if path.is_dir():
        raise OutputError(f"output {path} is a folder, expected a file", "name a .json file")
    if path.exists() and not overwrite:
        raise OutputError(f"output {path} exists", "choose another --output, or --overwrite")
    if not path.parent.is_dir():
        raise OutputError(f"output folder {path.parent} does not exist", "make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"output folder {path.parent} cannot be written", "choose another")


def dumps(value: object) -> str:
    """JSON text of a result, indented, without NaN."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: a temporary neighbour, then a rename.

    Raises:
        OutputError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise OutputError(
            f"output {path} cannot be written: {error.strerror or error}", "choose another --output"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
