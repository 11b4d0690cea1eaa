"""EAGLE-1's objective: predict the next feature, and the token the target's head reads from it.

Paper: Li et al. 2024, EAGLE, arXiv:2401.15077, section 4.2.
Differs: losses are means over the positions that count, so they do not depend on padding; tokens
are compared over the draft vocabulary; the noise is keyed by the batch, so a resumed run
continues exactly; the prefix accuracy is that of a drafted chain, which training does not
simulate.
Also: SafeAILab/EAGLE's `main.py` has the weights and the noise.

Row i reads the feature of position i, with a little noise while training, and token x[i+1]. It
predicts the feature of position i+1, from which the target's frozen head reads x[i+2]:

    loss = SmoothL1(predicted, feature) + 0.1 * soft cross-entropy(target's p, head of predicted)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.data.batches import Batch
from slipstream.models.eagle import Eagle
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.documents import spans
from slipstream.train.objectives.labels import Labels, shift
from slipstream.train.objectives.protocol import Loss
from slipstream.train.objectives.soft_cross_entropy import soft_cross_entropy
from slipstream.train.objectives.ttt import UnrolledAttention

REFERENCE_LENGTH = 512  # tokens of a text whose noise has the stated amplitude


class FeatureRegression:
    """Teacher forcing: every row reads real features.

    Args:
        vocabulary: draft ids and what they mean.
        token_weight: of the cross-entropy; 0.1 in the paper.
        noise: largest absolute noise on the features of a text of 512 tokens; longer texts get
            less.
        num_measured: drafted tokens that the prefix accuracy of held-out texts covers.
    """

    def __init__(
        self,
        vocabulary: DraftVocabulary,
        *,
        token_weight: float = 0.1,
        noise: float = 0.1,
        num_measured: int = 4,
    ) -> None:
        self.vocabulary = vocabulary
        self.token_weight = token_weight
        self.noise = noise
        self.num_measured = num_measured
        self._draft_ids = vocabulary.draft_ids()

    def __call__(self, model: Eagle, batch: Batch, readout: Readout) -> Loss:
        """Loss of one packed batch; see `Loss`.

        While training, the prefix accuracy is of the first drafted token alone, which costs
        nothing; in evaluation mode the network is unrolled on its own predictions.
        """
        labels = Labels(batch, readout, self.vocabulary, self._draft_ids)
        head = readout.head[self.vocabulary.target_ids]  # [U, D]
        features = noisy(batch, self.noise) if model.training else batch.last_hidden
        embedded = readout.embed(shift(batch.tokens, 1)).to(features.dtype)
        attend = UnrolledAttention(batch.documents)
        predicted = model.step(features, embedded, batch.positions, attend)
        judged = judge(predicted, batch, labels, head, labels.probs)
        total = judged.regression + self.token_weight * judged.tokens
        parts = {"regression": judged.regression.detach(), "tokens": judged.tokens.detach()}
        if model.training:
            return Loss(total, parts, judged.num_supervised, *judged.first_hits)
        hits, count = chain_hits(model, batch, readout, labels, head, self.num_measured)
        return Loss(total, parts, judged.num_supervised, hits, count)


@dataclass(frozen=True, slots=True)
class Judged:
    """What predicted features are worth.

    Args:
        regression: [] mean SmoothL1 over supervised rows and the hidden size.
        tokens: [] nats, mean soft cross-entropy over the rows whose target choice has a draft id.
        num_hits: [] supervised rows whose first drafted token is the target's choice.
        num_supervised: [] supervised rows.
    """

    regression: Tensor
    tokens: Tensor
    num_hits: Tensor
    num_supervised: Tensor

    @property
    def first_hits(self) -> tuple[Tensor, Tensor]:
        """Prefix hits and count of `Loss` for the first drafted token alone."""
        return self.num_hits.float()[None], self.num_supervised.float()


def judge(predicted: Tensor, batch: Batch, labels: Labels, head: Tensor, wanted: Tensor) -> Judged:
    """Compare predicted features with those one position later.

    Args:
        predicted: [B, T, D].
        batch: where they were predicted.
        labels: what the target says.
        head: [U, D], the target's over the draft vocabulary.
        wanted: [P, U], what is wanted of each id, in the order of `labels.probs`; rows that sum
            to more than 1 weigh as much more.
    """
    supervised = labels.supervised(0)
    counted = supervised & labels.in_vocabulary(0)
    goals = F.pad(batch.last_hidden[:, 1:], (0, 0, 0, 1))[supervised]  # [M, D]
    ours = predicted[supervised]
    regression = F.smooth_l1_loss(ours, goals.to(ours.dtype)) if len(ours) else ours.sum()
    rows = labels.rows(counted, 0)
    mass = wanted.sum(-1)
    said = soft_cross_entropy(predicted[counted], head, wanted / mass[:, None], rows, mass[rows])
    tokens = said.loss * mass[rows].mean() if len(rows) else said.loss
    num_hits = (said.choice == labels.draft_choice(counted, 0)).sum()
    return Judged(regression, tokens, num_hits, supervised.sum())


@torch.no_grad()
def chain_hits(
    model: Eagle, batch: Batch, readout: Readout, labels: Labels, head: Tensor, num_steps: int
) -> tuple[Tensor, Tensor]:
    """How often drafted chains of 1 to K tokens agree with the target, as `Loss` wants it.

    Args:
        model: unrolled on its own predictions from the second step on, as drafting does.
        batch: every row starts a chain.
        readout: the target's embedding.
        labels: what the target says.
        head: [U, D], the target's over the draft vocabulary.
        num_steps: K.

    Returns:
        [K] prefix hits and [] prefix count.
    """
    alive = torch.ones_like(batch.loss_mask)
    countable = torch.ones_like(batch.loss_mask)
    hits = []
    attend, states = UnrolledAttention(batch.documents), batch.last_hidden
    for step in range(num_steps):
        embedded = readout.embed(shift(batch.tokens, 1 + step)).to(states.dtype)
        states = model.step(states, embedded, batch.positions + step, attend)
        countable &= labels.supervised(step)
        asked = alive & countable & labels.in_vocabulary(step)  # only these can still hit
        choice = F.linear(states[asked].to(head.dtype), head).argmax(-1)
        alive = torch.zeros_like(alive)
        alive[asked] = choice == labels.draft_choice(asked, step)
        hits.append(alive)
    return torch.stack([(hit & countable).sum() for hit in hits]).float(), countable.sum().float()


def noisy(batch: Batch, amplitude: float) -> Tensor:
    """[B, T, D] features with uniform noise, less in longer texts; the same for the same batch."""
    features = batch.last_hidden
    generator = torch.Generator().manual_seed(batch.number)
    noise = torch.rand(features.shape, generator=generator, dtype=features.dtype) * 2 - 1
    scale = features.new_zeros(features.shape[:2])
    for row, start, end in spans(batch.documents):
        scale[row, start:end] = amplitude * REFERENCE_LENGTH / (end - start)
    return features + noise.to(features.device) * scale[..., None]
