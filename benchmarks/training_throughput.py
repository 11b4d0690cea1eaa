"""Training tokens per second of EAGLE-3: `slipstream train`'s step beside another trainer's.

    python benchmarks/training_throughput.py --out benchmarks/results/training_throughput.json

Same network (the zoo's, converted), same packed rows of the shipped answers, same features, number
type, threads and unrolled steps. Each side runs in an environment of its own and steps on the same
batches in turn; the first step of each is not counted. The accuracy of the first drafted token on
the first batch shows that both compute the same network.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from catalogue import Peer  # noqa: E402
from turns import Who, start, take_turns  # noqa: E402

from slipstream import assemble  # noqa: E402
from slipstream.bench import environment  # noqa: E402
from slipstream.bench.measures import interval, resampled_ratio, resamples  # noqa: E402
from slipstream.bench.results import check_output, dumps, write_whole  # noqa: E402
from slipstream.cli.main import exit_status  # noqa: E402
from slipstream.data.extract import plan_texts  # noqa: E402
from slipstream.data.online import OnlineStore  # noqa: E402
from slipstream.formats.layouts import EAGLE3  # noqa: E402
from slipstream.models.readout import Readout  # noqa: E402
from slipstream.parity.convert import convert  # noqa: E402
from slipstream.target.embedded import cache_root  # noqa: E402
from slipstream.target.hf import load_target, write_dequantised  # noqa: E402
from slipstream.target.source import resolve  # noqa: E402
from slipstream.train.config import TrainConfig  # noqa: E402
from slipstream.train.feed import Batches  # noqa: E402

KIND = "slipstream training throughput"
DATA = HERE.parent / "zoo" / "data" / "smollm2-135m.jsonl.gz"
SETTINGS = ("model", "max_length", "batches", "steps", "unrolled", "precision", "threads")
OURS = ("ours_training", "by text")
SIDES = {
    "ours_training": Peer("bfloat16", ("by text",)),
    "speculators": Peer("bfloat16", ("sdpa", "eager"), ("torch", "speculators==0.9.0")),
}


def main() -> int:
    """Train in turns, print and keep; 1 when either trainer cannot run."""
    asked = arguments()
    if asked.out:
        check_output(asked.out, overwrite=True)
    watch, errors = environment.Watch(), {}
    with tempfile.TemporaryDirectory() as place:
        job, tokens, described = prepare(asked, Path(place))
        wanted = {(name, each): peer for name, peer in SIDES.items() for each in peer.variants}
        places = {"environments": asked.environments, "threads": asked.threads}
        sides = start(wanted, job, errors, **places)
        rounds = [(number % len(tokens),) for number in range(asked.steps + 1)]
        try:
            steps = take_turns(sides, rounds, errors)
        finally:
            for side in sides.values():
                side.close()
    versions = {name: side.versions for (name, _), side in sides.items()}
    rows = []  # beside ours; `errors` says why where there is none
    if OURS in steps:
        rows = [row(who, found, steps[OURS], tokens) for who, found in steps.items()]
    report = {
        "kind": KIND,
        "environment": described | {"others_share": watch.others()},
        "settings": {name: getattr(asked, name) for name in SETTINGS},
        "versions": versions,
        "rows": rows,
        "errors": {" ".join(who): text for who, text in errors.items()},
    }
    if asked.out:
        write_whole(asked.out, dumps(report))
    for each in rows:
        print(
            f"{each['trainer']:<12} {each['variant']:<22} {each['tokens_per_second']:8.1f} tokens/s"
            f"  ours {each['ours_over_it']:.2f}x  accuracy at first {each['first_accuracy']:.3f}"
        )
    for who, text in report["errors"].items():
        print(who, text)
    return int(len(rows) < 2)


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", help="an EAGLE-3 folder; the zoo's without it")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a packed row")
    parser.add_argument("--batches", type=int, default=4, help="different ones, taken in turn")
    parser.add_argument("--steps", type=int, default=8, help="counted ones of each side")
    parser.add_argument("--unrolled", type=int, default=4, help="steps of the training-time test")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=environment.physical_cores())
    parser.add_argument("--environments", type=Path, default=cache_root() / "peers")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def prepare(
    asked: argparse.Namespace, place: Path
) -> tuple[dict[str, Any], list[int], dict[str, Any]]:
    """What every side is told, tokens of each batch, and the environment."""
    folder = assemble.locate(asked.drafter, "eagle3", asked.model)
    target = load_target(asked.model, threads=asked.threads)
    readout = Readout(target.embedding().float(), target.head().float())
    taps = EAGLE3.read(folder, target_layers=target.spec.num_layers).model.config.taps
    planned = plan_texts(asked.data, target.tokenizer, max_length=asked.max_length, limit=256)
    store = OnlineStore(target, readout, planned, name=asked.model, taps=taps)
    config = TrainConfig(max_length=asked.max_length)
    made = Batches(store, range(len(store)), config)
    batches = [made(number) for number in range(asked.batches)]
    norm = target.final_norm().float()
    tensors = [
        {name: value for name, value in asdict(batch).items() if name != "number"}
        for batch in batches
    ]
    kept = {"batches": tensors, "embedding": readout.embedding, "head": readout.head}
    kept["before_norm"] = [batch.last_hidden.float() / norm for batch in batches]
    torch.save(kept, place / "data.pt")
    model = resolve(asked.model, write_dequantised)
    prompt = batches[0].tokens[0, :32].tolist()
    convert(
        folder, "speculators", target, place / "speculators", prompts=[prompt], target_name=model
    )
    job = {
        "data": str(place / "data.pt"),
        "drafter": str(folder.resolve()),
        "speculators": str(place / "speculators"),
        "unrolled": asked.unrolled,
        "precision": asked.precision,
        "learning_rate": asked.learning_rate,
        "threads": asked.threads,
    }
    return job, [batch.num_tokens for batch in batches], environment.describe(target)


def row(
    who: Who, steps: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]], tokens: Sequence[int]
) -> dict[str, Any]:
    """One side's counted steps, beside ours on the same batches.

    Args:
        who: trainer and variant.
        steps: its replies, the warm-up first.
        ours: likewise.
        tokens: of each batch.
    """
    counted = [tokens[number % len(tokens)] for number in range(1, len(steps))]
    theirs, mine = ([step["seconds"] for step in found[1:]] for found in (steps, ours))
    draw = resamples(len(counted))
    return {
        "trainer": who[0],
        "variant": who[1],
        "num_steps": len(counted),
        "tokens_per_second": sum(counted) / sum(theirs),
        "ours_over_it": sum(theirs) / sum(mine),
        "ours_over_it_ci": interval(resampled_ratio(theirs, mine, draw)),
        "first_accuracy": steps[0]["accuracy"],
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
    }


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
