"""Families of models as targets, mixtures of experts among them: greedy text is transformers'."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from slipstream.target.hf import HFTarget
from slipstream.types import DraftTree

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3,
    "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "Gemma": {},
    "Gemma2": {"sliding_window": 8},
    "Gemma3": {"sliding_window": 8},
    "Phi": {},
    "Phi3": {"partial_rotary_factor": 1.0},
    "Olmo": {},
    "Olmo2": {},
    "Granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "GraniteMoe": LOCAL,
    "Mixtral": LOCAL,
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "Qwen3Moe": EXPERTS,
}
NUM_TOKENS = 16


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(family: str) -> None:
    kind = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**SIZES | FAMILIES[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    prompt = torch.randint(0, 97, (1, 12))
    expected = copy.deepcopy(model).generate(
        prompt, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
    )
    target = HFTarget(model)
    cache, chunk, answer = target.new_cache(1, 64), prompt[0].tolist(), []
    for _ in range(NUM_TOKENS):
        logits = target.forward([DraftTree.chain(chunk)], cache, [0], last_only=True).logits
        cache.commit(0, range(len(chunk)))
        chunk = [int(logits[0, -1].argmax())]
        answer += chunk
    assert answer == expected[0, 12:].tolist()
