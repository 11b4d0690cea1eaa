"""Medusa-1: every head learns one token further ahead, the target stays as it is.

Paper: Cai et al. 2024, Medusa, arXiv:2401.10774, section 2.2.1.
Differs: the token to predict is the target's own choice, whatever the text says; `soft` learns its
whole distribution instead; the loss of a head is a mean over the positions that count.

Row t reads the target's last hidden state of position t; head i predicts x[t+2+i] and is compared
with what the target says at position t+1+i.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.data.batches import Batch
from slipstream.models.medusa import Medusa
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.labels import Labels
from slipstream.train.objectives.protocol import Loss
from slipstream.train.objectives.soft_cross_entropy import soft_cross_entropy


class MedusaHeads:
    """Decayed sum of the heads' cross-entropies.

    Args:
        vocabulary: draft ids and what they mean.
        decay: head i weighs decay ** i; 0.8 in the paper.
        soft: learn the target's distribution instead of its choice.
    """

    def __init__(
        self, vocabulary: DraftVocabulary, *, decay: float = 0.8, soft: bool = False
    ) -> None:
        self.vocabulary = vocabulary
        self.decay, self.soft = decay, soft
        self._draft_ids = vocabulary.draft_ids()

    def __call__(self, model: Medusa, batch: Batch, readout: Readout) -> Loss:
        """Loss of one packed batch; see `Loss`."""
        labels = Labels(batch, readout, self.vocabulary, self._draft_ids)
        probs = self._wanted(labels)
        borrowed = readout.head[self.vocabulary.target_ids] if model.config.borrows_head else None
        alive = torch.ones_like(batch.loss_mask)
        countable = torch.ones_like(batch.loss_mask)
        hits: list[Tensor] = []
        total, weights, parts = batch.last_hidden.new_zeros(()), 0.0, {}
        num_supervised = torch.zeros(())
        for index, head in enumerate(model.heads):
            supervised = labels.supervised(index)
            counted = supervised & labels.in_vocabulary(index)
            said = soft_cross_entropy(
                model.state(index, batch.last_hidden[counted]),
                head[-1].weight if borrowed is None else borrowed,
                probs,
                labels.rows(counted, index),
            )
            weight = self.decay**index
            total, weights = total + weight * said.loss, weights + weight
            parts[f"loss_{index + 1}"] = said.loss.detach()
            hit = torch.zeros_like(alive)
            hit[counted] = said.choice == labels.draft_choice(counted, index)
            alive, countable = alive & hit, countable & supervised
            hits.append(alive)
            if index == 0:
                num_supervised = counted.sum()
        return Loss(
            total=total / weights,
            parts=parts,
            num_supervised=num_supervised,
            prefix_hits=torch.stack([(h & countable).sum() for h in hits]).float(),
            prefix_count=countable.sum().float(),
        )

    def _wanted(self, labels: Labels) -> Tensor:
        """[P, U] what the heads are to say, in the order of `labels.probs`."""
        if self.soft:
            return labels.probs
        return F.one_hot(labels.probs.argmax(-1), labels.probs.shape[1]).to(labels.probs.dtype)
