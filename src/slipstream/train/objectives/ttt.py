"""EAGLE-3's objective: the training-time test.

Paper: Li et al. 2025, EAGLE-3, arXiv:2503.01840, section 3.2 and figure 6.
Differs: the loss is a mean over the positions that count, so it does not depend on padding (the
authors' code divides by all positions); the prefix accuracy counts targets outside the draft
vocabulary as misses; a first part of a training may unroll once only (`unroll_after`).

Row i, step s: the network reads the state of step s-1 (fused features at s = 0) and token
x[i+1+s], and predicts x[i+2+s]. Its query sees the real-feature keys of rows j <= i and its own
keys of the simulated steps 1..s, which is what a drafted chain of s+1 tokens sees:

    keys:   step 0          step 1     step 2
            lower triangle  diagonal   diagonal
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.data.batches import Batch
from slipstream.models.eagle3 import Eagle3
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.documents import by_text, spans
from slipstream.train.objectives.labels import Labels, shift
from slipstream.train.objectives.protocol import Loss
from slipstream.train.objectives.soft_cross_entropy import soft_cross_entropy


class TrainingTimeTest:
    """Unrolls the drafter on its own states and sums the decayed losses of the steps.

    Args:
        vocabulary: draft ids and what they mean.
        num_unrolled: steps, the first one on real features; 7 in the paper.
        decay: weight of step s is decay ** s; 0.8 in the authors' code.
        unroll_after: share of a training that takes the first step alone: later ones can only be
            right where the first is, and cost as much.
    """

    def __init__(
        self,
        vocabulary: DraftVocabulary,
        *,
        num_unrolled: int = 7,
        decay: float = 0.8,
        unroll_after: float = 0.0,
    ) -> None:
        self.vocabulary = vocabulary
        self.num_unrolled = num_unrolled
        self.decay = decay
        self.unroll_after = unroll_after
        self._share_done = 1.0
        self._draft_ids = vocabulary.draft_ids()

    def advance(self, share: float) -> None:
        """So much of the training is done."""
        self._share_done = share

    def __call__(self, model: Eagle3, batch: Batch, readout: Readout) -> Loss:
        """Loss of one packed batch; see `Loss`. A network that is judged unrolls all steps."""
        is_early = model.training and self._share_done < self.unroll_after
        labels = Labels(batch, readout, self.vocabulary, self._draft_ids)
        attend = UnrolledAttention(batch.documents)
        states = model.fuse(batch.features)
        alive = torch.ones_like(batch.loss_mask)
        countable = torch.ones_like(batch.loss_mask)
        hits: list[Tensor] = []
        total, weights, parts = batch.features.new_zeros(()), 0.0, {}
        num_supervised = torch.zeros(())
        for step in range(1 if is_early else self.num_unrolled):
            embedded = readout.embed(shift(batch.tokens, 1 + step)).to(states.dtype)
            states = model.step(states, embedded, batch.positions + step, attend)
            supervised = labels.supervised(step)
            counted = supervised & labels.in_vocabulary(step)
            said = soft_cross_entropy(
                model.read(states[counted]),  # [M, D]
                model.lm_head.weight,
                labels.probs,
                labels.rows(counted, step),
            )
            weight = self.decay**step
            total, weights = total + weight * said.loss, weights + weight
            parts[f"loss_{step + 1}"] = said.loss.detach()
            hit = torch.zeros_like(alive)
            hit[counted] = said.choice == labels.draft_choice(counted, step)
            alive, countable = alive & hit, countable & supervised
            hits.append(alive.clone())
            if step == 0:
                num_supervised = counted.sum()
        return Loss(
            total=total / weights,
            parts=parts,
            num_supervised=num_supervised,
            prefix_hits=torch.stack([(h & countable).sum() for h in hits]).float(),
            prefix_count=countable.sum().float(),
        )

    @torch.no_grad()
    def accepted(self, model: Eagle3, batch: Batch, readout: Readout) -> Tensor:
        """How many drafted tokens a chain started at each row would have had accepted.

        Row i starts a chain of `num_unrolled` after token x[i+1], the root.

        Returns:
            [B, T] int64; -1 where fewer than `num_unrolled` successors are supervised.
        """
        labels = Labels(batch, readout, self.vocabulary, self._draft_ids)
        attend = UnrolledAttention(batch.documents)
        states = model.fuse(batch.features)
        alive = torch.ones_like(batch.loss_mask)
        countable = torch.ones_like(batch.loss_mask)
        length = torch.zeros_like(batch.tokens)
        target_ids = self.vocabulary.target_ids.to(batch.tokens.device)
        for step in range(self.num_unrolled):
            embedded = readout.embed(shift(batch.tokens, 1 + step)).to(states.dtype)
            states = model.step(states, embedded, batch.positions + step, attend)
            countable &= labels.supervised(step)
            chosen = target_ids[model.logits(states).argmax(-1)]
            alive &= chosen == shift(batch.best, 1 + step)
            length += alive
        return length.masked_fill(~countable, -1)


class UnrolledAttention:
    """Attention of the training-time test; call it once a step, in order.

    Each text of a packed row is attended on its own, so the work grows with the texts' lengths
    squared and not with the row's.

    Args:
        documents: [B, T] int64, which text each position belongs to, -1 where padded.
    """

    def __init__(self, documents: Tensor) -> None:
        self.spans = spans(documents)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, T, C] queries, [B, Hkv, T, C] keys and values of the step, to [B, H, T, C]."""
        group = q.shape[1] // k.shape[1]
        if not self.keys:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            self.keys.append(k)
            self.values.append(v)
            return by_text(
                self.spans,
                q,
                lambda row, here: F.scaled_dot_product_attention(
                    q[row, None, :, here], k[row, None, :, here], v[row, None, :, here],
                    is_causal=True,
                )[0],
            )  # fmt: skip
        self.keys.append(k.repeat_interleave(group, 1))
        self.values.append(v.repeat_interleave(group, 1))
        q = q / math.sqrt(q.shape[-1])
        own = torch.stack([(q * key).sum(-1) for key in self.keys[1:]], -1)  # [B, H, T, steps]
        return by_text(self.spans, q, lambda row, here: self._attend(q, own, row, here))

    def _attend(self, q: Tensor, own: Tensor, row: int, here: slice) -> Tensor:
        """[H, t, C] of one text: the lower triangle of step 0 and a diagonal per later step."""
        length = here.stop - here.start
        shared = q[row, :, here] @ self.keys[0][row, :, here].transpose(-1, -2)  # [H, t, t]
        above = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        shared = shared.masked_fill(above, float("-inf"))
        weights = torch.cat([shared, own[row, :, here]], -1).softmax(-1)
        mixed = weights[..., :length] @ self.values[0][row, :, here]
        for step, value in enumerate(self.values[1:]):
            mixed = mixed + weights[..., length + step, None] * value[row, :, here]
        return mixed
