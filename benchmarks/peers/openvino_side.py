"""The side of OpenVINO GenAI, on the GGUF file itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from talk import Answer, serve


def make(job: dict[str, Any]) -> Answer:
    """A pipeline."""
    lookup = job["variant"] == "prompt lookup"
    options = {"prompt_lookup": True} if lookup else {}
    pipe = genai.LLMPipeline(job["gguf"], "CPU", INFERENCE_NUM_THREADS=job["threads"], **options)

    def answer(ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = max_new_tokens, False
        config.stop_token_ids = set(job["eos_ids"])
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        prompt = np.array([ids], dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(prompt), ov.Tensor(np.ones_like(prompt)))
        said = pipe.generate(inputs, config)
        return {"tokens": list(said.tokens[0]), "passes": None}

    return answer


if __name__ == "__main__":
    serve(make, "openvino", "openvino-genai", "openvino-tokenizers")
