"""The target's frozen embedding and head, from plain tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Readout:
    """What a drafter borrows from its target. Contains no norm.

    Args:
        embedding: [V', D], the input embedding's weight.
        head: [V', D], the head's weight; the same tensor when tied.
        embedding_scale: Gemma-style factor on embeddings; 1 elsewhere.
    """

    embedding: Tensor
    head: Tensor
    embedding_scale: float = 1.0

    def to(self, device: torch.device) -> Readout:
        """The same on a device; what is tied stays one tensor."""
        embedding = self.embedding.to(device)
        head = embedding if self.head is self.embedding else self.head.to(device)
        return Readout(embedding, head, self.embedding_scale)

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., D] embeddings of [...] int64 target ids."""
        embedded = F.embedding(tokens, self.embedding)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale

    def logits(self, last_hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """[..., V'] logits of `last_hidden` [..., D], or [..., U] of the head's `rows` only."""
        head = self.head if rows is None else self.head[rows]
        return F.linear(last_hidden.to(head.dtype), head)
