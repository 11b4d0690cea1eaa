"""The laboratory of the full check: one target, prompts, plain decoding's answers, one JSON.

Everything is kept as it is found and reused while the code that decodes, the drafter that ships
and the library versions stay the same, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import slipstream
from fakes import OracleDrafter
from slipstream.assemble import zoo_folder
from slipstream.bench import environment
from slipstream.bench.equality import judge_for
from slipstream.bench.lossless import GROUPS_OF_ROWS, compare_answers
from slipstream.bench.results import dumps, write_whole
from slipstream.bench.tasks import BenchPrompt, ids_hash, read_task
from slipstream.target.hf import load_target
from slipstream.types import Sampling

log = logging.getLogger("full")
ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks" / "results" / "full_identity.json"
MODEL = "smollm2-135m"
KIND = "slipstream full identity"
DECODING = (
    "assemble.py", "cache.py", "methods.py", "sampling.py", "types.py", "drafters", "engine",
    "models", "target", "trees", "verify", "bench/equality.py", "bench/lossless.py",
)  # fmt: skip


@dataclass(frozen=True)
class Decoding:
    """How a set of prompts is answered.

    Args:
        sampling: greedy or keyed.
        max_new_tokens: per answer.
        num_prompts: spread over the tasks' prompts; None takes all.
        num_rows: batch size.
        dtype: of the target.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128
    num_prompts: int | None = None
    num_rows: int = 8
    dtype: str = "float32"


@dataclass(frozen=True)
class Check:
    """One method against plain decoding.

    Args:
        name: in the JSON.
        drafter: none, ngram, zoo, random or oracle.
        settings: of `slipstream.load`.
        decoding: how both answer; plain decoding uses `reference_rows`.
        reference_rows: batch size of plain decoding.
    """

    name: str
    drafter: str
    settings: dict[str, Any] = field(default_factory=dict)
    decoding: Decoding = field(default_factory=Decoding)
    reference_rows: int = 8


@dataclass
class Answers:
    """Results so far, and the seconds they took when they were made."""

    results: list[Any] = field(default_factory=list)
    seconds: float = 0.0


class Lab:
    """Answers checks, and writes what it found after each.

    Args:
        keep: pytest's cache: `get(key, default)` and `set(key, value)`.
        scratch: folder for the random-weight drafter.
        output: the JSON.
    """

    def __init__(self, keep: Any, scratch: Path, output: Path = OUTPUT) -> None:
        self.keep, self.scratch, self.output = keep, scratch, output
        self.target = cache(lambda dtype="float32": load_target(MODEL, dtype=dtype))

    @cached_property
    def prompts(self) -> list[BenchPrompt]:
        """80 MT-bench first turns and 40 GSM8K test questions, alternating 2 to 1."""
        texts = [read_task("mt_bench", limit=80), read_task("gsm8k", limit=40)]
        mixed = [row for i in range(40) for row in (*texts[0][2 * i : 2 * i + 2], texts[1][i])]
        encode = self.target().tokenizer.encode_chat
        return [
            BenchPrompt(row.task, row.id, tuple(encode([{"role": "user", "content": row.text}])))
            for row in mixed
        ]

    def some(self, decoding: Decoding) -> list[tuple[int, ...]]:
        """The prompts of a decoding, spread evenly."""
        count = decoding.num_prompts or len(self.prompts)
        return [self.prompts[i * len(self.prompts) // count].ids for i in range(count)]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the code that decodes, the drafter that ships, the prompts and the versions."""
        package, digest = Path(slipstream.__file__).parent, hashlib.sha256()
        code = ("*.py", "*.cpp", "*.hpp")
        files = [p for part in DECODING for c in code for p in sorted((package / part).rglob(c))]
        files += [package / part for part in DECODING if part.endswith(".py")]
        drafter = zoo_folder() / f"eagle3-{MODEL}"
        files += [drafter / "config.json", drafter / "model.safetensors"]
        for path in [*files, Path(__file__)]:
            digest.update(path.name.encode() + path.read_bytes())
        digest.update(ids_hash(self.prompts).encode())
        digest.update(repr(environment.describe(self.target())["versions"]).encode())
        return digest.hexdigest()[:16]

    def remembered(self, key: str, make: Callable[[], Any]) -> Any:
        """A JSON value, made once per fingerprint."""
        key = f"slipstream/full/{self.fingerprint}/{key}"
        value = self.keep.get(key, None)
        if value is None:
            value = make()
            self.keep.set(key, value)
        return value

    def plain(self, decoding: Decoding) -> list[Any]:
        """Plain decoding's answers."""
        return self._answers("plain", "none", {}, decoding, None).results

    def _answers(
        self, key: str, drafter: str, settings: dict, decoding: Decoding, answers: Any
    ) -> Answers:
        """Answers by one drafter, kept in groups of a few batches."""
        key += "-" + hashlib.sha256(repr((settings, decoding)).encode()).hexdigest()[:12]
        engine = cache(lambda: self.engine(drafter, settings, decoding, answers))
        prompts, size = self.some(decoding), decoding.num_rows * GROUPS_OF_ROWS
        found = Answers()
        for start in range(0, len(prompts), size):
            group = [list(ids) for ids in prompts[start : start + size]]
            part = self.remembered(
                f"{key}/{start}", lambda group=group: _run(engine(), group, decoding)
            )
            found.seconds += part["seconds"]
            found.results += [SimpleNamespace(**row) for row in part["results"]]
            log.info("%s: %d of %d prompts", key, len(found.results), len(prompts))
        return found

    def engine(self, drafter: str, settings: dict, decoding: Decoding, answers: Any) -> Any:
        """An engine on the shared target; `answers` is what the oracle knows."""
        target = self.target(decoding.dtype)
        if drafter == "oracle":
            oracle = OracleDrafter(answers, vocab_size=target.spec.vocab_size, **settings)
            return slipstream.load(target, drafter=oracle)
        if drafter == "random":
            settings = {"drafter": self.random_drafter(), **settings}
        method = drafter if drafter in ("none", "ngram") else "eagle3"
        return slipstream.load(target, method, **settings)

    def random_drafter(self) -> Path:
        """The shipped drafter with random weights: same config, same vocabulary, no training."""
        place = self.scratch / "random-eagle3"
        if not place.is_dir():
            shutil.copytree(zoo_folder() / f"eagle3-{MODEL}", place)
            generator = torch.Generator().manual_seed(0)
            weights = load_file(place / "model.safetensors")
            for name, tensor in weights.items():
                if tensor.is_floating_point() and "norm" not in name:
                    noise = torch.randn(tensor.shape, generator=generator)
                    weights[name] = (noise * tensor.float().std()).to(tensor.dtype)
            save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
        return place

    def check(self, check: Check) -> dict[str, Any]:
        """Compare one method with plain decoding, and write the JSON."""
        decoding = check.decoding
        reference = self.plain(_with_rows(decoding, check.reference_rows))
        prompts = self.some(decoding)
        known = [[*i, *one.token_ids] for i, one in zip(prompts, reference, strict=True)]
        found = self._answers(check.name, check.drafter, check.settings, decoding, known)
        target = self.target(decoding.dtype)
        judge = judge_for(
            target,
            decoding.sampling,
            load_twin=lambda: self.target("float64"),
            plain=lambda: (prompts, [one.token_ids for one in reference]),
        )
        report = compare_answers(prompts, reference, found.results, judge)
        settings = {"drafter": check.drafter, **check.settings, "num_rows": decoding.num_rows}
        settings |= {"reference_rows": check.reference_rows, "dtype": decoding.dtype}
        settings |= {"temperature": decoding.sampling.temperature, "top_p": decoding.sampling.top_p}
        settings |= {"max_new_tokens": decoding.max_new_tokens}
        value = {**report.to_dict(), **settings, "seconds": round(found.seconds, 1)}
        self.write(check.name, value)
        return value

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Put one finding into the JSON; findings of other code are dropped."""
        findings: dict[str, Any] = {}
        if self.output.is_file():
            old = json.loads(self.output.read_text(encoding="utf-8"))
            findings = old["checks"] if old.get("fingerprint") == self.fingerprint else {}
        findings[name] = value
        whole = {
            "schema": 1,
            "kind": KIND,
            "fingerprint": self.fingerprint,
            "environment": environment.describe(self.target()),
            "prompts": {"num_prompts": len(self.prompts), "ids_hash": ids_hash(self.prompts)},
            "checks": dict(sorted(findings.items())),
        }
        write_whole(self.output, dumps(whole))


def _with_rows(decoding: Decoding, num_rows: int) -> Decoding:
    return Decoding(
        decoding.sampling, decoding.max_new_tokens, decoding.num_prompts, num_rows, decoding.dtype
    )


def _run(engine: Any, prompts: list[list[int]], decoding: Decoding) -> dict[str, Any]:
    """Answers as plain values: what the comparison needs of a result."""
    sampling, begun = decoding.sampling, time.perf_counter()
    results = engine.generate(
        prompts,
        max_new_tokens=decoding.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        num_rows=decoding.num_rows,
    )
    plain = [
        {
            "token_ids": list(result.token_ids),
            "finish_reason": result.finish_reason,
            "num_target_passes": result.num_target_passes,
        }
        for result in results
    ]
    return {"results": plain, "seconds": time.perf_counter() - begun}
