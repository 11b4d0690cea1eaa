"""Other engines and ours on the same prompts: tokens a second, acceptance, the same tokens?

    python benchmarks/peers/run.py --tasks mt_bench --limit 20 --tokens 128 \
        --out benchmarks/results/peers.json

Greedy, one request at a time, token ids of the model's own chat template. Every engine runs in an
environment of its own, made at its first use, and takes turns with our plain decoding prompt by
prompt, so that a machine that slows down slows both. An answer is timed from ids to ids, prefill
included; a short one before warms up. Finished peers are in the file and are not run again; a peer
that cannot run is there with its error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import summary
from catalogue import OURS, PEERS
from turns import start, take_turns

from slipstream import assemble
from slipstream.bench import environment
from slipstream.bench.results import check_output, dumps, write_whole
from slipstream.bench.tasks import read_task
from slipstream.cli.main import exit_status
from slipstream.errors import OutputError
from slipstream.parity.convert import convert
from slipstream.target.embedded import cache_root
from slipstream.target.hf import load_target, load_tokenizer, write_dequantised
from slipstream.target.library import library
from slipstream.target.source import gguf_of, resolve

KIND = "slipstream peers"
SETTINGS = ("model", "tasks", "limit", "tokens", "threads")
WARM_UP_TOKENS = 32


def main() -> int:
    """Run what is not in the file yet, print everything; 1 when no peer could run."""
    asked = arguments()
    report = begin(asked)
    job, prompts = prepare(asked)
    for name in asked.peers.split(","):
        peers = report["peers"]
        if peers.get(name, {}).get("rows") and name not in asked.redo.split(","):
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        told = {**job, "drafters": export(name, job, prompts, asked)}
        peers[name] = measure(name, told, prompts, asked)
        add_leads(peers)
        write_whole(asked.out, dumps(report))
    show(report["peers"])
    return int(not any(found["rows"] for found in report["peers"].values()))


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", help="an EAGLE-3 folder; the zoo's without it")
    parser.add_argument("--tasks", default="mt_bench")
    parser.add_argument("--limit", type=int, default=20, help="prompts a task")
    parser.add_argument("--tokens", type=int, default=128, help="an answer, at most")
    parser.add_argument("--threads", type=int, default=environment.physical_cores())
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--redo", default="", help="peers to run again")
    parser.add_argument("--environments", type=Path, default=cache_root() / "peers")
    parser.add_argument("--out", type=Path, default=Path("peers.json"))
    asked = parser.parse_args()
    for name in asked.peers.split(","):
        if name not in PEERS:
            parser.error(f"no peer {name}; there are {', '.join(PEERS)}")
    return asked


def prepare(asked: argparse.Namespace) -> tuple[dict[str, Any], list[list[int]]]:
    """What every side is told, and the prompts."""
    tokenizer, _ = load_tokenizer(asked.model)
    rows = [row for task in asked.tasks.split(",") for row in read_task(task, limit=asked.limit)]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": row.text}]) for row in rows]
    gguf = gguf_of(asked.model)
    job = {
        "name": asked.model,
        "model": resolve(asked.model, write_dequantised),
        "gguf": str(gguf) if gguf else None,
        "drafter": str(assemble.locate(asked.drafter, "eagle3", asked.model).resolve()),
        "threads": asked.threads,
        "eos_ids": sorted(tokenizer.eos_ids),
        "max_length": max(map(len, prompts)) + asked.tokens + 64,
    }
    return job, prompts


def export(
    name: str, job: dict[str, Any], prompts: Sequence[list[int]], asked: argparse.Namespace
) -> dict[str, str]:
    """Folders of our drafters in the dialects that a peer reads, by method.

    They are written anew: what lies there may be of other weights.
    """
    wanted = PEERS[name].drafters
    if not wanted:
        return {}
    target = load_target(asked.model, dtype="float32", threads=asked.threads)
    made = {}
    for method, dialect in wanted:
        own = asked.drafter if method == "eagle3" else None
        source = assemble.locate(own, method, asked.model)
        place = asked.environments / "drafters" / f"{method}-{dialect}"
        convert(
            source, dialect, target, place,
            prompts=prompts[:1], target_name=job["model"], overwrite=True,
        )  # fmt: skip
        made[method] = str(place.resolve())
    return made


def begin(asked: argparse.Namespace) -> dict[str, Any]:
    """The report so far: the file's where it was asked the same, else a new one."""
    check_output(asked.out, overwrite=True)
    settings = {name: getattr(asked, name) for name in SETTINGS}
    if not asked.out.is_file():
        found = library()
        return {
            "kind": KIND,
            "environment": {
                "cpu": environment.cpu_model(),
                "instructions": found.detail.partition(", ")[2] if found.code else None,
                "num_cores": environment.physical_cores(),
                "revision": environment.git_revision(),
            },
            "settings": settings,
            "peers": {},
        }
    try:
        found = json.loads(asked.out.read_text(encoding="utf-8"))
        held = found["settings"] if found["kind"] == KIND else None
    except (ValueError, KeyError, TypeError):
        held = None
    if held is None:
        raise OutputError(f"{asked.out} exists and holds no run of this kind", "give another --out")
    if held != settings:
        raise OutputError(f"{asked.out} holds a run with {held}", "give another --out")
    return found


def measure(
    name: str, job: dict[str, Any], prompts: Sequence[list[int]], asked: argparse.Namespace
) -> dict[str, Any]:
    """A peer's rows and versions, and why a variant has none."""
    peer = PEERS[name]
    plain = (OURS, f"none {peer.dtype}")
    wanted = {plain: PEERS[OURS]} | {(name, variant): peer for variant in peer.variants}
    rounds = [(prompts[0], min(WARM_UP_TOKENS, asked.tokens))]
    rounds += [(ids, asked.tokens) for ids in prompts]
    watch, errors = environment.Watch(), {}
    sides = start(
        wanted, job | {"dtype": peer.dtype}, errors,
        environments=asked.environments, threads=asked.threads,
    )  # fmt: skip
    try:
        replies = take_turns(sides, rounds, errors)
        versions = next((side.versions for (who, _), side in sides.items() if who == name), {})
    finally:
        for side in sides.values():
            side.close()
    answers = {who: summary.answers(said[1:], job["eos_ids"]) for who, said in replies.items()}
    rows = [
        summary.row(variant, answers[who, variant], answers[plain])
        for who, variant in wanted
        if who == name and (who, variant) in answers and plain in answers
    ]
    found = {"dtype": peer.dtype, "versions": versions, "others_share": watch.others()}
    found |= {"rows": rows, "errors": {variant: said for (_, variant), said in errors.items()}}
    return found


def add_leads(peers: dict[str, Any]) -> None:
    """Our fastest decoding over each row of another engine, where both are there."""
    ours = peers.get(OURS, {}).get("rows", [])
    for name, found in peers.items():
        for row in found["rows"]:
            if name != OURS:
                row["our_best_over_it"] = summary.lead(ours, found["dtype"], row)


def show(peers: dict[str, Any]) -> None:
    """The table."""
    print(
        f"{'engine':<14}{'decoding':<24}{'tokens/s':>9}{'x our plain':>12}{'our best x':>11}"
        f"{'tau':>6}  same answers"
    )
    for name, found in peers.items():
        for row in found["rows"]:
            numbers = (row["times_our_plain"], row.get("our_best_over_it"), row["tau"])
            plain, best, tau = ("-" if each is None else f"{each:.2f}" for each in numbers)
            print(
                f"{name:<14}{row['variant']:<24}{row['tokens_per_second']:>9.1f}{plain:>12}"
                f"{best:>11}{tau:>6}  {row['identical']} of {row['num_prompts']}"
            )
        for variant, text in found["errors"].items():
            print(f"{name:<14}{variant:<24} {text}")


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
