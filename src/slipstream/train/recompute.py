"""Activation checkpointing: an MLP's inner activations are made again in the backward pass.

Only the MLPs: they hold most of what a layer keeps, and they are pure, while attention in the
objectives collects keys as it is called and must run once.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.models.blocks import GatedMLP


def recompute_mlps(model: nn.Module) -> int:
    """Let every gated MLP of a network forget its inner activations; how many there are."""
    found = [module for module in model.modules() if isinstance(module, GatedMLP)]
    for module in found:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
    return len(found)
