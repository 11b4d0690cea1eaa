"""What makes a small training budget count: a drafter trained in several ways for few steps.

    slipstream data extract --data answers.jsonl --output features
    slipstream data extract --data others.jsonl --output others        # somebody else's answers
    python benchmarks/ablations.py --data features --other others \
        --out benchmarks/results/ablations.json

Every run is `slipstream train` with one setting changed, on the same packed rows in the same
order, and is judged on the same held-out answers of the target: the accepted length of a chain on
the text, every position a start, three drafts deep. Seconds are those of the training steps alone.
Finished runs are in the file and are not run again. `--method dflash` asks about block diffusion
instead. `--drafter FOLDER` lets every run go on from a trained drafter, and leaves out those that
would change its network:

    python benchmarks/ablations.py --data features --method dflash --drafter zoo/dflash-smollm2-135m
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
SETTINGS = ("model", "method", "steps", "rows", "precision", "seed", "drafter")
KEPT = ("held_out_loss", "held_out_prefix_accuracy", "tau", "tokens")
DEPTHS = 3  # of the held-out chain: what the base unrolls, so that all are judged alike
OWN, OTHER = "own", "other"


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a training.

    Args:
        options: in place of the base's.
        share: of the steps asked for.
        text: the target's own answers, or other text.
    """

    options: tuple[tuple[str, str], ...] = ()
    share: float = 1.0
    text: str = OWN


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train.

    Args:
        name: as the table has it.
        phases: one after the other, each from where the one before ended.
    """

    name: str
    phases: tuple[Phase, ...] = (Phase(),)


def _changed(name: str, option: str, value: str) -> Variant:
    return Variant(name, (Phase(((option, value),)),))


BASES = {
    "eagle3": {
        "--initial": "target",
        "--num-unrolled": "3",
        "--set unroll_after": "0",
        "--draft-vocab-size": "12288",
        "--learning-rate": "1e-3",
        "--optimizer": "adamw",
    },
    "dflash": {"--learning-rate": "1e-3", "--optimizer": "adamw"},
}
LATER = (
    "--num-unrolled", "--set unroll_after", "--set narrow", "--set density", "--set rounds",
    "--set weighting", "--set hard", "--learning-rate", "--optimizer",
)  # fmt: skip
"""What a run that goes on with a drafter is still told: the rest is the drafter's."""
ONE = (("--num-unrolled", "1"),)
NARROW = (("--set narrow", "1"),)
VARIANTS = {
    "eagle3": (
        Variant("base"),
        _changed("Muon", "--optimizer", "muon"),
        Variant("half the steps", (Phase(share=0.5),)),
        Variant(
            "half the steps, other text before", (Phase(share=0.5, text=OTHER), Phase(share=0.5))
        ),
        _changed("5 unrolled steps", "--num-unrolled", "5"),
        _changed("1 unrolled step", "--num-unrolled", "1"),
        Variant("1 unrolled step for 150, then 3 for 50", (Phase(ONE, 1.5), Phase(share=0.5))),
        _changed("MLP twice as wide", "--set intermediate_size", "3072"),
        _changed("random first weights", "--initial", "random"),
        _changed("32,768 draft ids", "--draft-vocab-size", "32768"),
    ),
    "dflash": (
        Variant("base"),
        _changed("plain read-out", "--set is_shifted", "false"),
        _changed("1 layer", "--set num_layers", "1"),
        _changed("5 layers", "--set num_layers", "5"),
        _changed("narrower blocks only", "--set narrow", "1"),
        _changed("two rounds: anchors where it was rejected", "--set rounds", "2"),
        _changed("D-PACE weighting", "--set weighting", "pace"),
        _changed("labels half the target's choice", "--set hard", "0.5"),
        _changed("blocks of full width only", "--set narrow", "0"),
        Variant("narrower blocks only for 50, then half", (Phase(NARROW, 0.5), Phase(share=0.5))),
        _changed("twice the blocks", "--set density", "2"),
        _changed("Muon", "--optimizer", "muon"),
    ),
}


def main() -> int:
    """Train what is not in the file yet, and print the table."""
    asked = arguments()
    report = begin(asked)
    for variant in VARIANTS[asked.method]:
        is_there = variant.name in [row["name"] for row in report["rows"]]
        lacks = asked.other is None and any(phase.text == OTHER for phase in variant.phases)
        changes = {name for phase in variant.phases for name, _ in phase.options}
        if is_there or lacks or (asked.drafter and not changes <= set(LATER)):
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
    parser.add_argument("--drafter", type=Path, help="a trained one that every run goes on from")
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
    settings["drafter"] = asked.drafter and asked.drafter.name  # its place is nobody's business
    if asked.out.is_file():
        found = json.loads(asked.out.read_text(encoding="utf-8"))
        before = {"drafter": None} | found.get("settings", {})
        if found.get("kind") != KIND or before != settings:
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
    """The last evaluation of a run, its seconds, and the tokens of own text in its steps."""
    base = BASES[asked.method]
    watch, seconds, tokens, drafter = environment.Watch(), 0.0, 0, asked.drafter
    for number, phase in enumerate(variant.phases):
        options = _of_phase(base | dict(phase.options), drafter)
        data = asked.other if phase.text == OTHER else asked.data
        place = _run(data, round(phase.share * asked.steps), options, asked, f"phase-{number}")
        last = _last(place)
        seconds += last["seconds"]
        tokens += last["tokens"] if phase.text == OWN else 0
        worse = place / "worse"  # than the one it went on from, which is back in its place
        drafter = worse if worse.is_dir() else place / "drafter"
    found = {name: last.get(name) for name in KEPT} | {"tokens": tokens}
    if len(found["held_out_prefix_accuracy"]) < DEPTHS:  # it unrolled fewer: asked again, unmoved
        options = _of_phase(base, drafter) | {"--learning-rate": "1e-12"}
        judged = _last(_run(asked.data, 1, options, asked, "judged"))
        found |= {name: judged[name] for name in KEPT[:2]}
    shutil.rmtree(asked.work)
    found["chain_tau"] = 1 + sum(found["held_out_prefix_accuracy"][:DEPTHS])
    return {"name": variant.name, **found, "seconds": seconds, "others_share": watch.others()}


def _of_phase(options: dict[str, str], drafter: Path | None) -> dict[str, str]:
    """The options of a phase; one that goes on with a drafter cannot change its network."""
    if drafter is None:
        return options
    return {name: options[name] for name in LATER if name in options} | {"--drafter": str(drafter)}


def _last(place: Path) -> dict[str, Any]:
    """The record of a run's last step, whose seconds end before its evaluation."""
    lines = (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(lines[-1])


def _run(
    data: Path, steps: int, options: dict[str, str], asked: argparse.Namespace, name: str
) -> Path:
    """The folder of a finished run.

    Args:
        data: a store.
        steps: of the run.
        options: of `slipstream train`.
        asked: the rest.
        name: of the folder.
    """
    place = asked.work / name
    shutil.rmtree(place, ignore_errors=True)
    asked.work.mkdir(parents=True, exist_ok=True)
    fixed = {
        "--data": str(data),
        "--output": str(place),
        "--model": asked.model,
        "--method": asked.method,
        "--steps": str(steps),
        "--save-every": str(steps),
        "--evaluate-every": str(steps),
        "--rows": str(asked.rows),
        "--precision": asked.precision,
        "--seed": str(asked.seed),
        "--eval-prompts": "6",
        "--eval-tokens": "48",
        "--dtype": "bfloat16",
    }
    words = []
    for name, value in (fixed | options).items():
        option, _, setting = name.partition(" ")
        words += [option, f"{setting}={value}" if setting else value]
    command = [sys.executable, "-m", "slipstream", "train", *words, "--json"]
    status = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    if status and not (place / "worse").is_dir():
        raise subprocess.CalledProcessError(status, command)
    return place


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
