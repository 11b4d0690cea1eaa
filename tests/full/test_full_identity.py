"""The long check on the default model: every method says what plain decoding says.

80 MT-bench first turns and 40 GSM8K test questions, 128 tokens, greedy float32; samples with
keyed noise; plain decoding against transformers. `make test-full` runs it (about an hour on two
cores) and writes benchmarks/results/full_identity.json; an interrupted run goes on.
"""

from __future__ import annotations

import os
import statistics
import time

import pytest
import torch
from lab import MODEL, Check, Decoding, Lab

from slipstream.types import Sampling

pytestmark = [pytest.mark.full, pytest.mark.real]

CHAIN = {"tree": "chain", "depth": 4}
DYNAMIC = {"tree": "dynamic", "budget": 10, "depth": 4, "topk": 4}
SMALL = {"tree": "dynamic", "budget": 4, "depth": 3, "topk": 2}  # for drafters that miss
GREEDY = (
    Check("greedy-none-alone", "none", {}, Decoding(num_prompts=12, num_rows=1)),
    Check("greedy-ngram", "ngram"),
    Check("greedy-zoo-chain", "zoo", CHAIN),
    Check("greedy-zoo-dynamic", "zoo", DYNAMIC),
    Check(
        "greedy-zoo-dynamic-lookup", "zoo", {**DYNAMIC, "lookup": True}, Decoding(num_prompts=24)
    ),
    Check("greedy-random-chain", "random", {"tree": "chain", "depth": 2}),
    Check("greedy-random-dynamic", "random", SMALL),
    Check("greedy-oracle-chain", "oracle", {"depth": 6, "wrong": 0.2}),
    Check("greedy-oracle-tree", "oracle", {"depth": 4, "wrong": 0.3, "siblings": 2}),
)
SAMPLED = tuple(
    Check(
        f"sampled-{temperature}-{name}-rows-{num_rows}",
        drafter,
        settings,
        Decoding(Sampling(temperature, 0, 0.95, 1), 48, 16, num_rows),
    )
    for temperature in (0.7, 1.0)
    for num_rows in (1, 8)
    for name, drafter, settings in (
        ("ngram", "ngram", {}),
        ("zoo-chain", "zoo", CHAIN),
        ("zoo-dynamic", "zoo", DYNAMIC),
    )
)
REDUCED = (
    Check(
        "bfloat16-zoo-dynamic",
        "zoo",
        DYNAMIC,
        Decoding(max_new_tokens=48, num_prompts=6, num_rows=1, dtype="bfloat16"),
        reference_rows=1,
    ),
)


@pytest.fixture(scope="module")
def lab(request, tmp_path_factory):
    threads = os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(int(threads) if threads else os.cpu_count() or 1)
    return Lab(request.config.cache, tmp_path_factory.mktemp("full"))


@pytest.mark.parametrize("check", [*GREEDY, *SAMPLED, *REDUCED], ids=lambda check: check.name)
def test_tokens_are_plain_decodings(lab, check):
    found = lab.check(check)
    assert found["verdict"] in ("lossless", "ties"), found["divergences"]
    assert found["num_tokens"] > 0 and found["num_errors"] == 0
    if check.drafter in ("zoo", "oracle"):
        assert found["tau"] > 1.05  # something was drafted, and some of it was kept
    if check.drafter == "random":
        assert found["tau"] < 1.2


def test_plain_decoding_is_transformers_generate(lab):
    """Token for token, and no slower, prompt by prompt side by side."""
    from transformers import AutoModelForCausalLM

    from slipstream.target.hf import write_dequantised
    from slipstream.target.source import resolve

    decoding = Decoding(num_prompts=16, num_rows=1)
    stock = AutoModelForCausalLM.from_pretrained(
        resolve(MODEL, write_dequantised), dtype=torch.float32
    ).eval()
    engine, ratios, seconds = lab.engine("none", {}, decoding, None), [], [0.0, 0.0]
    differing, num_tokens = [], 0
    for index, ids in enumerate(lab.some(decoding)):
        turns = [lambda: _ours(engine, ids), lambda: _theirs(stock, ids)]  # noqa: B023
        order = (0, 1) if index % 2 else (1, 0)
        answers, times = [None, None], [0.0, 0.0]
        for side in order:
            begun = time.perf_counter()
            answers[side] = turns[side]()
            times[side] = time.perf_counter() - begun
        num_tokens += len(answers[0])
        if answers[0] != answers[1]:
            differing.append(index)
        if index:  # the first one warms up
            ratios.append(times[0] / times[1])
            seconds = [total + t for total, t in zip(seconds, times, strict=True)]
    ratio = statistics.median(ratios)
    lab.write(
        "plain-against-transformers",
        {
            "verdict": "different" if differing else "lossless",
            "num_prompts": len(ratios) + 1,
            "num_tokens": num_tokens,
            "differing_prompts": differing,
            "seconds": seconds[0],
            "transformers_seconds": seconds[1],
            "median_time_ratio": ratio,
        },
    )
    assert not differing
    assert ratio < 1.05


def _ours(engine, ids):
    return list(engine.generate(list(ids), max_new_tokens=128).token_ids)


@torch.no_grad()
def _theirs(stock, ids):
    prompt = torch.tensor([ids])
    out = stock.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=128,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()
