"""OpenVINO GenAI's side of `run.py`: runs in its own environment, knows nothing of slipstream.

Target and drafter are exported to OpenVINO's format first (optimum-intel), once per work folder.
The drafter's classes are read from optimum-intel's own file, which it calls remote code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

FORMATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "fp16"}


def main() -> None:
    """Answer the prompts of a job."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import openvino as ov
    import openvino_genai as genai

    weights = FORMATS[job["dtype"]]
    work = Path(job["work"])
    target = export(job["model"], work / f"openvino-target-{weights}", weights)
    drafter = export(job["drafter"], work / f"openvino-{job['method']}-{weights}", weights)
    precision = {"INFERENCE_PRECISION_HINT": "f32"} if weights == "fp32" else {}
    pipe = genai.LLMPipeline(
        str(target),
        "CPU",
        draft_model=genai.draft_model(str(drafter), "CPU", **precision),
        **precision,
    )
    config = genai.GenerationConfig()
    config.max_new_tokens = job["max_new_tokens"]
    config.num_assistant_tokens = job["nodes"]
    config.do_sample = False
    if job["tree"]:
        config.branching_factor, config.tree_depth, _ = job["tree"]
    rows, counted = [], {"accepted": 0, "drafted": 0}
    for prompt in job["prompts"]:
        said = pipe.generate(ov.Tensor([prompt]), config)
        metrics, tokens = said.extended_perf_metrics, list(said.tokens[0])
        accepted = metrics.get_num_accepted_tokens()
        counted["accepted"] += accepted
        counted["drafted"] += metrics.get_num_draft_tokens()
        # Every step gives its accepted drafts and one token more; the first token is prefill's.
        rows.append({"tokens": tokens, "steps": len(tokens) - 1 - accepted})
    versions = {n: metadata.version(n) for n in ("openvino", "openvino-genai", "optimum-intel")}
    result = {"prompts": rows, "counters": counted, "versions": versions, "dtype": weights}
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


def export(source: str, place: Path, weights: str) -> Path:
    """An OpenVINO model of a folder, made if it is not there."""
    if not (place / "openvino_model.xml").is_file():
        tool = Path(sys.executable).with_name("optimum-cli")
        options = ["--task", "text-generation-with-past", "--weight-format", weights]
        command = [str(tool), "export", "openvino", "--model", source, "--trust-remote-code"]
        subprocess.run([*command, *options, str(place)], check=True)
    return place


if __name__ == "__main__":
    main()
