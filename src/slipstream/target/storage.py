"""How a target's weights are stored: as they are multiplied, or in 8 or 4 bits.

Quantised weights are decoded to bfloat16 where they are multiplied (`int8`, `int4`), or multiplied
as they are by activations that are rounded to 8 bits (`w8a8`, `w4a8`). Decoding is lossless with
respect to the weights and numbers that run; with `int8` and `int4` a file's own blocks say exactly
what its bfloat16 weights say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UnsupportedTargetError
from slipstream.target.gguf_blocks import matching
from slipstream.target.products import MakeProduct, Product
from slipstream.target.tiles import BLOCK, Quantised, TileProduct, quantise

BITS = {"int8": 8, "int4": 4, "w8a8": 8, "w4a8": 4}
ROUNDS_INPUTS = ("w8a8", "w4a8")  # multiplied by activations in 8 bits, by the compiled decoder
HEAD = "lm_head"  # in 8 bits at least: what is read off there is the answer itself


class Storage:
    """Makes products whose weights are stored in one format.

    Args:
        weights: `int8`, `int4`, `w8a8`, `w4a8`, or "" for the number type they are multiplied in.
        make_product: gives a product of floats, or for `TileProduct` of blocks.
        blocks: a file's own blocks by name.
        head_size: C.
    """

    def __init__(
        self,
        weights: str,
        make_product: MakeProduct,
        blocks: Mapping[str, Quantised],
        head_size: int,
    ) -> None:
        self.weights, self._make = weights, make_product
        self._blocks, self._head_size = blocks, head_size
        self._rounded: dict[str, Quantised] = {}
        self._num_own = self._num_rounded = 0

    def round(self, model: Any) -> None:
        """Quantise a stock model's linear weights, and give it what the numbers now stand for."""
        linears = dict(model.get_decoder().named_modules()) | {HEAD: model.get_output_embeddings()}
        for name, linear in linears.items():
            if type(linear) is nn.Linear:
                stored = self._rounded[name] = self._quantised(name, linear.weight.detach())
                floats = stored.floats().to(linear.weight.dtype)
                linear.weight = nn.Parameter(floats, requires_grad=False)

    def __call__(
        self,
        parts: Mapping[str, Tensor],
        bias: Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> Product:
        """A product of weights [out, in] one below the other, by name.

        Quantised ones have been rounded before, once.
        """
        if not self.weights:
            return self._make(_below(list(parts.values())), bias, is_gated=is_gated)
        stored = [self._rounded.pop(name) for name in parts]
        both = Quantised(
            torch.cat([one.numbers for one in stored]),
            torch.cat([one.scale for one in stored]),
            None if stored[0].least is None else torch.cat([one.least for one in stored]),
        )
        if self._make is TileProduct:
            rounds = self.weights in ROUNDS_INPUTS
            return TileProduct(both, bias, is_gated=is_gated, rounds_inputs=rounds)
        like = next(iter(parts.values()))
        return self._make(both.floats().to(like.dtype), bias, is_gated=is_gated)

    def describe(self) -> str:
        """What was stored how, for reports."""
        if not self.weights:
            return ""
        if not self._num_rounded:
            return f"{self.weights}, the file's own blocks"
        own = f", {self._num_own} of them the file's own" if self._num_own else ""
        return f"{self.weights}, rounded when loaded{own}"

    def _quantised(self, name: str, weight: Tensor) -> Quantised:
        bits = 8 if name == HEAD else BITS[self.weights]
        if weight.shape[1] % BLOCK:
            raise UnsupportedTargetError(
                f"{self.weights} weights have blocks of {BLOCK} inputs, {name} has "
                f"{weight.shape[1]} inputs",
                hint="use --dtype bfloat16",
            )
        own = self._blocks.get(name)
        if own is not None and (own.least is None) == (bits == 8):
            own = matching(own, weight, self._head_size)
            if own is not None:
                self._num_own += 1
                return own
        self._num_rounded += 1
        return quantise(weight, bits)


def _below(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))
