"""Above temperature 0: which way for a block's children to come about is accepted furthest?

    python benchmarks/block_sampling.py                              # the zoo's DFlash
    python benchmarks/block_sampling.py --drafter FOLDER --out FILE.json

The same prompts and seeds for every way. `argmax` is what z-lab's code drafts at every temperature:
the likeliest token of each slot, which `walk` judges exactly but knows nothing of the draw.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from slipstream import methods
from slipstream.assemble import locate
from slipstream.bench import measures
from slipstream.bench.environment import describe
from slipstream.bench.results import check_output, dumps, write_whole
from slipstream.bench.runner import to_sample
from slipstream.bench.tasks import read_task
from slipstream.cli.main import exit_status
from slipstream.drafters.dflash import DFlashDrafter
from slipstream.engine.engine import Engine
from slipstream.sampling import Sampler
from slipstream.target.hf import load_target
from slipstream.trees.kinds import Growth
from slipstream.types import Sampling

KIND = "slipstream block sampling"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "argmax chain": ("walk", {"tree": "chain"}),
    "keyed chain": ("walk", {"tree": "chain"}),
    "keyed tree": ("walk", {"tree": "best-first"}),
    "drawn chain, token": ("token", {"tree": "chain"}),
    "drawn chain, block": ("block", {"tree": "chain"}),
    "drawn tree, traversal": ("traversal", {"tree": "sequoia"}),
    "mixed tree, hybrid": ("hybrid", {"tree": "sequoia"}),
}
"""Name to verifier and tree."""
BLOCKS: dict[str, Any] = {"depth": 16, "topk": 4}  # as deep as a block drafts


class ArgmaxDrafter(DFlashDrafter):
    """Drafts the likeliest tokens whatever the temperature."""

    name = "argmax"

    def _pick(self, row: Any, *arguments: Any) -> Any:
        return super()._pick(_Greedy(row), *arguments)


class _Greedy:
    """A row as if its temperature were 0."""

    def __init__(self, row: Any) -> None:
        self.tokens = row.tokens
        self.sampler = Sampler(Sampling(), row.sampler.vocab_size)


def engines(target: Any, folder: Path, budget: int) -> dict[str, Engine]:
    """One engine per way, on one target."""
    made = {}
    for name, (verifier, shape) in WAYS.items():
        drafter = (ArgmaxDrafter if name.startswith("argmax") else DFlashDrafter).from_checkpoint(
            folder,
            target,
            Growth(**BLOCKS | shape, budget=budget, children=methods.CHILDREN[verifier]),
        )
        verify: Any = methods.resolve(methods.VERIFIERS[verifier])
        made[name] = Engine(target, drafter, verify, method="dflash", max_nodes=budget)
    return made


def main() -> None:
    """Measure, print a table, keep it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", help="a folder; the zoo's DFlash by default")
    parser.add_argument("--task", default="mt_bench")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.out:
        check_output(asked.out, overwrite=True)
    texts = [text.text for text in read_task(asked.task, limit=asked.prompts)]
    folder = locate(asked.drafter, "dflash", asked.model)
    target = load_target(asked.model, dtype=asked.dtype, threads=asked.threads)
    ways = engines(target, folder, asked.budget)
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for index, text in enumerate(texts):
        for name, engine in ways.items():
            result = engine.generate(
                text, max_new_tokens=asked.tokens, temperature=asked.temperature, seed=index
            )
            found[name].append(to_sample(result, index))
    rows = [
        {"way": name, "tau": measures.tau(samples), "interval": measures.tau_interval(samples)}
        for name, samples in found.items()
    ]
    for row in rows:
        low, high = row["interval"] or (row["tau"], row["tau"])
        print(f"{row['way']:<24}{row['tau']:6.3f} tokens/pass ({low:.3f} to {high:.3f})")
    if asked.out:
        settings = {
            name: getattr(asked, name)
            for name in ("task", "prompts", "tokens", "temperature", "budget")
        }
        value = {"kind": KIND, "settings": settings, "environment": describe(target), "rows": rows}
        write_whole(asked.out, dumps(value))


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
