"""Medusa's heads: each guesses one token further ahead from the target's last hidden state.

Paper: Cai et al. 2024, Medusa, arXiv:2401.10774, section 2.1.
Differs: heads may borrow the target's frozen head, restricted to a draft vocabulary, so that a
head is a residual block alone (the authors' legacy "version 2" borrows the whole head).
Also: FasterDecoding/Medusa `medusa_model.py` fixes the parameter names below `heads`.

The last hidden state of position t gives the target's logits of x[t+1], the root. Head i reads
the same state and guesses x[t+2+i]. A fresh head copies the target's: its blocks start at zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import CheckpointError

Project = Callable[[Tensor], Tensor]
"""[..., D] to [..., U] logits: a borrowed head."""


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Shape of the heads.

    Args:
        hidden_size: D of the target.
        num_heads: heads, one per drafted depth.
        num_blocks: residual blocks of a head.
        vocab_size: rows of the target's head; None where the file does not say.
        draft_vocab_size: U, ids a head knows; None for all of the target's.
        borrows_head: True when the target's head ends every head.

    Raises:
        CheckpointError: sizes that cannot belong together.
    """

    hidden_size: int
    num_heads: int
    num_blocks: int
    vocab_size: int | None
    draft_vocab_size: int | None
    borrows_head: bool

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_blocks < 1:
            raise CheckpointError(
                f"{self.num_heads} heads of {self.num_blocks} blocks, expected 1 or more of each"
            )
        if not self.borrows_head and self.draft_vocab_size is None:
            raise CheckpointError("heads of their own need a vocabulary size")


class ResidualBlock(nn.Module):
    """x + silu(linear(x)), the linear zero at the start."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return x + F.silu(self.linear(x))


class Medusa(nn.Module):
    """All heads; `state` is what a head's own or borrowed projection reads."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        size, num_blocks = config.hidden_size, config.num_blocks
        self.heads = nn.ModuleList(
            nn.ModuleList(ResidualBlock(size) for _ in range(num_blocks))
            for _ in range(config.num_heads)
        )
        if not config.borrows_head:
            for head in self.heads:
                head.append(nn.Linear(size, config.draft_vocab_size, bias=False))

    def state(self, index: int, last_hidden: Tensor) -> Tensor:
        """[..., D] of head `index` from the target's last hidden states [..., D]."""
        for block in self.heads[index][: self.config.num_blocks]:
            last_hidden = block(last_hidden)
        return last_hidden

    def logits(self, last_hidden: Tensor, project: Project | None = None) -> Tensor:
        """[heads, ..., U] logits of every head.

        Args:
            last_hidden: [..., D].
            project: the target's head over the draft vocabulary, where it is borrowed.
        """
        states = [self.state(index, last_hidden) for index in range(len(self.heads))]
        if project is not None:
            return project(torch.stack(states))
        own = [head[self.config.num_blocks] for head in self.heads]
        return torch.stack([head(state) for head, state in zip(own, states, strict=True)])
