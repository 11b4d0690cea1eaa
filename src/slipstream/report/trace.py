"""Real decodings as a file: every step's tree, its probabilities, and what became of it.

`slipstream generate --trace FILE` and `bench --trace FILE` write it, `slipstream report` steps
through it. It holds text pieces of its tokens, so that no tokenizer is needed to look at it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import DataError, ShapeError
from slipstream.report.page import Span, spans
from slipstream.types import DraftTree, Step, Verdict

SCHEMA = 1
KIND = "slipstream trace"


@dataclass(frozen=True, slots=True)
class Trace:
    """One answer, step by step.

    Args:
        title: what tells it from the others of its file: method, and task or prompt.
        method: the method's name as typed.
        prompt: the question, as text.
        temperature: it was decoded at.
        spans: the answer by who proposed it.
        steps: in order.
        pieces: text of every token id that occurs.
    """

    title: str
    method: str
    prompt: str
    temperature: float
    spans: tuple[Span, ...]
    steps: tuple[Step, ...]
    pieces: Mapping[int, str]

    def piece(self, token: int) -> str:
        """Text of one token."""
        return self.pieces[token]


def trace_of(
    result: Any,
    tokenizer: Any | None,
    *,
    title: str,
    method: str,
    prompt: str,
    temperature: float,
) -> Trace:
    """The trace of an answer that was decoded with `trace=True`.

    Args:
        result: an `engine.Result` with its steps.
        tokenizer: the target's, or None to show ids.
        title: see `Trace`.
        method: see `Trace`.
        prompt: see `Trace`.
        temperature: see `Trace`.
    """
    if tokenizer is None:
        decode: Callable[[list[int]], str] = lambda ids: "".join(f"<{one}>" for one in ids)  # noqa: E731
        piece = str
    else:
        decode = tokenizer.decode
        piece = lambda token: tokenizer.decode([token], skip_special=False)  # noqa: E731
    ids = {token for step in result.steps for token in _tokens(step)}
    return Trace(
        title=title,
        method=method,
        prompt=prompt,
        temperature=temperature,
        spans=tuple(spans(result.token_ids[:1], result.steps, decode)),
        steps=tuple(result.steps),
        pieces={token: piece(token) for token in sorted(ids)},
    )


def dumps(traces: Sequence[Trace], about: Mapping[str, object]) -> str:
    """The file's text.

    Args:
        traces: of one run.
        about: where it was decoded: `Engine.describe()` or the like, for the reader.
    """
    value = {"schema": SCHEMA, "kind": KIND, "about": dict(about)}
    value["traces"] = [_trace_value(trace) for trace in traces]
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def loads(value: Mapping[str, Any], name: str) -> list[Trace]:
    """The traces of a file's JSON value.

    Args:
        value: as parsed.
        name: of the file, for the error.

    Raises:
        DataError: another schema, or a trace that does not agree with itself.
    """
    if value.get("schema") != SCHEMA:
        raise DataError(f"{name} has schema {value.get('schema')}, expected {SCHEMA}")
    try:
        return [_trace(entry) for entry in value["traces"]]
    except (KeyError, TypeError, ValueError, IndexError, ShapeError) as error:
        raise DataError(
            f"{name} is a damaged trace: {error}", "write it again with generate --trace"
        ) from error


def write(path: Path, traces: Sequence[Trace], about: Mapping[str, object]) -> None:
    """Write a trace file whole or not at all."""
    from slipstream.bench.results import write_whole

    write_whole(path, dumps(traces, about))


def _tokens(step: Step) -> list[int]:
    """Every token id that a picture of the step shows."""
    said = [token for pairs in step.top_tokens or () for token, _ in pairs]
    return [*step.tree.tokens.tolist(), step.verdict.next_token, *said]


def _trace_value(trace: Trace) -> dict[str, object]:
    return {
        "title": trace.title,
        "method": trace.method,
        "prompt": trace.prompt,
        "temperature": trace.temperature,
        "spans": [asdict(span) for span in trace.spans],
        "steps": [_step_value(step) for step in trace.steps],
        "pieces": {str(token): text for token, text in trace.pieces.items()},
    }


def _step_value(step: Step) -> dict[str, object]:
    tree, verdict = step.tree, step.verdict
    return {
        "tokens": tree.tokens.tolist(),
        "parents": tree.parents.tolist(),
        "log_probs": _nats(tree.log_probs),
        "target_log_probs": _nats(step.target_log_probs),
        "is_drawn": None if tree.is_drawn is None else tree.is_drawn.tolist(),
        "path": list(verdict.path),
        "next_token": verdict.next_token,
        "is_bonus": verdict.is_bonus,
        "emitted": list(step.emitted),
        "top_tokens": step.top_tokens,
        "draft_seconds": step.draft_seconds,
        "target_seconds": step.target_seconds,
        "other_seconds": step.other_seconds,
    }


def _nats(values: Tensor | None) -> list[float | str | None] | None:
    """[N] nats as JSON: null where nobody knows (NaN), "-inf" where a token was impossible."""
    if values is None:
        return None
    named = (None if math.isnan(value) else value for value in values.tolist())
    return [value if value is None or math.isfinite(value) else str(value) for value in named]


def _trace(value: Mapping[str, Any]) -> Trace:
    return Trace(
        title=str(value["title"]),
        method=str(value["method"]),
        prompt=str(value["prompt"]),
        temperature=float(value["temperature"]),
        spans=tuple(Span(**span) for span in value["spans"]),
        steps=tuple(_step(step) for step in value["steps"]),
        pieces={int(token): str(text) for token, text in value["pieces"].items()},
    )


def _step(value: Mapping[str, Any]) -> Step:
    tree = DraftTree(
        torch.tensor(value["tokens"], dtype=torch.int64),
        torch.tensor(value["parents"], dtype=torch.int64),
        log_probs=_tensor(value["log_probs"]),
        is_drawn=None if value["is_drawn"] is None else torch.tensor(value["is_drawn"]),
    )
    top = value["top_tokens"]
    path = tuple(int(node) for node in value["path"])
    if not path or not all(0 <= node < len(tree) for node in path):
        raise ValueError(f"path {list(path)} in a tree of {len(tree)} nodes")
    return Step(
        tree,
        Verdict(path, int(value["next_token"]), bool(value["is_bonus"])),
        tuple(value["emitted"]),
        float(value["draft_seconds"]),
        float(value["target_seconds"]),
        float(value["other_seconds"]),
        target_log_probs=_tensor(value["target_log_probs"]),
        top_tokens=None if top is None else tuple(tuple(map(tuple, pairs)) for pairs in top),
    )


def _tensor(values: Sequence[float | str | None] | None) -> Tensor | None:
    if values is None:
        return None
    return torch.tensor([math.nan if value is None else float(value) for value in values])
