"""The attention that target passes use: grouped heads without copying keys, any additive mask.

Query heads that share a key head are folded into the query axis, so keys and values are read
once, as the view the cache hands out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import UnsupportedTargetError

ATTENTION = "slipstream"  # the name it is registered under
FOLD_UP_TO = 64  # nodes; beyond, a folded mask costs more than grouped attention's own reading


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [B, Hq, N, C] queries over [B, H, S, C] keys, in transformers' signature.

    Args:
        module: the attention layer, for errors.
        query: [B, Hq, N, C].
        key: [B, H, S, C].
        value: [B, H, S, C].
        attention_mask: additive [B, 1, N, S], or [B, 1, G*N, S] already folded (see
            `fold_mask`), or None: causal when N == S, everything visible otherwise.
        scaling: of the scores; C**-0.5 by default.
        dropout: ignored.
        **kwargs: what a model adds; `softcap` is honoured.

    Returns:
        [B, N, Hq, C], and None for the weights.

    Raises:
        UnsupportedTargetError: the layer uses sinks or position biases.
    """
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedTargetError(
                f"{type(module).__name__} uses attention with {name}, which is not supported"
            )
    batch, num_query_heads, n, size = query.shape
    num_heads = key.shape[1]
    groups = num_query_heads // num_heads
    softcap = kwargs.get("softcap")
    if softcap is not None:
        out = _softcapped(query, key, value, attention_mask, scaling, softcap)
    elif groups == 1 or not _folds(attention_mask, n, groups, key.shape[2]):
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None and 1 < n == key.shape[2],
            scale=scaling,
            enable_gqa=groups > 1,
        )
    else:
        folded = query.reshape(batch, num_heads, groups * n, size)
        out = F.scaled_dot_product_attention(
            folded, key, value, attn_mask=attention_mask, scale=scaling
        )
        out = out.reshape(batch, num_query_heads, n, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def fold_mask(mask: Tensor, groups: int) -> Tensor:
    """[B, 1, G*N, S] for narrow passes, [B, 1, N, S] for wide ones, from [B, N, S]."""
    batch, n, used = mask.shape
    if groups == 1 or n > FOLD_UP_TO:
        return mask[:, None]
    return mask[:, None].expand(batch, groups, n, used).reshape(batch, 1, groups * n, used)


def _folds(mask: Tensor | None, n: int, groups: int, used: int) -> bool:
    """True when the queries of a group can lie side by side under this mask."""
    if mask is None:
        return n == 1 or n != used  # not causal
    return mask.shape[2] == groups * n


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """Attention whose scores pass through a soft cap (Gemma 2), written out."""
    batch, num_query_heads, n, size = query.shape
    groups = num_query_heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], groups * n, size)
    scores = folded @ key.transpose(2, 3) * (size**-0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is None and 1 < n == key.shape[2]:
        lowest = torch.finfo(scores.dtype).min
        mask = torch.full((n, n), lowest, dtype=scores.dtype, device=scores.device).triu(1)
        mask = mask[None, None]
    if mask is not None:
        if mask.shape[2] != groups * n:
            mask = mask.repeat(1, 1, groups, 1)
        scores = scores + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).reshape(batch, num_query_heads, n, value.shape[-1])
