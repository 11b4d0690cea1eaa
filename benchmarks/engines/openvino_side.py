"""OpenVINO GenAI's side of `run.py`: runs in its own environment, knows nothing of slipstream.

Target and drafter are exported to OpenVINO's format first (optimum-intel), once per work folder.
A drafter's network is made from optimum-intel's own classes: its command line reads them as remote
code, for which it wants diffusers, in a version that its transformers cannot load.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

TASK = "text-generation-with-past"
CLASSES = {
    "LlamaForCausalLMEagle3": "LlamaEagle3ForCausalLM",
    "DFlashDraftModel": "Qwen3DFlashForCausalLM",
}
FORMATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "fp16"}


def main() -> None:
    """Answer the prompts of a job."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import openvino as ov
    import openvino_genai as genai

    weights = FORMATS[job["dtype"]]
    work = Path(job["work"])
    target = export(job["model"], work / f"openvino-target-{weights}", weights)
    drafter = export_drafter(job["drafter"], work / f"openvino-{job['method']}", weights)
    if job["method"] == "eagle3":
        name_layers(drafter / "openvino_model.xml", job["layers"])
    names = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
    precision = dict.fromkeys(names, "f32") if weights == "fp32" else {}
    scheduling = genai.SchedulerConfig()
    scheduling.enable_prefix_caching = False  # which it refuses beside DFlash
    pipe = genai.LLMPipeline(
        str(target),
        "CPU",
        scheduler_config=scheduling,
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
        metrics = said.extended_perf_metrics
        counted["accepted"] += metrics.get_num_accepted_tokens()
        counted["drafted"] += metrics.get_num_draft_tokens()
        passes = metrics.main_model_metrics.raw_metrics.m_batch_sizes  # tokens of each, prefill's 1
        rows.append({"tokens": list(said.tokens[0]), "steps": len(passes) - 1})
    versions = {n: metadata.version(n) for n in ("openvino", "openvino-genai", "optimum-intel")}
    result = {"prompts": rows, "counters": counted, "versions": versions, "dtype": weights}
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


def export(source: str, place: Path, weights: str) -> Path:
    """An OpenVINO model of a folder, made if it is not there."""
    if not (place / "openvino_model.xml").is_file():
        tool = Path(sys.executable).with_name("optimum-cli")
        options = ["--task", TASK, "--weight-format", weights]
        command = [str(tool), "export", "openvino", "--model", source, *options, str(place)]
        subprocess.run(command, check=True)
    return place


def export_drafter(source: str, place: Path, weights: str) -> Path:
    """The same of a draft network, whose class stands in its config.json."""
    if not (place / "openvino_model.xml").is_file():
        from optimum.exporters.openvino import model_patcher
        from optimum.exporters.openvino.convert import export_from_model
        from optimum.intel.openvino import OVConfig

        name = json.loads((Path(source) / "config.json").read_text())["architectures"][0]
        kind = getattr(model_patcher, CLASSES[name])
        kind.__module__ = "transformers"  # which library a model is of is told by this
        model = kind.from_pretrained(source, dtype="float32")
        export_from_model(model, place, task=TASK, ov_config=OVConfig(dtype=weights))
    return place


def name_layers(model: Path, layers: list[int]) -> None:
    """Say which layers' outputs are the features; otherwise those of layers 2, L/2 and L-3 are.

    The authors' code reads what goes *into* those layers, so each is one too far.
    """
    text = model.read_text(encoding="utf-8")
    if "<hidden_layers_list" not in text:
        line = f'<hidden_layers_list value="{", ".join(map(str, layers))}" />'
        model.write_text(text.replace("<eagle3_mode", f"{line}<eagle3_mode"), encoding="utf-8")


if __name__ == "__main__":
    main()
