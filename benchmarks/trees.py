"""What building a draft tree and its mask costs beside the target pass it is for.

    python benchmarks/trees.py                     # the default model, trees of 64 nodes
    python benchmarks/trees.py --out FILE.json     # kept with its conditions

Every round builds each kind of tree from ready scores, lays it out, makes its mask and runs one
pass over as many tokens, so that all are measured under the same load; medians are compared. The
drafter's own network is no part of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from slipstream.bench.environment import busy_share, describe
from slipstream.bench.results import check_output, dumps, write_whole
from slipstream.cli.main import exit_status
from slipstream.target.hf import load_target
from slipstream.target.protocol import Target
from slipstream.trees import kinds
from slipstream.trees.best_first import from_marginals
from slipstream.trees.choices import MEDUSA
from slipstream.trees.mask import Layout
from slipstream.types import DraftTree

CONTEXT = 512  # committed tokens
VOCABULARY = 1000  # ids with made-up scores, at most
SPREAD = 4.0  # of the made-up logits: about as sure as a trained drafter

Build = Callable[[], DraftTree]


def ready(name: str, nodes: int, num_ids: int, **numbers: object) -> Build:
    """Something that grows one tree of a kind from scores that are computed beforehand."""
    kind = kinds.make(name, budget=nodes, **numbers)
    generator = torch.Generator().manual_seed(0)
    levels = []

    def grow(scores: Callable[[int, int], tuple]) -> DraftTree:
        builder = kind.build(64, nodes)
        builder.start(0)
        while builder.num_children:
            builder.grow(*scores(len(builder.num_children), max(builder.num_children)))
        return builder.finish()

    def record(width: int, count: int) -> tuple:
        logits = SPREAD * torch.randn(width, num_ids, generator=generator)
        levels.append(tuple(logits.log_softmax(-1).topk(min(count, num_ids))))
        return levels[-1]

    grow(record)

    def build() -> DraftTree:
        given = iter(levels)
        return grow(lambda *_: next(given))

    return build


def builds(nodes: int, vocab_size: int) -> dict[str, Build]:
    """One build per kind, and DDTree's heap over marginals."""
    num_ids = min(vocab_size, VOCABULARY)
    logits = SPREAD * torch.randn(15, num_ids, generator=torch.Generator().manual_seed(0))
    ranked = logits.log_softmax(-1).topk(min(nodes, num_ids))
    return {
        "dynamic": ready("dynamic", nodes, num_ids, depth=6, topk=10),
        "best-first": ready("best-first", nodes, num_ids, depth=6, topk=10),
        "kary": ready("kary", nodes, num_ids, depth=6, topk=2),
        "sequoia": ready("sequoia", nodes, num_ids, depth=6, topk=8),
        "static": ready("static", nodes, num_ids, depth=4, topk=10, shape=MEDUSA),
        "marginals": lambda: from_marginals(0, ranked.values, ranked.indices, nodes),
    }


def measure(target: Target, *, nodes: int = 64, rounds: int = 30) -> dict[str, object]:
    """Median seconds of every build with its mask, and of a pass over as many tokens.

    Args:
        target: the pass is its own.
        nodes: drafted nodes.
        rounds: of everything, after two that are not counted.
    """
    cache = target.new_cache(1, CONTEXT + nodes + 1)
    prompt = [1 + i % (target.spec.vocab_size - 1) for i in range(CONTEXT)]
    target.forward([DraftTree.chain(prompt)], cache, [0], last_only=True)
    cache.commit(0, range(CONTEXT))
    made = builds(nodes, target.spec.vocab_size)
    timed = {name: [] for name in made}
    passes = []
    for turn in range(rounds + 2):
        for name, build in made.items():
            start = time.perf_counter()
            layout = Layout.of([build()], [CONTEXT])
            layout.mask(CONTEXT + layout.tokens.shape[1], target.spec.dtype)
            if turn > 1:
                timed[name].append(time.perf_counter() - start)
        tree = made["dynamic"]()
        start = time.perf_counter()
        target.forward([tree], cache, [0])
        if turn > 1:
            passes.append(time.perf_counter() - start)
        cache.rollback(0)
    one_pass = statistics.median(passes)
    rows = []
    for name, seconds in timed.items():
        median = statistics.median(seconds)
        rows.append({"tree": name, "seconds": median, "share": median / one_pass})
    return {"nodes": nodes, "context": CONTEXT, "pass_seconds": one_pass, "rows": rows}


def main() -> None:
    """Measure, print a table, keep it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.out:
        check_output(asked.out, overwrite=True)
    target = load_target(asked.model, dtype=asked.dtype, threads=asked.threads)
    busy = busy_share()
    with torch.no_grad():
        found = measure(target, nodes=asked.nodes, rounds=asked.rounds)
    found |= {"environment": describe(target), "busy_share": busy}
    print(f"a pass over {asked.nodes + 1} tokens: {1000 * found['pass_seconds']:.1f} ms")
    for row in found["rows"]:
        print(f"{row['tree']:<12}{1000 * row['seconds']:8.2f} ms{row['share']:8.1%} of a pass")
    if asked.out:
        write_whole(asked.out, dumps(found))


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
