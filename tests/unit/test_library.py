"""Compiling the fast pass: what it needs, what is said without it, both instruction sets."""

from __future__ import annotations

import copy
import random
import shutil
import subprocess
import threading

import pytest
import torch

from chats import PLAIN, byte_tokenizer
from fakes import tiny_model
from slipstream import sampling
from slipstream.errors import NumericError
from slipstream.target import compiled, library, stack
from slipstream.target.hardware import AMD
from slipstream.target.hf import HFTarget
from slipstream.target.library import BETTER, NEEDED
from slipstream.target.stack import rank
from slipstream.types import DraftTree, Sampling

COMPILED = sampling.Compiled(stack.gumbel, stack.first_argmax)
find = library.library.__wrapped__  # not remembered
FALSE, TRUE = shutil.which("false"), shutil.which("true")


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
    monkeypatch.setattr(library.shutil, "which", lambda name: FALSE)
    found = find()
    assert found.code is None and "compiler failed" in found.detail


@pytest.mark.parametrize("weights", ["", "int8", "int4", "w8a8", "w4a8"])
@pytest.mark.parametrize(
    "without",
    [{"AMX"}, {"AMX", "AVX-512 bfloat16 dot"}, set(BETTER)],
    ids=["dot", "no dot", "no bfloat16"],
)
def test_with_fewer_instructions_the_answers_are_the_same(
    weights: str, without: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal up to rounding, whatever the pass, on every kind of processor."""
    if library.library().code is None:
        pytest.skip(library.library().detail)
    model = tiny_model("qwen3", hidden_size=96).bfloat16()
    usual = HFTarget(copy.deepcopy(model), decoder="compiled", weights=weights)
    flags = library.processor_flags() | {AMD}  # the dot product is slow elsewhere, but right
    monkeypatch.setattr(library, "processor_flags", lambda: flags)
    fewer = find(without=frozenset(without))
    has_dot = "avx512_bf16" in flags and "AVX-512 bfloat16 dot" not in without
    assert fewer.detail.endswith(" dot") == has_dot and "AVX-512" in fewer.detail
    with monkeypatch.context() as patched:
        for module in (compiled, stack):
            patched.setattr(module, "library", lambda: fewer)
        target = HFTarget(model, decoder="compiled", weights=weights)
    assert target.twin._stack._code is fewer.code
    assert usual.twin._stack._code is library.library().code
    monkeypatch.undo()
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
        monkeypatch.setattr(sampling, "_compiled", COMPILED)
        found = sampling.gumbel_noise(seed, position, count)
        monkeypatch.setattr(sampling, "_compiled", None)
        expected = sampling.gumbel_noise(seed, position, count)
        differ = found != expected
        assert int(differ.sum()) <= 1
        assert torch.allclose(found, expected, rtol=2e-7, atol=1e-9)


@pytest.mark.skipif(library.library().code is None, reason=library.library().detail)
@pytest.mark.parametrize("count", [1, 15, 16, 33, 49152])
def test_compiled_code_chooses_the_first_maximum(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(count)
    sampler = sampling.Sampler(Sampling(), count)
    rows = [torch.randn(count), torch.randint(0, 3, (count,)).float(), -torch.zeros(count)]
    rows += [torch.full((count,), float("-inf")), torch.full((count,), float("inf"))]
    logits = torch.stack(rows)
    monkeypatch.setattr(sampling, "_compiled", None)
    expected = sampler.choose(logits, list(range(len(rows))))
    monkeypatch.setattr(sampling, "_compiled", COMPILED)
    assert torch.equal(sampler.choose(logits, list(range(len(rows)))), expected)
    logits[1, count // 2] = float("nan")
    with pytest.raises(NumericError):
        sampler.choose(logits, list(range(len(rows))))


def test_without_a_home_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "processor_flags", lambda: NEEDED)
    monkeypatch.setattr(library.shutil, "which", lambda name: TRUE)
    monkeypatch.setattr(library, "cache_root", fail)
    found = find()
    assert found.code is None and "home directory" in found.detail


def test_what_the_compiler_said_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise subprocess.CalledProcessError(1, ["c++", *["-x"] * 200], stderr=b"no such header")

    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "processor_flags", lambda: NEEDED)
    monkeypatch.setattr(library.shutil, "which", lambda name: TRUE)
    monkeypatch.setattr(library, "_built", fail)
    assert find().detail == "the compiler failed: no such header"


@pytest.mark.skipif(library.library().code is None, reason=library.library().detail)
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_what_compiled_code_writes_does_not_depend_on_torchs_defaults(
    default: torch.dtype,
) -> None:
    """transformers sets the default type while it reads a model, for all threads."""
    target = HFTarget(tiny_model("llama").bfloat16(), decoder="compiled")
    scores = torch.randn(2, 12288)

    def everything() -> list[torch.Tensor]:
        cache = target.new_cache(1, 64)
        logits = target.forward([DraftTree.chain([3, 5, 7])], cache, [0]).logits
        return [logits, *rank(scores, 4), sampling.gumbel_noise(1, 2, 97)]

    expected = everything()
    torch.set_default_dtype(default)
    try:
        found = everything()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.skipif(library.library().code is None, reason=library.library().detail)
@pytest.mark.parametrize("weights", ["", "int8"])
def test_a_head_may_have_many_more_rows_than_there_are_tokens(weights: str) -> None:
    """Qwen's heads have hundreds of rows that no token has."""
    model = tiny_model("qwen2", vocab_size=416, hidden_size=96).bfloat16()
    stock = HFTarget(copy.deepcopy(model))
    target = HFTarget(model, byte_tokenizer(PLAIN), decoder="compiled", weights=weights)
    size = target.spec.vocab_size
    assert size <= 416 - 64, "whole pairs of strips lie beyond the tokens"
    found, expected = (
        each.forward([DraftTree.chain([3, 5, 7])], each.new_cache(1, 16), [0]).logits
        for each in (target, stock)
    )
    assert found.shape[-1] == size
    assert (found - expected[..., :size]).abs().mean() < 0.05 * expected.abs().mean()


@pytest.mark.skipif(library.library().code is None, reason=library.library().detail)
def test_threads_may_share_a_target() -> None:
    """A pass of one is not disturbed by a wider one of another."""
    target = HFTarget(tiny_model("llama").bfloat16(), decoder="compiled")
    trees = [DraftTree.chain([(7 * i + n) % 97 for i in range(n)]) for n in (1, 5, 17, 40)]

    def scores(tree: DraftTree) -> torch.Tensor:
        return target.forward([tree], target.new_cache(1, 64), [0]).logits

    expected = [scores(tree) for tree in trees]
    wrong: list[int] = []

    def ask(index: int) -> None:
        for _ in range(60):
            if not torch.equal(scores(trees[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(trees))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(library.library().code is None, reason=library.library().detail)
def test_one_nan_spoils_its_row_and_no_other() -> None:
    scores = torch.randn(2, 40)
    scores[0, 7] = float("nan")
    found, _ = rank(scores, 3)
    assert bool(found[0].isnan().all()) and torch.allclose(
        found[1], scores[1].log_softmax(-1).topk(3).values, atol=1e-5
    )
