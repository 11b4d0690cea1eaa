"""One optimizer step, the same for every side of `training_throughput.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def stepper(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_of: Callable[[int], tuple[Tensor, float]],
    *,
    precision: str,
) -> Callable[[int], dict[str, Any]]:
    """Something that trains on a batch: forward under autocast, backward, clip, step.

    Args:
        model: float32 weights.
        optimizers: of its parameters.
        loss_of: number of a batch to its loss and the accuracy of the first drafted token.
        precision: "bfloat16" casts in the forward pass, "float32" does not.
    """
    is_cast = precision != "float32"

    def step(number: int) -> dict[str, Any]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
            loss, accuracy = loss_of(number)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        return {"loss": float(loss.detach()), "accuracy": accuracy}

    return step
