"""The side of llama.cpp, through llama-cpp-python, on the GGUF file itself."""

from __future__ import annotations

from itertools import islice
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from talk import Answer, serve


def make(job: dict[str, Any]) -> Answer:
    """A model."""
    lookup = job["variant"] == "prompt lookup"
    llm = Llama(
        model_path=job["gguf"],
        n_ctx=job["max_length"],
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        draft_model=LlamaPromptLookupDecoding() if lookup else None,
        logits_all=lookup,
        verbose=False,
    )
    stops = set(job["eos_ids"])

    def answer(ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        llm.reset()
        tokens = []
        for token in islice(llm.generate(ids, temp=0.0), max_new_tokens):
            if token in stops:
                break
            tokens.append(token)
        return {"tokens": tokens, "passes": None}

    return answer


if __name__ == "__main__":
    serve(make, "llama-cpp-python")
