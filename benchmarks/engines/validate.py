"""Does speculators' own package read our export, and draft the same tokens with it?

    python benchmarks/engines/validate.py --out benchmarks/results/speculators.json

The zoo's EAGLE-3 (or --drafter) is converted; speculators loads it in an environment of its own and
drafts one token after every position of a few prompts, from the target's real features. The share
of positions at which both draft the same token is told, and each tensor that is missing or unknown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from run import HERE, Engine, environment

from slipstream.bench.results import check_output, dumps, write_whole
from slipstream.cli.main import exit_status

SPECULATORS = Engine(("speculators",), (), {"eagle3": "speculators"})


def main() -> int:
    """Run and report; 1 when speculators drafts another token, or reads other tensors."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--drafter", help="a folder; the zoo's without it")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--work", type=Path, default=Path("runs/engines"))
    parser.add_argument("--python", type=Path, help="an environment that has speculators already")
    parser.add_argument("--out", type=Path, help="keep the result as JSON")
    asked = parser.parse_args()
    if asked.out:
        check_output(asked.out, overwrite=True)
    asked.work.mkdir(parents=True, exist_ok=True)
    ours = prepare(asked)
    python = asked.python or environment(asked.work, "speculators", SPECULATORS)
    side = HERE / "speculators_side.py"
    subprocess.run([str(python), str(side), str(asked.work.resolve())], check=True)
    theirs = json.loads((asked.work / "result-speculators.json").read_text(encoding="utf-8"))
    pairs = [
        (a, b) for one, two in zip(ours, theirs["drafted"], strict=True)
        for a, b in zip(one, two, strict=True)
    ]  # fmt: skip
    found = {
        "same_tokens": sum(a == b for a, b in pairs) / len(pairs),
        "num_positions": len(pairs),
        "missing": theirs["missing"],
        "unknown": theirs["unknown"],
        "versions": theirs["versions"] | {"ours slipstream": metadata.version("slipstream")},
    }
    print(json.dumps(found, indent=1))
    if asked.out:
        write_whole(asked.out, dumps(found))
    return 0 if found["same_tokens"] == 1 and not found["missing"] + found["unknown"] else 1


def prepare(asked: argparse.Namespace) -> list[list[int]]:
    """What our reading drafts after each position; features and tokens go into the work folder."""
    import torch
    from safetensors.torch import save_file

    from slipstream import assemble
    from slipstream.bench.tasks import read_task
    from slipstream.formats import detect
    from slipstream.formats.checkpoint import facts_of
    from slipstream.models.readout import Readout
    from slipstream.parity.convert import convert
    from slipstream.parity.drafted import drafted
    from slipstream.parity.texts import look
    from slipstream.target.hf import load_target, write_dequantised
    from slipstream.target.source import resolve

    folder = assemble.locate(asked.drafter, "eagle3", asked.model)
    texts = [row.text for row in read_task("mt_bench", limit=asked.prompts)]
    target = load_target(asked.model, dtype="float32")
    prompts = [target.tokenizer.encode_chat([{"role": "user", "content": t}]) for t in texts]
    place, model = asked.work / "speculators", resolve(asked.model, write_dequantised)
    convert(
        folder, "speculators", target, place, prompts=prompts, target_name=model, overwrite=True
    )
    checkpoint: Any = detect.detect(place).load(facts_of(target))
    readout = Readout(target.embedding().float().cpu(), target.head().float().cpu())
    ours, tensors = [], {}
    for index, prompt in enumerate(prompts):
        text = look(target, readout, prompt, [])
        said = drafted(checkpoint, text, readout)
        count = len(prompt) - 2  # first steps come first; what follows them are second ones
        ours.append(said.ids[said.logits[:count].argmax(-1)].tolist())
        features = text.hidden[:, list(checkpoint.model.config.taps)].flatten(1)
        tensors[f"features.{index}"] = features[:count].contiguous()
        tensors[f"tokens.{index}"] = torch.tensor(prompt)[1 : 1 + count].contiguous()
    save_file(tensors, asked.work / "features.safetensors")
    return ours


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
