"""Optimizers and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from slipstream.train.config import TrainConfig


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the layer's matrices and AdamW for head and norms."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_inner = parameter.dim() == 2 and not name.startswith("lm_head")
        (matrices if config.optimizer == "muon" and is_inner else others).append(parameter)
    settings = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    optimizers: list[torch.optim.Optimizer] = []
    if others:  # adapters are matrices alone
        optimizers.append(torch.optim.AdamW(others, betas=(0.9, 0.95), fused=True, **settings))
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **settings))
    return optimizers


def set_rate(optimizers: Sequence[torch.optim.Optimizer], config: TrainConfig, step: int) -> None:
    """Linear warm-up, then cosine down to `final_rate` of the highest."""
    warmup = max(1, round(config.warmup * config.steps))
    if step <= warmup:
        factor = step / warmup
    else:
        progress = (step - warmup) / max(1, config.steps - warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        factor = config.final_rate + (1 - config.final_rate) * cosine
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * factor
