"""Fast twins of the decoder: equal to the stock one in all they return, and what they refuse."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from fakes import tiny_model
from slipstream.errors import NumericError, SettingError, UnsupportedTargetError
from slipstream.target.compiled import why_not_compiled
from slipstream.target.fused import why_not
from slipstream.target.hf import HFTarget
from slipstream.types import DraftTree

FAMILIES = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [40, 41, 42]]
TREES = [
    DraftTree(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([-1, 0, 0, 1, 2])),
    DraftTree.chain([9, 8, 7, 6, 5, 4, 3]),
    DraftTree.chain([11]),
]
TAPS = (0, 2, 4)
# Mean difference over mean size. Float64 models normalise in float32, so it is not 1e-15.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.05}


def model_of(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    kind, changes = FAMILIES[name]
    model = tiny_model(kind, **changes)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("bias"):
                value.normal_(std=0.5)
    return model.to(dtype)


def everything(target: HFTarget, slots: list[int]) -> list[torch.Tensor]:
    """Logits, features, last hidden state and cache of a ragged batch after prompts in chunks."""
    cache = target.new_cache(4, 40)
    for slot, prompt in zip(slots, PROMPTS, strict=True):
        for start in range(0, len(prompt), 4):
            part = prompt[start : start + 4]
            target.forward([DraftTree.chain(part)], cache, [slot], last_only=True)
            cache.commit(slot, range(len(part)))
    out = target.forward(TREES, cache, slots, taps=TAPS)
    widths = [len(tree) for tree in TREES]
    found = [cache.keys, cache.values]
    for values in (out.logits, out.features, out.last_hidden):
        found += [values[row, :width] for row, width in enumerate(widths)]
    last = target.forward(TREES, cache, slots, last_only=True).logits
    return [*found, last]


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    difference = (found.double() - expected.double()).abs()
    assert float(difference.mean()) <= tolerance * float(expected.double().abs().mean())
    assert float(difference.max()) <= 10 * tolerance * float(expected.double().abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("decoder", ["fused", "compiled"])
def test_twins_say_the_same(decoder: str, name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    if decoder == "compiled":
        if dtype != torch.bfloat16:
            pytest.skip("the compiled decoder runs bfloat16")
        skip_without_compiler(model)
    twin = HFTarget(copy.deepcopy(model), decoder=decoder)
    stock = HFTarget(model, packed=False)
    assert twin.spec.decoder == decoder and stock.spec.decoder == "stock"
    for slots in ([0, 1, 2], [3, 0, 2]):
        for one, other in zip(everything(twin, slots), everything(stock, slots), strict=True):
            assert_close(one, other, TOLERANCE[dtype])
    tokens = torch.randint(0, 97, (3, 19))
    for taps in ((1, 4), ()):
        one, other = twin.extract(tokens, taps), stock.extract(tokens, taps)
        assert one.logits.shape == other.logits.shape
        assert_close(one.last_hidden, other.last_hidden, TOLERANCE[dtype])
        if taps:
            assert_close(one.features, other.features, TOLERANCE[dtype])


def skip_without_compiler(model: torch.nn.Module) -> None:
    reason = why_not_compiled(model)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("decoder", ["fused", "compiled"])
@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_taken_over_and_given_back(name: str, decoder: str) -> None:
    model = model_of(name, torch.bfloat16)
    if decoder == "compiled":
        skip_without_compiler(model)
    stock = HFTarget(copy.deepcopy(model), packed=False)
    twin = HFTarget(model, decoder=decoder)
    expected = stock.layer_weights(-1)
    assert twin.layer_weights(-1).keys() == expected.keys()
    for key, weight in twin.layer_weights(-1).items():
        assert torch.equal(weight, expected[key]), key
    assert torch.equal(twin.final_norm(), stock.final_norm())
    assert torch.equal(twin.head(), stock.head())
    assert not any(p.numel() for n, p in model.named_parameters() if n.endswith("_proj.weight"))


def test_compiled_code_counts_the_rows_that_hold_nan() -> None:
    model = tiny_model().bfloat16()
    skip_without_compiler(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    target = HFTarget(model, decoder="compiled")
    trees = [DraftTree.chain([1, 2, 3]), DraftTree.chain([1, 7]), DraftTree.chain([5])]
    with pytest.raises(NumericError, match="1 of 3 rows"):
        target.forward(trees, target.new_cache(3, 8), [0, 1, 2])
    good = target.forward(trees[::2], target.new_cache(2, 8), [0, 1])
    assert torch.isfinite(good.last_hidden).all()
    head = target._compiled.head
    head.data.view(torch.bfloat16).view(head.num_strips, -1)[5, 20] = float("nan")  # of token 90
    for last_only in (False, True):
        with pytest.raises(NumericError, match="2 of 2 rows"):
            target.forward(trees[::2], target.new_cache(2, 8), [0, 1], last_only=last_only)


@pytest.mark.parametrize("name", [*FAMILIES, "wide"])
def test_compiled_numbers_do_not_depend_on_the_pass(name: str) -> None:
    """Bit for bit: a node of any tree in any batch says what decoding its path alone says."""
    model = tiny_model().bfloat16() if name == "wide" else model_of(name, torch.bfloat16)
    skip_without_compiler(model)
    target, rng = HFTarget(model, decoder="compiled"), random.Random(3)
    num_nodes = 70 if name == "wide" else 20
    parents = [-1] + [rng.randrange(max(0, i - 5), i) for i in range(1, num_nodes)]
    tokens = [rng.randrange(97) for _ in parents]
    tree = DraftTree(torch.tensor(tokens), torch.tensor(parents))
    prompt = [rng.randrange(97) for _ in range(13)]
    cache = target.new_cache(3, 100)
    for chunk in (prompt[:9], prompt[9:]):
        target.forward([DraftTree.chain(chunk)], cache, [1], last_only=True)
        cache.commit(1, range(len(chunk)))
    other = DraftTree.chain([1, 2, 3])
    batch = target.forward([other, tree], cache, [2, 1], taps=TAPS)
    for leaf in {num_nodes - 1, num_nodes - 2, num_nodes // 2}:
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        alone = target.new_cache(1, 100)
        for token in prompt:
            target.forward([DraftTree.chain([token])], alone, [0])
            alone.commit(0, [0])
        for node in reversed(path):
            one = target.forward([DraftTree.chain([tokens[node]])], alone, [0], taps=TAPS)
            alone.commit(0, [0])
            assert torch.equal(one.logits[0, 0], batch.logits[1, node])
            assert torch.equal(one.features[0, 0], batch.features[1, node])


def test_threads_and_their_number_change_no_number() -> None:
    model = tiny_model().bfloat16()
    skip_without_compiler(model)
    target, before = HFTarget(model, decoder="compiled"), torch.get_num_threads()
    tree, found = DraftTree.chain(range(40)), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for _ in range(20):
            found.append(target.forward([tree], target.new_cache(1, 64), [0]).logits)
    torch.set_num_threads(before)
    assert all(torch.equal(found[0], logits) for logits in found)


def test_taps_outside_are_refused() -> None:
    target = HFTarget(tiny_model(), decoder="fused")
    with pytest.raises(SettingError, match=r"tap is 5, expected 0\.\.4"):
        target.forward([TREES[0]], target.new_cache(1, 8), [0], taps=(5,))


def test_what_cannot_be_fused_is_refused_with_the_reason() -> None:
    gelu = tiny_model(hidden_act="gelu")
    assert "activation is gelu" in why_not(gelu)
    with pytest.raises(UnsupportedTargetError, match=r"no fused decoder.*gelu"):
        HFTarget(gelu, decoder="fused")
    assert "float32" in why_not_compiled(tiny_model())
    with pytest.raises(UnsupportedTargetError, match=r"no compiled decoder.*float32"):
        HFTarget(tiny_model(), decoder="compiled")
    assert why_not(tiny_model()) is None


def test_a_twin_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load time sees a wrong twin."""
    monkeypatch.setattr("slipstream.target.fused._turn", lambda x, cos, sin: x)
    with pytest.raises(UnsupportedTargetError, match="differs from the stock model's"):
        HFTarget(tiny_model(), decoder="fused")
