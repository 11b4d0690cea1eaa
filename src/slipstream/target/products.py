"""The product of a frozen weight, in the layout that suits the machine.

A product is called with the input, and with the residual stream where one is to be added: packed
kernels add it for free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.target.packed import PackedLinear


class Product(Protocol):
    """A frozen linear layer."""

    @property
    def weight(self) -> Tensor:
        """[out, in] as floats, whatever the layout."""

    def __call__(self, x: Tensor, stream: Tensor | None = None) -> Tensor:
        """[..., out] from [..., in], plus `stream` [..., out] if given."""


MakeProduct = Callable[..., Product]
"""(weight [out, in], bias [out] or None, is_gated=...) to a product; is_gated tells that the weight
is a gate's above another one's, which some layouts interleave."""


class PlainProduct:
    """The weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, **_layout: bool) -> None:
        self.weight, self._bias = weight, bias

    def __call__(self, x: Tensor, stream: Tensor | None = None) -> Tensor:
        """[..., out] from [..., in]."""
        out = F.linear(x, self.weight, self._bias)
        return out if stream is None else out.add_(stream)


class PackedProduct:
    """The weight as oneDNN lays it out; see `packed`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, **_layout: bool) -> None:
        self._linear = PackedLinear(weight, bias)
        self._packed, self._bias = self._linear.packed, bias

    @property
    def weight(self) -> Tensor:
        """[out, in] the plain weight, unpacked on each access."""
        return self._linear.weight

    def __call__(self, x: Tensor, stream: Tensor | None = None) -> Tensor:
        """[..., out] from [..., in]."""
        if stream is None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, stream, self._packed, self._bias, "add")
