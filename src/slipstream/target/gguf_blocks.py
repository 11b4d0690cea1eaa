"""A GGUF file's own quantised blocks, by the names Hugging Face gives the weights.

Blocks are taken as they are, never widened to floats and rounded again. Q4_0, Q4_1 and Q8_0 have
the form number * scale + least over 32 inputs; weights of other kinds are left out.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import UnsupportedTargetError
from slipstream.target.tiles import BLOCK, Quantised

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEADS = ("output.weight", "token_embd.weight")  # the second where the head is tied


def read_blocks(path: Path) -> dict[str, Quantised]:
    """Blocks by name, such as `layers.0.mlp.up_proj` and `lm_head`.

    Args:
        path: a GGUF file.
    """
    from gguf import GGUFReader

    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    found = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if match and match[2] in NAMES:
            found[f"layers.{match[1]}.{NAMES[match[2]]}"] = _blocks(tensor)
    head = next((tensors[name] for name in HEADS if name in tensors), None)
    if head is not None:
        found["lm_head"] = _blocks(head)
    return {name: blocks for name, blocks in found.items() if blocks is not None}


def check_one_file(reader: object, path: Path) -> None:
    """Refuse a part of a model that is split over files, whose other tensors would be made up.

    Args:
        reader: a GGUFReader of the file.
        path: of the file.

    Raises:
        UnsupportedTargetError: there are other parts.
    """
    field = reader.fields.get("split.count")
    count = 1 if field is None else int(field.contents())
    if count > 1:
        raise UnsupportedTargetError(
            f"{path} is one of {count} parts of a model, and only whole files are read",
            hint=f"join them: `llama-gguf-split --merge {path.name} whole.gguf`",
        )


def matching(blocks: Quantised, weight: Tensor, head_size: int) -> Quantised | None:
    """The blocks, if they say what the loaded weight says, with rows in its order; else None.

    GGUF keeps the halves of a query or key head interleaved for some families.

    Args:
        blocks: of the file.
        weight: [out, in] as it was loaded, in any number type.
        head_size: C.
    """
    for one in (blocks, _halves_apart(blocks, head_size)):
        is_alike = one is not None and one.numbers.shape == weight.shape
        if is_alike and torch.equal(one.floats().to(weight.dtype), weight):
            return one
    return None


def _blocks(tensor: object) -> Quantised | None:
    """The numbers, scales and minima of one tensor."""
    kind, outputs = tensor.tensor_type.name, int(tensor.shape[1])
    if kind not in ("Q4_0", "Q4_1", "Q8_0"):
        return None
    lines = torch.from_numpy(np.array(tensor.data)).view(torch.uint8)
    offset = 4 if kind == "Q4_1" else 2  # bytes before a block's numbers
    width = offset + (BLOCK if kind == "Q8_0" else BLOCK // 2)
    lines = lines.view(outputs, -1, width)  # [out, in/32, bytes]
    scale = lines[..., :2].contiguous().view(torch.float16)[..., 0]
    numbers = lines[..., offset:]
    if kind == "Q8_0":
        return Quantised(numbers.contiguous().view(torch.int8).flatten(1), scale)
    numbers = torch.cat([numbers & 15, numbers >> 4], dim=-1).flatten(1)
    if kind == "Q4_0":
        return Quantised(numbers, scale, -8 * scale)
    return Quantised(numbers, scale, lines[..., 2:4].contiguous().view(torch.float16)[..., 0])


def _halves_apart(blocks: Quantised, head_size: int) -> Quantised | None:
    """Rows of every head reordered: the even ones, then the odd ones."""
    outputs = blocks.numbers.shape[0]
    if outputs % head_size:
        return None
    order = torch.arange(outputs).view(-1, head_size // 2, 2).transpose(1, 2).flatten()
    least = None if blocks.least is None else blocks.least[order]
    return Quantised(blocks.numbers[order], blocks.scale[order], least)
