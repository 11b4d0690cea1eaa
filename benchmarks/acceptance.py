"""Which rule accepts most at which temperature, on the same recorded distributions.

    python benchmarks/acceptance.py --out benchmarks/results/acceptance.json

The default model answers prompts that no drafter was trained on; at each of its steps the target's
logits p and EAGLE-3's q for the next token are recorded. Every rule is then asked, at every
temperature and for one to four children of one node, how probable it is that a child is kept.

Exact: `likeliest` (walk over the likeliest tokens, no noise), with replacement, k-SEQ, hybrid, and
the bound for independent draws. Averaged over draws: `walk` (children by log q + the target's own
noise) and without replacement, whose residual depends on the tokens that were refused. Below one
node block verification is the token rule, and traversal the rule of its kind of draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.assemble import locate
from slipstream.bench.environment import describe
from slipstream.bench.results import check_output, dumps, write_whole
from slipstream.bench.tasks import read_task
from slipstream.cli.main import exit_status
from slipstream.drafters.eagle import EagleDrafter
from slipstream.engine.engine import Engine
from slipstream.sampling import Sampler
from slipstream.target.hf import load_target
from slipstream.target.protocol import Target
from slipstream.trees.kinds import Growth
from slipstream.types import DraftTree, Verdict
from slipstream.verify.bound import optimal_acceptance_of_draws
from slipstream.verify.kseq import overlap, smallest_rho
from slipstream.verify.protocol import residual, without
from slipstream.verify.walk import walk

KIND = "slipstream acceptance"
TEMPERATURES = (0.2, 0.5, 0.8, 1.0, 1.2, 1.5)
CHILDREN = 4
NEGLIGIBLE = 1e-12  # tokens that neither model gives more are left out: 5e-8 in all
RULES = (
    "walk", "likeliest", "with-replacement", "k-seq", "without-replacement", "hybrid", "bound",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """Log-probabilities of one next token at temperature 1: the target's [V], the drafter's [V]."""

    target: Tensor
    draft: Tensor


def record(
    target: Target, folder: Path, texts: list[str], *, num_tokens: int, temperature: float
) -> list[Pair]:
    """Answer prompts through the real engine and keep what target and drafter thought.

    Args:
        target: answers.
        folder: of the drafter's checkpoint.
        texts: user turns.
        num_tokens: per answer.
        temperature: of the answers; the recorded distributions are put back to 1.
    """
    drafter = EagleDrafter.from_checkpoint(
        folder, target, Growth("chain", budget=1, depth=1, topk=1, children="drawn")
    )
    pairs: list[Pair] = []

    def verify(tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int) -> Verdict:
        if tree.draft_probs is not None:
            p = logits[0].double().log_softmax(-1)
            q = (tree.draft_probs[0].double().log() * temperature).log_softmax(-1)
            pairs.append(Pair(p.cpu(), q.cpu()))
        return walk(tree, logits, sampler, root_position)

    engine = Engine(target, drafter, verify)
    for seed, text in enumerate(texts):
        engine.generate(text, max_new_tokens=num_tokens, temperature=temperature, seed=seed)
    return pairs


def acceptance(p: Tensor, q: Tensor, generator: torch.Generator, draws: int) -> dict[str, list]:
    """Per rule, the probability that one of 1..CHILDREN children is kept.

    Args:
        p: [V] float64, the target's.
        q: [V] float64, the drafter's.
        generator: for the rules that are averaged.
        draws: to average over.
    """
    counts = range(1, CHILDREN + 1)
    best = q.topk(CHILDREN).indices
    return {
        "walk": walk_with_noise(p, q, generator, draws),
        "likeliest": p[best].cumsum(0).tolist(),
        "with-replacement": with_replacement(p, q),
        "k-seq": [k_seq(p, q, m) for m in counts],
        "without-replacement": without_replacement(p, q, generator, draws),
        "hybrid": [hybrid(p, q, m) for m in counts],
        "bound": [optimal_acceptance_of_draws(p, q, m) for m in counts],
    }


def walk_with_noise(p: Tensor, q: Tensor, generator: torch.Generator, draws: int) -> list[float]:
    """Children with the largest log q + g; kept when the largest log p + g is among them."""
    kept = torch.zeros(CHILDREN, dtype=torch.float64)
    log_p, log_q = p.log().float(), q.log().float()
    for _ in range(draws):
        noise = -torch.empty_like(log_p).exponential_(generator=generator).log()
        ranked = (log_q + noise).topk(CHILDREN).indices
        kept += (ranked == (log_p + noise).argmax()).double().cumsum(0)
    return (kept / draws).tolist()


def with_replacement(p: Tensor, q: Tensor) -> list[float]:
    """Exact: what a refused token leaves does not depend on which one it was."""
    refused, found = 1.0, []
    for _ in range(CHILDREN):
        refused *= 1 - float(p.minimum(q).sum())
        found.append(1 - refused)
        p = residual(p, q)
    return found


def without_replacement(p: Tensor, q: Tensor, generator: torch.Generator, draws: int) -> list:
    """Exact given the refused tokens, averaged over them; a refused one has law max(q - p, 0)."""
    total = torch.zeros(CHILDREN, dtype=torch.float64)
    for _ in range(draws):
        left_p, left_q, refused = p, q, 1.0
        for place in range(CHILDREN):
            over = (left_q - left_p).clip(0)
            refused *= float(over.sum())  # 1 - sum of minima
            total[place] += 1 - refused
            if refused < 1e-12:
                total[place + 1 :] += 1
                break
            token = int(torch.multinomial(over, 1, generator=generator))
            left_p, left_q = residual(left_p, left_q), without(left_q, token)
    return (total / draws).tolist()


def k_seq(p: Tensor, q: Tensor, num_children: int) -> float:
    """Exact: independent tries against p / rho."""
    each = overlap(p, q, smallest_rho(p, q, num_children)).sum()
    return 1 - (1 - float(each)) ** num_children


def hybrid(p: Tensor, q: Tensor, num_children: int) -> float:
    """Exact: the chosen tokens' p, and min(p, q') of the others."""
    chosen = q.topk(num_children - 1).indices
    rest, others = q.clone(), p.clone()
    rest[chosen] = others[chosen] = 0
    mass = rest.sum()
    drawn = others.minimum(rest / mass).sum() if mass > 0 else 0.0
    return float(p[chosen].sum() + drawn)


def measure(pairs: list[Pair], *, draws: int, seed: int = 0) -> list[dict[str, object]]:
    """One row per temperature, number of children and rule: mean and standard error."""
    rows = []
    for temperature in TEMPERATURES:
        generator = torch.Generator().manual_seed(seed)
        found = []
        for pair in pairs:
            p, q = ((x / temperature).softmax(-1) for x in (pair.target, pair.draft))
            seen = (p > NEGLIGIBLE) | (q > NEGLIGIBLE)
            seen[q.topk(CHILDREN).indices] = True
            p, q = p[seen] / p[seen].sum(), q[seen] / q[seen].sum()
            by_rule = acceptance(p, q, generator, draws)
            found.append([by_rule[rule] for rule in RULES])
        values = torch.tensor(found, dtype=torch.float64)  # [pairs, rules, children]
        error = values.std(0) / len(pairs) ** 0.5
        rows += [
            {
                "temperature": temperature,
                "children": m + 1,
                "rule": rule,
                "acceptance": round(float(values[:, i, m].mean()), 4),
                "standard_error": round(float(error[i, m]), 4),
            }
            for i, rule in enumerate(RULES)
            for m in range(CHILDREN)
        ]
    return rows


def prompts(task: str, limit: int) -> Iterator[str]:
    """User turns of a shipped set."""
    return (row.text for row in read_task(task, limit=limit))


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--task", default="mt_bench")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32, help="per answer")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the answers")
    parser.add_argument("--draws", type=int, default=8, help="per position, where averaged")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.out is not None:
        check_output(asked.out, overwrite=True)
    texts = list(prompts(asked.task, asked.prompts))
    folder = locate(None, "eagle3", asked.model)
    target = load_target(asked.model, dtype=asked.dtype)
    pairs = record(
        target,
        folder,
        texts,
        num_tokens=asked.tokens,
        temperature=asked.temperature,
    )
    print(f"{len(pairs)} positions recorded", flush=True)
    rows = measure(pairs, draws=asked.draws)
    settings = {key: value for key, value in vars(asked).items() if key != "out"}
    report = {
        "kind": KIND,
        "environment": describe(target),
        "settings": settings,
        "num_positions": len(pairs),
        "rows": rows,
    }
    if asked.out is not None:
        write_whole(asked.out, dumps(report))
    for row in rows:
        print(*(row[key] for key in ("temperature", "children", "rule", "acceptance")))


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
