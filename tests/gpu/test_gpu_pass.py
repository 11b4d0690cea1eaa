"""Where a GPU exists: decoders agree, answers are plain decoding's, and what a pass costs.

    python -m pytest -m gpu -s tests/gpu

A few minutes; prints milliseconds of a pass by tokens: stock, fused, and replayed from CUDA graphs.
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from fakes import random_eagle3, tiny_model
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.target.hf import HFTarget, load_target
from slipstream.types import DraftTree
from slipstream.verify.walk import walk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
SIZES = (1, 8, 16, 32, 64)
TWINS = ("fused", "graphed")


def on_gpu(decoder: str, dtype: torch.dtype = torch.float32) -> HFTarget:
    return HFTarget(tiny_model().to("cuda", dtype), decoder=decoder)


@pytest.mark.parametrize("decoder", TWINS)
def test_a_twin_says_what_the_stock_decoder_says(decoder: str) -> None:
    stock, twin = on_gpu("stock"), on_gpu(decoder)
    tree = DraftTree(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([-1, 0, 0, 1, 2]))
    caches = [each.new_cache(1, 64) for each in (stock, twin)]
    for _ in range(3):  # a capture, and replays over a longer text
        one, other = (
            each.forward([tree], cache, [0], taps=(0, 2))
            for each, cache in zip((stock, twin), caches, strict=True)
        )
        torch.testing.assert_close(one.logits, other.logits, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(one.features, other.features, atol=1e-3, rtol=1e-3)
        for cache in caches:
            cache.commit(0, (0, 1, 3))


@pytest.mark.parametrize("decoder", ["stock", *TWINS])
def test_drafting_changes_no_token(decoder: str) -> None:
    target, prompts = on_gpu(decoder), [[3, 1, 4], [1, 5, 9, 2, 6]]
    options = {"max_new_tokens": 40, "num_rows": 2}
    plain = Engine(target, NoDrafter(), walk).generate(prompts, **options)
    drafted = Engine(target, random_eagle3(target), walk).generate(prompts, **options)
    assert [r.token_ids for r in plain] == [r.token_ids for r in drafted]


@pytest.mark.real
def test_what_a_pass_costs(capsys: pytest.CaptureFixture[str]) -> None:
    for decoder in ("stock", *TWINS):
        target = load_target("smollm2-135m", dtype="bfloat16", device="cuda", decoder=decoder)
        cache, found = target.new_cache(1, 512), {}
        for n in SIZES:
            tree, seconds = DraftTree.chain(range(n)), []
            for _ in range(30):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                target.forward([tree], cache, [0])
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - begun)
                cache.rollback(0)
            found[n] = round(1e3 * statistics.median(seconds), 2)
        with capsys.disabled():
            print(decoder, "ms per pass", found)  # noqa: T201
        assert min(found.values()) > 0
