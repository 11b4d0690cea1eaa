"""What makes a small training budget count: a drafter trained in several ways for few steps.

    slipstream data extract --data answers.jsonl --output features
    slipstream data extract --data others.jsonl --output others        # somebody else's answers
    python benchmarks/ablations.py --data features --other others \
        --out benchmarks/results/ablations.json

Every run is `slipstream train` with one setting changed, on the same packed rows in the same
order, and is judged on the same held-out answers of the target: the accepted length of a chain on
the text, every position a start. Seconds are those of the training steps alone. Finished runs are
in the file and are not run again. `--method dflash` asks about block diffusion instead.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.bench import environment
from slipstream.bench.results import check_output, dumps, write_whole
from slipstream.cli.main import exit_status
from slipstream.errors import OutputError

KIND = "slipstream ablations"
SETTINGS = ("model", "method", "steps", "rows", "precision", "seed")
KEPT = ("held_out_loss", "held_out_prefix_accuracy", "chain_tau", "tau", "tokens")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train.

    Args:
        name: as the table has it.
        options: in place of the base's.
        share: of the steps, on the target's own answers.
        before: share of the steps on other text, before those.
    """

    name: str
    options: tuple[tuple[str, str], ...] = ()
    share: float = 1.0
    before: float = 0.0


BASES = {
    "eagle3": {
        "--initial": "target",
        "--num-unrolled": "3",
        "--draft-vocab-size": "12288",
        "--learning-rate": "1e-3",
        "--optimizer": "adamw",
    },
    "dflash": {"--learning-rate": "1e-3", "--optimizer": "adamw"},
}
LATER = ("--num-unrolled", "--learning-rate", "--optimizer")
"""What a run that goes on with a drafter is still told: the rest is the drafter's."""
VARIANTS = {
    "eagle3": (
        Variant("base"),
        Variant("Muon", (("--optimizer", "muon"),)),
        Variant("half the steps", share=0.5),
        Variant("half the steps, other text before", share=0.5, before=0.5),
        Variant("5 unrolled steps", (("--num-unrolled", "5"),)),
        Variant("1 unrolled step", (("--num-unrolled", "1"),)),
        Variant("MLP twice as wide", (("--set", "intermediate_size=3072"),)),
        Variant("random first weights", (("--initial", "random"),)),
        Variant("32,768 draft ids", (("--draft-vocab-size", "32768"),)),
    ),
    "dflash": (
        Variant("base"),
        Variant("plain read-out", (("--set", "is_shifted=false"),)),
        Variant("D-PACE weighting", (("--set", "weighting=pace"),)),
        Variant("labels half the target's choice", (("--set", "hard=0.5"),)),
        Variant("two rounds: anchors where it was rejected", (("--set", "rounds=2"),)),
        Variant("blocks of full width only", (("--set", "narrow=0"),)),
        Variant("1 layer", (("--set", "num_layers=1"),)),
        Variant("5 layers", (("--set", "num_layers=5"),)),
        Variant("Muon", (("--optimizer", "muon"),)),
        Variant("twice the steps", share=2.0),
    ),
}


def main() -> int:
    """Train what is not in the file yet, and print the table."""
    asked = arguments()
    report = begin(asked)
    for variant in VARIANTS[asked.method]:
        names = [row["name"] for row in report["rows"]]
        if variant.name in names or (variant.before and asked.other is None):
            continue
        print(f"{variant.name} ...", file=sys.stderr, flush=True)
        report["rows"].append(train(variant, asked))
        write_whole(asked.out, dumps(report))
    for row in report["rows"]:
        accuracy = ", ".join(f"{each:.3f}" for each in row["held_out_prefix_accuracy"])
        print(f"{row['name']:<34}{row['chain_tau']:7.3f}  {accuracy}  {row['seconds']:6.0f} s")
    return 0


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="a store of the target's answers")
    parser.add_argument("--other", type=Path, help="a store of other text")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--method", default="eagle3", choices=VARIANTS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=2, help="packed rows of 1,024 tokens a step")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--out", type=Path, default=Path("ablations.json"))
    return parser.parse_args()


def begin(asked: argparse.Namespace) -> dict[str, Any]:
    """The report so far: the file's where it was asked the same, else a new one.

    Raises:
        OutputError: the file holds something else.
    """
    check_output(asked.out, overwrite=True)
    settings = {name: getattr(asked, name) for name in SETTINGS}
    if asked.out.is_file():
        found = json.loads(asked.out.read_text(encoding="utf-8"))
        if found.get("kind") != KIND or found.get("settings") != settings:
            raise OutputError(f"{asked.out} exists and holds another run", "give another --out")
        return found
    return {
        "kind": KIND,
        "environment": {
            "cpu": environment.cpu_model(),
            "num_cores": environment.physical_cores(),
            "revision": environment.git_revision(),
        },
        "settings": settings,
        "rows": [],
    }


def train(variant: Variant, asked: argparse.Namespace) -> dict[str, Any]:
    """The last evaluation of a run, and the seconds of its steps."""
    options = BASES[asked.method] | dict(variant.options)
    watch, seconds = environment.Watch(), 0.0
    if variant.before and asked.other is not None:
        place = _run(asked.other, variant.before, options, asked)
        seconds = _last(place)["seconds"]
        start = place.rename(place.with_name("first"))
        options = {name: options[name] for name in LATER if name in options}
        options["--drafter"] = str(start / "drafter")
    last = _last(_run(asked.data, variant.share, options, asked))
    shutil.rmtree(asked.work)
    kept = {name: last.get(name) for name in KEPT}
    kept |= {"seconds": seconds + last["seconds"], "others_share": watch.others()}
    return {"name": variant.name, **kept}


def _last(place: Path) -> dict[str, Any]:
    """The record of a run's last step, whose seconds end before its evaluation."""
    lines = (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(lines[-1])


def _run(data: Path, share: float, options: dict[str, str], asked: argparse.Namespace) -> Path:
    """The folder of a finished run.

    Args:
        data: a store.
        share: of the steps asked for.
        options: of `slipstream train`.
        asked: the rest.
    """
    place, steps = asked.work / "run", str(round(share * asked.steps))
    shutil.rmtree(place, ignore_errors=True)
    asked.work.mkdir(parents=True, exist_ok=True)
    fixed = {
        "--data": str(data),
        "--output": str(place),
        "--model": asked.model,
        "--method": asked.method,
        "--steps": steps,
        "--save-every": steps,
        "--evaluate-every": steps,
        "--rows": str(asked.rows),
        "--precision": asked.precision,
        "--seed": str(asked.seed),
        "--eval-prompts": "6",
        "--eval-tokens": "48",
        "--dtype": "bfloat16",
    }
    words = [word for pair in (fixed | options).items() for word in pair]
    command = [sys.executable, "-m", "slipstream", "train", *words, "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return place


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
