"""Compiling the fast pass: what it needs, what is said without it, both instruction sets."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from fakes import tiny_model
from slipstream import sampling
from slipstream.target import compiled, library
from slipstream.target.hf import HFTarget
from slipstream.target.library import BETTER, NEEDED
from slipstream.target.stack import rank
from slipstream.types import DraftTree

find = library.library.__wrapped__  # not remembered


def test_old_processors_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "processor_flags", lambda: {"avx2"})
    found = find()
    assert found.code is None and "no AVX-512" in found.detail


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "processor_flags", lambda: NEEDED)
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    found = find()
    assert found.code is None and "C++ compiler" in found.detail


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "processor_flags", lambda: NEEDED)
    monkeypatch.setattr(library.shutil, "which", lambda name: "/bin/false")
    found = find()
    assert found.code is None and "compiler failed" in found.detail


@pytest.mark.parametrize("weights", ["", "int8", "int4", "w8a8", "w4a8"])
@pytest.mark.parametrize(
    "without",
    [{"AMX"}, {"AMX", "AVX-512 bfloat16 dot"}, set(BETTER)],
    ids=["no AMX", "no dot", "no bfloat16"],
)
def test_with_fewer_instructions_the_answers_are_the_same(
    weights: str, without: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal up to rounding, whatever the pass, on every kind of processor."""
    if library.library().code is None:
        pytest.skip(library.library().detail)
    model = tiny_model("qwen3", hidden_size=96).bfloat16()
    usual = HFTarget(copy.deepcopy(model), decoder="compiled", weights=weights)
    fewer = library.library(without=frozenset(without))
    monkeypatch.setattr(compiled, "library", lambda: fewer)
    assert "AVX-512" in fewer.detail
    target = HFTarget(model, decoder="compiled", weights=weights)
    rng = random.Random(1)
    parents = [-1] + [rng.randrange(max(0, i - 4), i) for i in range(1, 40)]
    tree = DraftTree(torch.tensor([rng.randrange(97) for _ in parents]), torch.tensor(parents))
    prompt = DraftTree.chain([rng.randrange(97) for _ in range(9)])
    found = []
    for each in (target, usual):
        cache = each.new_cache(1, 64)
        each.forward([prompt], cache, [0], last_only=True)
        cache.commit(0, range(9))
        found.append(each.forward([tree], cache, [0]).logits[0])
    difference = (found[0] - found[1]).abs().mean() / found[1].abs().mean()
    assert float(difference) < 0.05
    cache = target.new_cache(1, 64)
    for token in [*prompt.tokens.tolist(), int(tree.tokens[0])]:
        alone = target.forward([DraftTree.chain([token])], cache, [0]).logits[0, 0]
        cache.commit(0, [0])
    assert torch.equal(alone, found[0][0])


@pytest.mark.skipif(library.library().code is None, reason=library.library().detail)
@pytest.mark.parametrize("size", [1, 5, 16, 33, 12288])
def test_ranking_is_a_softmax_and_its_likeliest(size: int) -> None:
    scores = torch.randn(3, size) * 4
    scores[1, size // 2 + 1 :] = float("-inf")
    scores[2] = scores[2].round()  # equal ones
    count = min(size, 6)
    found, ids = rank(scores, count)
    expected = scores.log_softmax(-1)
    best = expected.topk(count, dim=-1).values
    torch.testing.assert_close(found, best, atol=1e-5, rtol=1e-5)
    there = found > float("-inf")
    torch.testing.assert_close(expected.gather(1, ids)[there], found[there], atol=1e-5, rtol=1e-5)
    for row, own in zip(ids, there, strict=True):
        assert len(set(row[own].tolist())) == int(own.sum())
    first = [int((scores[2] == value).nonzero()[0]) for value in scores[2, ids[2, :1]]]
    assert ids[2, :1].tolist() == first


@pytest.mark.skipif(library.library().code is None, reason=library.library().detail)
def test_a_row_of_nan_has_no_likeliest() -> None:
    found, _ = rank(torch.full((1, 20), float("nan")), 3)
    assert found.tolist() == [[float("-inf")] * 3]


@pytest.mark.skipif(library.library().code is None, reason=library.library().detail)
@pytest.mark.parametrize("count", [1, 7, 8, 97, 49152])
def test_noise_is_the_same_by_compiled_code(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded once from float64: a last bit of it may differ, of one number in millions."""
    for seed, position in ((0, 0), (7, 123), (-1, 10**6), (2**63, 5)):
        found = sampling.gumbel_noise(seed, position, count)
        with monkeypatch.context() as patched:
            patched.setattr(sampling, "is_loaded", lambda: False)
            expected = sampling.gumbel_noise(seed, position, count)
        differ = found != expected
        assert int(differ.sum()) <= 1
        assert torch.allclose(found, expected, rtol=2e-7, atol=1e-9)
