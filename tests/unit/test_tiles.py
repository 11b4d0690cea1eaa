"""Weights in tiles: what goes in comes out, in every format, and a GGUF file's own blocks."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

from fakes import tiny_model
from slipstream.errors import ShapeError, UnsupportedTargetError
from slipstream.target import embedded, stack
from slipstream.target.compiled import why_not_compiled
from slipstream.target.gguf_blocks import matching, read_blocks
from slipstream.target.hf import HFTarget
from slipstream.target.library import Library, library
from slipstream.target.tiles import Quantised, TileProduct, quantise
from slipstream.types import DraftTree

SIZES = [(32, 64), (64, 32), (96, 160), (160, 96)]


def random_weight(outputs: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outputs + inputs)
    return torch.randn(outputs, inputs, generator=generator).bfloat16()


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_a_weight_comes_out_as_it_went_in(bits: int, size: tuple[int, int], is_gated: bool) -> None:
    weight = random_weight(*size)
    stored = quantise(weight, bits) if bits else weight
    product = TileProduct(stored, is_gated=is_gated)
    expected = stored.floats() if bits else weight
    torch.testing.assert_close(product.weight, expected, atol=1e-5 if bits else 0, rtol=0)
    assert product.planes == {0: 0, 4: 1, 8: 2}[bits]
    assert product.num_strips % 2 == product.num_blocks % 2 == 0


@pytest.mark.parametrize(("bits", "largest"), [(8, 1 / 127), (4, 1 / 15)])
def test_rounding_is_at_most_half_a_step(bits: int, largest: float) -> None:
    weight = random_weight(64, 96)
    blocks = weight.float().unflatten(1, (-1, 32))
    span = blocks.abs().amax(-1) if bits == 8 else blocks.amax(-1) - blocks.amin(-1)
    error = (quantise(weight, bits).floats() - weight.float()).unflatten(1, (-1, 32)).abs().amax(-1)
    assert bool((error <= 0.51 * largest * span + 2e-3).all())


def test_inputs_that_fill_no_block_are_refused() -> None:
    with pytest.raises(ShapeError, match="48 inputs"):
        quantise(torch.zeros(16, 48), 4)
    model = tiny_model().bfloat16()  # hidden 48
    with pytest.raises(UnsupportedTargetError, match="48 inputs") as caught:
        HFTarget(model, decoder="fused", weights="int4")
    assert "bfloat16" in caught.value.hint


def test_the_stock_decoder_has_no_quantised_weights() -> None:
    with pytest.raises(UnsupportedTargetError, match="stock decoder has no int8"):
        HFTarget(tiny_model(), weights="int8")


@pytest.mark.parametrize("weights", ["int8", "int4", "w8a8", "w4a8"])
def test_compiled_products_are_those_of_the_stored_weights(weights: str) -> None:
    """The plain twin multiplies the dequantised floats; one row and many say the same bits."""
    as_floats = {"w8a8": "int8", "w4a8": "int4"}.get(weights, weights)
    model = tiny_model(hidden_size=96, attention_bias=True).bfloat16()
    reason = why_not_compiled(model)
    if reason is not None:
        pytest.skip(reason)
    plain = HFTarget(copy.deepcopy(model), decoder="fused", weights=as_floats)
    target = HFTarget(model, decoder="compiled", weights=weights)
    assert target.spec.weights == f"{weights}, rounded when loaded"
    for key, weight in target.layer_weights(1).items():
        expected = plain.layer_weights(1)[key].float()
        torch.testing.assert_close(weight.float(), expected, atol=0.01, rtol=0.01)
    tokens = [(5 * i) % 97 for i in range(70)]
    found, expected = (
        t.forward([DraftTree.chain(tokens)], t.new_cache(1, 80), [0]).logits[0]
        for t in (target, plain)
    )
    difference = (found - expected).abs().mean() / expected.abs().mean()
    assert float(difference) < (0.05 if weights == as_floats else 0.1)
    cache = target.new_cache(1, 80)
    for position, token in enumerate(tokens):
        alone = target.forward([DraftTree.chain([token])], cache, [0]).logits[0, 0]
        cache.commit(0, [0])
        assert torch.equal(alone, found[position])


def product_of(stored: Quantised, x: torch.Tensor, found: Library) -> torch.Tensor:
    """x times a stored weight, by compiled code that rounds x."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "library", lambda: found)
        inputs = stored.numbers.shape[1]
        sizes = stack.Sizes(inputs, intermediate=16, heads=1, kv_heads=1, head_size=16, eps=1e-6)
        head = TileProduct(stored, rounds_inputs=True)
        alone = stack.Stack([], sizes, lambda _: None, head=head, vocab_size=head.outputs)
        return alone.read(x)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", SIZES)
def test_rounded_activations_are_multiplied_exactly(bits: int, size: tuple[int, int]) -> None:
    """Blocks of 32 to 8 bits by their largest; what the products add up to, by hand."""
    if library().code is None:
        pytest.skip(library().detail)
    stored = quantise(random_weight(*size), bits)
    for rows in (1, 5, 6, 7, 33, 70):
        x = random_weight(rows, size[1]) * 3
        x[: rows // 2, :32] = 0  # a block without a largest number
        blocks = x.float().unflatten(1, (-1, 32))
        most = blocks.abs().amax(-1, keepdim=True)
        inverse = torch.where(most > 0, torch.full_like(most, 127) / most, 0)
        rounded = ((blocks * inverse).round() * (most / 127)).flatten(1)
        expected = rounded.double() @ stored.floats().double().T
        found = product_of(stored, x, library())
        assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
        assert torch.equal(product_of(stored, x[-1:], library()), found[-1:])


def test_what_is_no_number_is_not_rounded_away() -> None:
    if library().code is None:
        pytest.skip(library().detail)
    stored = quantise(random_weight(96, 160), 4)
    for column in (0, 16, 159):
        x = random_weight(3, 160)
        x[1, column] = float("nan")
        found = product_of(stored, x, library()).isnan()
        assert bool(found[1].all()) and not bool(found[[0, 2]].any())


def test_without_byte_dot_products_the_bits_are_the_same() -> None:
    if library().code is None:
        pytest.skip(library().detail)
    stored, x = quantise(random_weight(96, 160), 4), random_weight(9, 160)
    fewer = library(without=frozenset({"AVX-512 VNNI"}))
    assert torch.equal(product_of(stored, x, fewer), product_of(stored, x, library()))


def test_only_compiled_code_rounds_activations() -> None:
    with pytest.raises(UnsupportedTargetError, match="does not round activations"):
        HFTarget(tiny_model(hidden_size=96).bfloat16(), decoder="fused", weights="w4a8")


def test_blocks_are_taken_only_where_they_say_what_was_loaded() -> None:
    """GGUF interleaves the halves of heads for some families."""
    blocks = quantise(random_weight(32, 64), 4)
    weight = blocks.floats().bfloat16()
    assert matching(blocks, weight, 16) is blocks
    order = torch.arange(32).view(2, 2, 8).transpose(1, 2).flatten()  # as GGUF has it
    swapped = Quantised(blocks.numbers[order], blocks.scale[order], blocks.least[order])
    found = matching(swapped, weight, 16)
    assert found is not None and torch.equal(found.numbers, blocks.numbers)
    assert matching(blocks, weight + 1, 16) is None


@pytest.mark.real
def test_the_default_models_blocks_are_read() -> None:
    if importlib.util.find_spec(embedded.CATALOGUE["smollm2-135m"].package) is None:
        pytest.skip("the default model is not installed")
    found = read_blocks(embedded.locate("smollm2-135m"))
    assert len(found) == 30 * 7 + 1
    assert found["lm_head"].least is None and found["lm_head"].numbers.dtype == torch.int8
    down = found["layers.29.mlp.down_proj"]
    assert down.numbers.shape == (576, 1536) and int(down.numbers.max()) == 15
