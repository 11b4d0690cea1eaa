"""The side of `transformers`: generate, plainly, with its prompt lookup, with an assistant.

The assistant of its assisted generation is our draft language model, exported as a whole Llama.
"""

from __future__ import annotations

from typing import Any

import torch
from talk import Answer, serve
from transformers import AutoModelForCausalLM

LOOKUP = {"prompt_lookup_num_tokens": 10}  # as its documentation shows it


def make(job: dict[str, Any]) -> Answer:
    """A model, loaded as anyone would."""
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    options: dict[str, Any] = {}
    if job["variant"] == "prompt lookup":
        options = LOOKUP
    elif job["variant"] == "assisted generation":
        assistant = AutoModelForCausalLM.from_pretrained(
            job["drafters"]["chain"], dtype=getattr(torch, job["dtype"])
        )
        options = {"assistant_model": assistant.eval()}
    num_passes = 0

    def count(*_: object) -> None:
        nonlocal num_passes
        num_passes += 1

    model.eval().register_forward_pre_hook(count)

    def answer(ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        nonlocal num_passes
        num_passes = 0
        prompt = torch.tensor([ids])
        said = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            **options,
        )
        return {"tokens": said[0, len(ids) :].tolist(), "passes": num_passes - 1}

    return answer


if __name__ == "__main__":
    serve(make, "transformers", "torch")
