"""A draft network's first weights: the target's own last layer where shapes allow.

The draft layer refines a late hidden state into one that the head reads, which is what the
target's last layer does; starting there saves a small training budget most of its first steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.models.eagle3 import Eagle3
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary

SOFTEN = 0.5
"""Scale of the target's final norm at the start: a fresh drafter should not be as sure of itself.
After 36 steps of 768 tokens on the default model the loss was 5.5 with it (learning rate 1e-3),
5.9 without (6e-4), and 6.8 from random weights (6e-4)."""


@torch.no_grad()
def initialise(
    model: Eagle3,
    vocabulary: DraftVocabulary,
    readout: Readout,
    *,
    layer: Mapping[str, Tensor] | None,
    final_norm: Tensor | None,
    generator: torch.Generator,
) -> None:
    """Fill a fresh network in place.

    Args:
        model: the network.
        vocabulary: its draft ids; the head starts as the target's rows for them.
        readout: the target's embedding and head.
        layer: state of the target's last decoder layer (Hugging Face names), or None for random
            weights; ignored where shapes differ.
        final_norm: [D], the target's final norm.
        generator: of the random parts.
    """
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 0.02, generator=generator)
    if readout.head.shape[1] == model.config.hidden_size:
        model.lm_head.weight.copy_(readout.head[vocabulary.target_ids])
    if layer is None:
        return
    if final_norm is not None and final_norm.shape == model.norm.weight.shape:
        model.norm.weight.copy_(final_norm * SOFTEN)
    hidden = model.config.hidden_size
    mid = model.midlayer
    for name in ("q_proj", "k_proj", "v_proj"):
        ours, theirs = getattr(mid.self_attn, name).weight, layer.get(f"self_attn.{name}.weight")
        if theirs is not None and ours[:, hidden:].shape == theirs.shape:
            ours[:, hidden:] = theirs  # the right half reads the normed state
    pairs = {
        "self_attn.o_proj.weight": mid.self_attn.o_proj.weight,
        "mlp.gate_proj.weight": mid.mlp.gate_proj.weight,
        "mlp.up_proj.weight": mid.mlp.up_proj.weight,
        "mlp.down_proj.weight": mid.mlp.down_proj.weight,
        "input_layernorm.weight": mid.hidden_norm.weight,
        "post_attention_layernorm.weight": mid.post_attention_layernorm.weight,
    }
    for name, ours in pairs.items():
        theirs = layer.get(name)
        if theirs is not None and theirs.shape == ours.shape:
            ours.copy_(theirs)
    if model.config.target_hidden_size == hidden:
        last = (len(model.config.taps) - 1) * hidden
        model.fc.weight.mul_(0.25)
        model.fc.weight[:, last:] += torch.eye(hidden)  # the highest tap passes through
