"""A few answers of the target with all of its hidden states: what a drafter is probed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.data.batches import Batch, collate
from slipstream.data.loops import loop_start
from slipstream.data.store import Sample
from slipstream.models.readout import Readout


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's greedy answer, as the target sees them.

    Args:
        tokens: [T] int64.
        num_prompt: tokens before the answer.
        best: [T] int64, the target's most likely token after each position.
        hidden: [T, L+1, D], every hidden state.
        last_hidden: [T, D], input of the target's head.
    """

    tokens: Tensor
    num_prompt: int
    best: Tensor
    hidden: Tensor
    last_hidden: Tensor

    def sample(self, taps: Sequence[int], mask: Tensor, *, end: int | None = None) -> Sample:
        """The text as training sees it, up to `end`.

        Args:
            taps: hidden states that make the features.
            mask: [T] bool, tokens to be predicted.
            end: leave out tokens from here on.
        """
        features = self.hidden[:end, list(taps)].flatten(1)
        return Sample(
            self.tokens[:end], mask[:end], self.best[:end], features, self.last_hidden[:end]
        )

    def answer_mask(self) -> Tensor:
        """[T] bool: the answer's tokens."""
        return torch.arange(len(self.tokens)) >= self.num_prompt


@torch.no_grad()
def look(target: Any, readout: Readout, prompt: Sequence[int], answer: Sequence[int]) -> Text:
    """One pass of the target over a prompt and its answer, a repetition loop cut off.

    Args:
        target: with `extract` and `spec`, such as `target.hf.HFTarget`.
        readout: its embedding and head.
        prompt: ids.
        answer: ids, the target's greedy choices.
    """
    loop = loop_start(list(answer))
    said = list(answer) if loop is None else list(answer)[:loop]
    tokens = torch.tensor([*prompt, *said])
    taps = tuple(range(target.spec.num_layers + 1))
    seen = target.extract(tokens[None], taps, [len(tokens)])
    last_hidden = seen.last_hidden[0].float().cpu()
    best = readout.logits(last_hidden)[:, : target.spec.vocab_size].argmax(-1)
    hidden = seen.features[0].float().cpu().unflatten(-1, (len(taps), -1))
    return Text(tokens, len(prompt), best, hidden, last_hidden)


def batch_of(samples: Sequence[Sample]) -> Batch:
    """A batch with each sample in a row of its own."""
    longest = max(len(sample) for sample in samples)
    return collate([[sample] for sample in samples], max_length=longest, dtype=torch.float32)
