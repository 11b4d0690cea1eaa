"""Are these answers the target's own? A drafter trained on somebody else's accepts less.

Text sampled from the target surprises it, on average, by exactly its entropy: the mean of
-log p(token) - H(p) is 0, below 0 for greedy text, and above 0 for text of another origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.data.supervise import Supervised, check_ids

FOREIGN = 0.15  # nats/token above the entropy from which answers count as somebody else's


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How the target sees supervised tokens.

    Args:
        nll: mean -log p of the tokens, nats/token.
        entropy: mean entropy of the target where they stand, nats/token.
        agreement: share of the tokens that are the target's most likely.
        num_tokens: supervised tokens looked at.
    """

    nll: float
    entropy: float
    agreement: float
    num_tokens: int

    @property
    def surprise(self) -> float:
        """Nats/token beyond what the target's own sampling would give."""
        return self.nll - self.entropy

    @property
    def is_foreign(self) -> bool:
        """True when the answers are not the target's own: regenerate them."""
        return self.surprise > FOREIGN


@torch.no_grad()
def answer_likelihood(target: Any, rows: Sequence[Supervised]) -> Likelihood | None:
    """Score the supervised tokens of some rows; None where there are none.

    Args:
        target: with `extract`, `head` and `spec`, such as `target.hf.HFTarget`.
        rows: supervised rows, one pass each.

    Raises:
        DataError: a token id is outside the target's vocabulary.
    """
    vocab_size = target.spec.vocab_size
    sums = torch.zeros(3, dtype=torch.float64)  # nll, entropy, agreement
    num_tokens = 0
    for row in rows:
        check_ids(row.tokens, vocab_size)
        where = [t - 1 for t, is_on in enumerate(row.mask) if is_on and t > 0]
        if not where:
            continue
        tokens = torch.tensor([row.tokens])  # [1, T] int64
        hidden = target.extract(tokens, (), [len(row.tokens)]).last_hidden[0, where]
        head = target.head()
        logits = torch.nn.functional.linear(hidden.to(head.dtype), head).float()[:, :vocab_size]
        log_probs = logits.log_softmax(-1)  # [T', V] nats
        said = tokens[0, [t + 1 for t in where]].to(log_probs.device)
        sums[0] -= log_probs.gather(1, said[:, None]).sum().double().cpu()
        sums[1] -= (log_probs.exp() * log_probs).sum().double().cpu()
        sums[2] += (log_probs.argmax(-1) == said).sum().double().cpu()
        num_tokens += len(where)
    if not num_tokens:
        return None
    nll, entropy, agreement = (sums / num_tokens).tolist()
    return Likelihood(nll, entropy, agreement, num_tokens)
