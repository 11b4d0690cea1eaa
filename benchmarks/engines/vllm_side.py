"""vLLM's side of `run.py`: runs in vLLM's own environment and knows nothing of slipstream.

All prompts are answered together, with DFlash one after the other; the engine is stepped by hand,
so that each prompt's steps are counted: those that gave it tokens, its first one aside. Eager mode
and a single process, as the CPU build needs them on small machines.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
NAMES = {"chain": "draft_model"}  # of methods that vLLM calls otherwise
COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def main() -> None:
    """Answer the prompts of a job."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    is_dflash = job["method"] == "dflash"
    if is_dflash:
        norm_each_layer()
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=job["max_length"],
        max_num_seqs=1 if is_dflash else len(job["prompts"]),  # in a batch it accepts less
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config={
            "method": NAMES.get(job["method"], job["method"]),
            "model": job["drafter"],
            "num_speculative_tokens": job["nodes"],
        },
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    for index, prompt in enumerate(job["prompts"]):
        llm.llm_engine.add_request(str(index), TokensPrompt(prompt_token_ids=prompt), sampling)
    result = {
        "prompts": answers(llm.llm_engine, len(job["prompts"])),
        "counters": counters(llm),
        "versions": {name: metadata.version(name) for name in ("vllm-cpu", "torch")},
        "dtype": job["dtype"],
    }
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


def norm_each_layer() -> None:
    """Let the keys of a DFlash drafter's context be normed by their own layer's weight.

    vLLM 0.32 norms those of all layers in one call, with a row of weights for each; its CPU kernel
    knows one row, and takes the first for all.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models import qwen3_dflash

    def normalize(self: Any, keys: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(keys)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(normed[layer], keys[layer], weight, self._rms_norm_eps)
        return normed

    qwen3_dflash.DFlashQwen3Model._normalize_context_k = normalize


def answers(engine: Any, count: int) -> list[dict[str, Any]]:
    """Tokens and steps of every prompt, in order."""
    rows = [{"tokens": [], "steps": 0} for _ in range(count)]
    while engine.has_unfinished_requests():
        for output in engine.step():
            row, tokens = rows[int(output.request_id)], list(output.outputs[0].token_ids)
            row["steps"] += bool(row["tokens"]) and len(tokens) > len(row["tokens"])
            row["tokens"] = tokens
    return rows


def counters(llm: Any) -> dict[str, int]:
    """What the engine itself counted over all prompts."""
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {name: int(found.get(counter, 0)) for name, counter in COUNTERS.items()}


if __name__ == "__main__":
    main()
