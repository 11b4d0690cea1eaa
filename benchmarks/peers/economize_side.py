"""The side of `economize`: plain decoding, our EAGLE-3 files as a chain, prompt lookup."""

from __future__ import annotations

from typing import Any

import economize
import torch
from economize.techniques.lookup import LookupConfig
from talk import Answer, serve
from transformers import AutoModelForCausalLM

CYCLES = {"plain": 1, "eagle3 chain": 4, "lookup": 11}
"""Tokens a cycle: drafts and one more. 4 is the default of the library."""


def make(job: dict[str, Any]) -> Answer:
    """A model with a technique attached."""
    torch.set_num_threads(job["threads"])
    base = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    base.eval()
    if job["variant"] == "eagle3 chain":
        model = economize.load(base, job["drafter"])
    else:
        model = economize.apply(base, LookupConfig())
    decoding = economize.DecodeConfig(cycle_length=CYCLES[job["variant"]])
    stops = job["eos_ids"]

    def answer(ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        with torch.inference_mode():
            said = model.decode(torch.tensor(ids), max_new_tokens, decoding=decoding, stop=stops)
        tokens = said.tokens.tolist()
        accepted = sum(kept for _, kept in said.acceptance)
        return {"tokens": tokens, "passes": len(tokens) - 1 - accepted}

    return answer


if __name__ == "__main__":
    serve(make, "economize", "torch", "transformers")
