"""A head that lets a block's slots know the token before theirs: DSpark's Markov head.

A block's slots are guessed independently, so a likely second token may stand below a first token
that it never follows. This head adds to a slot's state what the token before it calls for; the
logits become U[slot] + B(token before), and a chain or a tree grows token by token, or level by
level, at the cost of one small product a level.

Paper: DeepSeek 2026, DSpark, arXiv:2607.05147, section 3 (Markov head); the trees that score a
child after its parent are PCTree's, arXiv:2608.02123.
Differs: B = W1[x] W2 is read off the target's frozen embedding and head, as UBTree's selector is
(arXiv:2609.39972), instead of two tables of their own: W1 = f(embedding), W2 = head @ up. A small
training set says something about every token then, not only about those it holds often.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PathHead(nn.Module):
    """What a token adds to the state of the slot after it; nothing at all when fresh.

    Args:
        hidden_size: D.
        rank: of the bias over the vocabulary.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.read = nn.Linear(hidden_size, hidden_size, bias=False)
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, hidden_size, bias=False)
        self.reset(torch.Generator().manual_seed(0))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Fresh weights."""
        for layer in (self.read, self.down):
            layer.weight.normal_(0, layer.in_features**-0.5, generator=generator)
        self.up.weight.zero_()

    def codes(self, embedding: Tensor) -> Tensor:
        """[V', rank] of every token, from the target's embedding [V', D]."""
        return self.code(embedding)

    def rows(self, head: Tensor) -> Tensor:
        """[U, rank] that turns a code into logits, from the target's head [U, D]."""
        return head @ self.up.weight

    def code(self, embedded: Tensor) -> Tensor:
        """[..., rank] of the embeddings [..., D] of the tokens before."""
        return self.down(F.silu(self.read(embedded)))

    def forward(self, embedded: Tensor) -> Tensor:
        """[..., D] to add to the states that the target's head reads."""
        return self.up(self.code(embedded))


class PathTable(nn.Module):
    """DSpark's own head: two tables, trained elsewhere; here it drafts and is not trained.

    Args:
        vocab_size: rows of the target's embedding.
        draft_vocab_size: U.
        rank: of the bias over the vocabulary.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.before = nn.Embedding(vocab_size, rank)
        self.after = nn.Linear(rank, draft_vocab_size, bias=False)

    def codes(self, _embedding: Tensor) -> Tensor:
        """[V', rank] of every token."""
        return self.before.weight

    def rows(self, _head: Tensor) -> Tensor:
        """[U, rank] that turns a code into logits."""
        return self.after.weight
