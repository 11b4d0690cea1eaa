"""What a training objective is and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from slipstream.data.batches import Batch
from slipstream.models.readout import Readout


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and what it saw.

    Args:
        total: [] nats, mean over supervised positions, the one to differentiate.
        parts: detached [] nats by name, for the log.
        num_supervised: positions that counted at the first step.
        prefix_hits: [K] float, how many positions had their first 1..K drafts all equal to the
            target's own choice; divided by `prefix_count` it is the joint prefix accuracy.
        prefix_count: positions that had K supervised successors, hit or not; a target choice
            outside the draft vocabulary is a miss, not a position left out.
    """

    total: Tensor
    parts: dict[str, Tensor]
    num_supervised: Tensor
    prefix_hits: Tensor
    prefix_count: Tensor


class Objective(Protocol):
    """Computes the loss of a draft network on a batch.

    One that changes as a training goes on has `advance(share)` too: before each step it is told
    which share of the steps is done.
    """

    def __call__(self, model: nn.Module, batch: Batch, readout: Readout) -> Loss:
        """One forward pass."""
