"""Weights as the compiled pass reads them: strips of 16 outputs in blocks of 32 inputs.

A block is bfloat16, or 4-bit numbers with a scale and a least number per output (GGUF's Q4_1), or
8-bit numbers with a scale (Q8_0), stored as two planes of 4-bit ones. A block's sums are scaled
after its numbers are multiplied, so that no weight is rounded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import ShapeError
from slipstream.target.hardware import return_memory, room_in_huge_pages

BLOCK, STRIP = 32, 16
LINE = 64  # bytes at which every product begins
PACKED = BLOCK * STRIP // 2  # bytes of 4-bit numbers in a block
MIDDLE = 128  # added to 8-bit numbers to make them halves without sign


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight in blocks of 32 inputs: number * scale + least.

    Args:
        numbers: [out, in] uint8 in 0..15, or int8.
        scale: [out, in/32] float16.
        least: [out, in/32] float16 for 4-bit numbers, None for 8-bit ones.
    """

    numbers: Tensor
    scale: Tensor
    least: Tensor | None = None

    def floats(self) -> Tensor:
        """[out, in] float32."""
        spread = self.numbers.float().unflatten(1, (-1, BLOCK)) * self.scale.float()[..., None]
        return (spread if self.least is None else spread + self.least.float()[..., None]).flatten(1)


def quantise(weight: Tensor, bits: int) -> Quantised:
    """Round a weight to 8 bits (symmetric) or 4 bits (between minimum and maximum) per block.

    Args:
        weight: [out, in], in a multiple of 32.
        bits: 8 or 4.

    Raises:
        ShapeError: the inputs are no multiple of 32.
    """
    if weight.shape[1] % BLOCK:
        raise ShapeError(f"a weight of {weight.shape[1]} inputs has no blocks of {BLOCK}")
    blocks = weight.float().unflatten(1, (-1, BLOCK))  # [out, in/32, 32]
    if bits == 8:
        scale = (blocks.abs().amax(-1) / 127).half()
        steps = blocks / scale.float().clamp(min=1e-12)[..., None]
        return Quantised(steps.round().clamp(-127, 127).to(torch.int8).flatten(1), scale)
    least = blocks.amin(-1).half()
    scale = ((blocks.amax(-1) - least.float()) / 15).half()
    steps = (blocks - least.float()[..., None]) / scale.float().clamp(min=1e-12)[..., None]
    return Quantised(steps.round().clamp(0, 15).to(torch.uint8).flatten(1), scale, least)


class TileProduct:
    """A frozen weight in tiles. The compiled pass multiplies by it; it is not called itself.

    Args:
        weight: [out, in], floats or quantised.
        bias: [out] or None.
        is_gated: the weight is a gate's above an equally large other one's; their strips are
            laid in turn.
        rounds_inputs: inputs are rounded to 8 bits, a scale for every 32; of quantised weights.

    Attributes:
        data: uint8, [strips, blocks, planes, bytes of a tile] in one row.
        bias: [outputs, padded] float32 or None.
        num_strips: even.
        num_blocks: even.
        planes: 0 for bfloat16, 1 for 4-bit numbers, 2 for 8-bit ones.
        outputs: without padding.
    """

    def __init__(
        self,
        weight: Tensor | Quantised,
        bias: Tensor | None = None,
        *,
        is_gated: bool = False,
        rounds_inputs: bool = False,
    ) -> None:
        self.rounds_inputs = rounds_inputs
        self._is_settled = False
        numbers = weight.numbers if isinstance(weight, Quantised) else weight
        self.outputs, self.inputs = numbers.shape
        self._is_gated = is_gated
        self.num_strips = -(-self.outputs // (2 * STRIP)) * 2
        self.num_blocks = -(-self.inputs // (2 * BLOCK)) * 2
        self.planes = 0
        if isinstance(weight, Quantised):
            self.planes = 2 if weight.least is None else 1
        self.data = self._lay_out(weight)
        self.bias = None
        if bias is not None:
            self.bias = self._in_turn(_grown(bias.float(), self.num_strips * STRIP)).contiguous()

    @property
    def weight(self) -> Tensor:
        """[out, in] the weight, bfloat16 or (where stored in fewer bits) float32, laid out anew."""
        data = self.data.view(self.num_strips, self.num_blocks, -1)
        if not self.planes:
            found = _rows(data.view(torch.bfloat16).view(*data.shape[:2], STRIP, STRIP, 2))
        else:
            found = sum(_unpacked(plane) for plane in data.chunk(self.planes, dim=-1))
        return self._apart(found)[: self.outputs, : self.inputs]

    @property
    def num_bytes(self) -> int:
        """Bytes that a pass reads."""
        return self.data.numel()

    @property
    def num_weights(self) -> int:
        """Weights it stands for, padding not counted."""
        return self.outputs * self.inputs

    def _lay_out(self, weight: Tensor | Quantised) -> Tensor:
        outputs, inputs = self.num_strips * STRIP, self.num_blocks * BLOCK

        def tiles(rows: Tensor) -> Tensor:
            """[strips, blocks, 16 input pairs, 16 outputs, 2]."""
            rows = self._in_turn(_grown(rows, outputs, inputs))
            return rows.view(-1, STRIP, self.num_blocks, STRIP, 2).permute(0, 2, 3, 1, 4)

        def scales(rows: Tensor) -> Tensor:
            """[strips, blocks, 32 bytes]."""
            rows = self._in_turn(_grown(rows, outputs, self.num_blocks))
            lines = rows.view(-1, STRIP, self.num_blocks).transpose(1, 2).contiguous()
            return lines.view(torch.uint8)

        if not isinstance(weight, Quantised):
            return tiles(weight.bfloat16()).contiguous().view(torch.uint8).flatten()
        if weight.least is not None:
            planes = [(weight.numbers, weight.scale, weight.least)]
        else:
            halves = (weight.numbers.int() + MIDDLE).to(torch.uint8)
            planes = [
                (halves & 15, weight.scale, -MIDDLE * weight.scale),
                (halves >> 4, 16 * weight.scale, torch.zeros_like(weight.scale)),
            ]
        parts = []
        for numbers, scale, least in planes:
            parts += [_packed(tiles(numbers)), scales(scale), scales(least)]
        return torch.cat(parts, dim=-1).flatten()

    def _in_turn(self, rows: Tensor) -> Tensor:
        """Strips of gate and other in turn."""
        if not self._is_gated:
            return rows
        return rows.view(2, -1, STRIP, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    def _apart(self, rows: Tensor) -> Tensor:
        """The inverse of `_in_turn`."""
        if not self._is_gated:
            return rows
        return rows.view(-1, 2, STRIP, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def settle(products: Sequence[TileProduct]) -> None:
    """Move products into one room of large pages, in the order in which a pass reads them.

    A product that is shared with another model stays where it was moved to first.
    """
    products = [product for product in products if not product._is_settled]
    sizes = [-(-product.num_bytes // LINE) * LINE for product in products]
    room = room_in_huge_pages(sum(sizes))
    for product, part in zip(products, room.split(sizes), strict=True):
        part = part[: product.num_bytes]
        part.copy_(product.data)
        product.data, product._is_settled = part, True
        return_memory()  # of what was copied, before the next one is


def _rows(tiles: Tensor) -> Tensor:
    """[out, in] from [strips, blocks, 16 input pairs, 16 outputs, 2]."""
    strips, blocks = tiles.shape[:2]
    return tiles.permute(0, 3, 1, 2, 4).reshape(strips * STRIP, blocks * BLOCK)


def _packed(tiles: Tensor) -> Tensor:
    """[strips, blocks, 256 bytes]: an output's four even inputs, then its four odd ones."""
    fours = tiles.unflatten(2, (4, 4)).int()  # [strips, blocks, 4, 4 pairs, 16 outputs, 2]
    shifts = torch.arange(4, dtype=torch.int32).mul(4)[:, None]
    halves = (fours << shifts[..., None]).sum(3, dtype=torch.int32)  # 16 bits each
    return halves.to(torch.uint16).contiguous().view(torch.uint8).flatten(2)


def _unpacked(plane: Tensor) -> Tensor:
    """[out, in] float32 from one plane [strips, blocks, bytes]."""
    halves = plane[..., :PACKED].contiguous().view(torch.uint16).int()
    halves = halves.view(*plane.shape[:2], 4, 1, STRIP, 2)
    shifts = torch.arange(4, dtype=torch.int32).mul(4)[:, None, None]
    numbers = _rows((halves >> shifts & 15).flatten(2, 3))
    scale, least = (_scales(plane[..., at : at + 32]) for at in (PACKED, PACKED + 32))
    return Quantised(numbers, scale, least).floats()


def _scales(lines: Tensor) -> Tensor:
    """[out, blocks] float16 from [strips, blocks, 32 bytes]."""
    return lines.contiguous().view(torch.float16).transpose(1, 2).flatten(0, 1)


def _grown(rows: Tensor, outputs: int, inputs: int | None = None) -> Tensor:
    """Zeros below, and to the right if `inputs` is given."""
    sizes = (outputs,) if inputs is None else (outputs, inputs)
    if rows.shape == sizes:
        return rows
    grown = rows.new_zeros(sizes)
    grown[tuple(slice(0, size) for size in rows.shape)] = rows
    return grown
