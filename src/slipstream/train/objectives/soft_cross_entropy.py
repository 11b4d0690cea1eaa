"""Cross-entropy of a draft head against the target's distribution, without storing its logits.

A head over thousands of ids makes logits that are far larger than everything else in a batch.
Rows are taken a block at a time: logits, loss, and at once the gradient softmax(z) - p, which is
multiplied into the gradients of the hidden states and of the head and then forgotten. The result
equals the plain computation; memory does not grow with the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 2048  # rows whose logits exist at once: enough for efficient products
CHUNK = 32  # rows in float32 at a time, so that they stay in the processor's cache


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """What a draft head said about some rows.

    Args:
        loss: [] nats, mean soft cross-entropy over the rows; 0 when there are none.
        choice: [M] int64, the head's most likely id for each row.
    """

    loss: Tensor
    choice: Tensor


def soft_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    probs: Tensor,
    rows: Tensor,
    row_weights: Tensor | None = None,
) -> HeadLoss:
    """Weighted mean of -sum(p * log softmax(hidden @ weight.T)) over rows.

    Under autocast the products run in its number type, sums and exponentials in float32.

    Args:
        hidden: [M, D], input of the draft head.
        weight: [U, D], the draft head.
        probs: [P, U] the target's probabilities over the same ids, each row summing to 1.
        rows: [M] int64, which of `probs` belongs to each hidden state.
        row_weights: [M] or None for equal ones; they are normalised to sum to 1.
    """
    if hidden.shape[0] == 0:
        return HeadLoss(hidden.sum() * 0 + weight.sum() * 0, rows)
    if row_weights is None:
        row_weights = hidden.new_ones(len(rows), dtype=torch.float64)
    row_weights = row_weights / row_weights.sum()
    loss, choice = _SoftCrossEntropy.apply(hidden, weight, probs, rows, row_weights)
    return HeadLoss(loss, choice)


class _SoftCrossEntropy(torch.autograd.Function):
    """The gradients are made in the forward pass, while the logits exist."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, probs: Tensor, rows: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        inputs, head = hidden.detach().to(dtype), weight.detach().to(dtype)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(inputs) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        choices = []
        with torch.autocast(device, enabled=False):
            for first in range(0, len(rows), BLOCK):
                block = slice(first, first + BLOCK)
                x = inputs[block]
                scores = x @ head.T  # logits; each is replaced by its gradient once it is used
                for start in range(0, len(x), CHUNK):
                    here = slice(start, start + CHUNK)
                    logits = scores[here].to(wide)
                    choice = logits.argmax(-1, keepdim=True)
                    choices.append(choice[:, 0])
                    p = probs.index_select(0, rows[block][here]).to(wide)
                    q = logits.softmax(-1)
                    # log of the normaliser from the likeliest id: one softmax serves both
                    log_mass = (logits.gather(-1, choice) - q.gather(-1, choice).log())[:, 0]
                    share = shares[block][here].to(wide)
                    total += (share * (log_mass - torch.linalg.vecdot(p, logits))).sum()
                    if wants_hidden or wants_weight:
                        scores[here] = q.sub_(p).mul_(share[:, None])
                if wants_hidden:
                    grad_hidden[block] = scores @ head
                if wants_weight:
                    grad_weight += scores.T @ x
        ctx.save_for_backward(
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
        )
        choice = torch.cat(choices)
        ctx.mark_non_differentiable(choice)
        return total, choice

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_choice: Tensor) -> tuple[Any, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad_loss.to(grad_hidden.dtype),
            None if grad_weight is None else grad_weight * grad_loss.to(grad_weight.dtype),
            None,
            None,
            None,
        )
