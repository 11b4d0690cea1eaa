"""Would drafting beside the target's last layers pay? Mirror-SD, from parts measured here.

    python benchmarks/mirror.py                       # the zoo's draft language model
    python benchmarks/mirror.py --depth 6 --out FILE.json

Plain decoding and a chain take turns on the same prompts; then the target's early exits are asked
for the tokens at which the chain's steps ended. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import slipstream
from slipstream.bench.environment import describe
from slipstream.bench.mirror import Parts, exit_hits, steps_end
from slipstream.bench.results import check_output, dumps, write_whole
from slipstream.bench.tasks import read_task
from slipstream.cli.bench_scripts import split_counts
from slipstream.cli.main import exit_status
from slipstream.engine.request import Result
from slipstream.errors import SettingError

KIND = "slipstream mirror"
SHARES = (0.25, 0.5, 0.65, 0.8, 0.9)
"""Of the layers, where the exits are unless they are named."""


def main() -> None:
    """Measure, print a table, keep it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="zoo:chain", help="a draft language model")
    parser.add_argument("--task", default="mt_bench")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=4, help="tokens of the chain")
    parser.add_argument("--exits", help="layers, separated by commas")
    parser.add_argument("--candidates", default="1,4,16")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.out:
        check_output(asked.out, overwrite=True)
    texts = [row.text for row in read_task(asked.task, limit=asked.prompts)]
    plain = slipstream.load(asked.model, "none", dtype=asked.dtype)
    shape = {"tree": "chain", "budget": asked.depth, "depth": asked.depth}
    chain = slipstream.load(plain.target, "chain", drafter=asked.drafter, **shape)
    target, answers = plain.target, {"plain": [], "chain": []}
    layers = target.spec.num_layers
    exits = (
        sorted({max(1, round(share * layers)) for share in SHARES})
        if asked.exits is None
        else split_counts("exits", asked.exits)
    )
    if max(exits) >= layers:
        raise SettingError("exits", max(exits), f"below the {layers} layers of {asked.model}")
    counts = split_counts("candidates", asked.candidates)
    for text in texts:
        for name, engine in (("plain", plain), ("chain", chain)):
            result = engine.generate(text, max_new_tokens=asked.tokens, trace=name == "chain")
            answers[name].append(result)
    parts = measured(answers["plain"], answers["chain"], layers)
    whole = [([*r.prompt_ids, *r.token_ids], steps_end(r)) for r in answers["chain"]]
    hits = exit_hits(target, whole, exits, counts)
    rows = []
    for (layer, count), share in hits.items():
        seconds = parts.mirrored_seconds(layer, share)
        rows.append(
            {
                "layer": layer,
                "candidates": count,
                "hits": share,
                "seconds": seconds,
                "over_serial": parts.serial_seconds / seconds,
                "speedup": parts.speedup(seconds),
            }
        )
    print(
        f"one after the other: {1000 * parts.serial_seconds:.2f} ms a step, {parts.tau:.2f} "
        f"tokens/pass, {parts.speedup(parts.serial_seconds):.2f} times plain decoding"
    )
    print(
        f"{'exit':>6}{'candidates':>12}{'hits':>8}{'ms':>8}{'times serial':>14}{'times plain':>13}"
    )
    for row in rows:
        print(
            f"{row['layer']:>6}{row['candidates']:>12}{row['hits']:>8.1%}"
            f"{1000 * row['seconds']:>8.2f}{row['over_serial']:>14.2f}{row['speedup']:>13.2f}"
        )
    if asked.out:
        names = ("model", "drafter", "task", "prompts", "tokens", "depth")
        value = {
            "kind": KIND,
            "settings": {name: getattr(asked, name) for name in names},
            "environment": describe(target),
            "parts": asdict(parts),
            "serial": {
                "seconds": parts.serial_seconds,
                "speedup": parts.speedup(parts.serial_seconds),
            },
            "rows": rows,
        }
        write_whole(asked.out, dumps(value))


def measured(plain: list[Result], chain: list[Result], num_layers: int) -> Parts:
    """A step's parts, over all answers."""
    passes = sum(result.num_target_passes for result in chain)
    mean = {
        name: sum(getattr(result, name) for result in chain) / passes
        for name in ("draft_seconds", "target_seconds", "other_seconds")
    }
    seconds = sum(result.seconds - result.prefill_seconds for result in plain)
    return Parts(
        plain_seconds=seconds / sum(result.num_target_passes for result in plain),
        **mean,
        tau=1 + sum(result.num_accepted for result in chain) / passes,
        num_layers=num_layers,
    )


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
