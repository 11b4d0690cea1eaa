"""What the target says at each position of a batch, and which positions count.

Row i of a pair network reads token x[i+1] and predicts x[i+2]; at a simulated step s it predicts
x[i+2+s]. `choice` and `probs` belong to the position whose output is that token: i+1+s.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.data.batches import Batch
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary


class Labels:
    """What the target says at each row and step, restricted to the draft vocabulary."""

    def __init__(
        self, batch: Batch, readout: Readout, vocabulary: DraftVocabulary, draft_ids: Tensor
    ) -> None:
        self.batch = batch
        self.choice = draft_ids[batch.best]  # [B, T] int64, -1 outside the vocabulary
        wanted = shift(batch.loss_mask, 1) & (self.choice >= 0)
        self.row_of = torch.full_like(batch.tokens, -1)
        self.row_of[wanted] = torch.arange(int(wanted.sum()), device=wanted.device)
        with torch.no_grad():
            logits = readout.logits(batch.last_hidden[wanted], vocabulary.target_ids)
            self.probs = logits.float().softmax(-1)  # [P, U]

    def supervised(self, step: int) -> Tensor:
        """[B, T] bool: the token predicted by each row is supervised and of the same text."""
        ahead = 2 + step
        same = shift(self.batch.documents, ahead, fill=-2) == self.batch.documents
        return same & shift(self.batch.loss_mask, ahead) & (self.batch.documents >= 0)

    def in_vocabulary(self, step: int) -> Tensor:
        """[B, T] bool: the target's choice has a draft id."""
        return shift(self.choice, 1 + step, fill=-1) >= 0

    def draft_choice(self, counted: Tensor, step: int) -> Tensor:
        """[M] int64 draft ids of the target's choices at the counted rows."""
        return shift(self.choice, 1 + step, fill=-1)[counted]

    def rows(self, counted: Tensor, step: int) -> Tensor:
        """[M] int64, which of `probs` each counted row is to match."""
        return shift(self.row_of, 1 + step, fill=-1)[counted]


def shift(x: Tensor, steps: int, *, fill: int = 0) -> Tensor:
    """[B, T] moved left by `steps`, the freed end filled.

    Example:
        >>> shift(torch.tensor([[1, 2, 3]]), 1)
        tensor([[2, 3, 0]])
    """
    return F.pad(x[:, steps:], (0, min(steps, x.shape[1])), value=fill)
