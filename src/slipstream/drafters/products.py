"""Linear layers of draft networks in the layout that suits the machine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from slipstream.target.packed import PackedLinear, can_pack
from slipstream.target.protocol import TargetSpec
from slipstream.target.stack import Sizes, Stack
from slipstream.target.tiles import TileProduct

Network = TypeVar("Network", bound=nn.Module)


def frozen_copy(model: Network, dtype: torch.dtype, device: torch.device | str) -> Network:
    """A network to draft with: in another number type and place, and never trained.

    Each weight is copied once, into what it becomes: networks are read in float32, and a whole
    copy of that would be the most memory that loading a drafter ever takes. One that is frozen and
    of this type already, as `narrow` leaves it, is not copied. Buffers, which are RoPE frequencies,
    stay float32.
    """
    place = torch.device(device)
    kept: dict[int, object] = {}
    for parameter in model.parameters():
        is_done = (parameter.dtype, parameter.device) == (dtype, place)
        kept[id(parameter)] = parameter
        if parameter.requires_grad or not is_done:
            own = parameter.detach().to(place, dtype, copy=True)
            kept[id(parameter)] = nn.Parameter(own, requires_grad=False)
    return copy.deepcopy(model, kept).to(place).eval()


def narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Give a network that was just read, and that nobody else holds, the number type it runs in.

    Weight by weight, so that it never takes more memory than it did; buffers stay float32.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)


class CompiledLinear(nn.Module):
    """A frozen linear layer that the compiled code of the target runs.

    Args:
        weight: [out, in], in a multiple of 16.
        bias: [out] or None.
        dtype: of what comes out; sums are float32.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self._dtype = dtype
        product = TileProduct(weight.detach(), None if bias is None else bias.detach())
        sizes = Sizes(inputs, intermediate=16, heads=1, kv_heads=1, head_size=16, eps=1e-6)
        self._stack = Stack([], sizes, _no_angles, head=product, vocab_size=outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] from [..., in] bfloat16."""
        return on_rows(self._stack.read, x).to(self._dtype)


def product(
    weight: Tensor, bias: Tensor | None, spec: TargetSpec, *, is_head: bool = False
) -> nn.Module:
    """The fastest product of a frozen weight beside a target.

    Args:
        weight: [out, in], on the target's device.
        bias: [out] or None.
        spec: the target's.
        is_head: what comes out are logits: they are not rounded where that is free.
    """
    if spec.decoder == "compiled" and weight.shape[1] % 16 == 0:
        return CompiledLinear(weight, bias, torch.float32 if is_head else torch.bfloat16)
    if can_pack(spec.dtype, spec.device):
        return PackedLinear(weight, bias)
    plain = nn.Linear(*reversed(weight.shape), bias=bias is not None, device="meta")
    plain.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return plain


def replace_linears(module: nn.Module, spec: TargetSpec) -> None:
    """Put the fastest product in the place of every linear layer inside a frozen module."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, product(child.weight, child.bias, spec))


def on_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """[..., out] of a function from [M, in] bfloat16 to [M, out]."""
    flat = x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()
    found = function(flat)
    return found.view(*x.shape[:-1], found.shape[-1])  # not -1: there may be no rows


def _no_angles(_length: int) -> tuple[Tensor, Tensor]:
    raise AssertionError("a head alone turns nothing")
