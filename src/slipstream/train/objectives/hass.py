"""HASS's objective: EAGLE-1's, on the contexts that drafting meets and the tokens that matter.

Paper: Zhang et al. 2024, HASS, arXiv:2408.15766, sections 3.1 (harmonised objective) and 3.2
(harmonised context alignment).
Differs: masked scores are -inf (the authors' code sets them to 0, so they take part in the
softmax); the steps' losses are averaged, so that settings do not depend on their number.

While drafting, the newest features of the context are the network's own predictions. Step s
(from 0) therefore replaces the newest s features that a row sees: row i reads the feature that
row i-1 predicted at step s-1, and with S the current step its query sees

    keys of step 0, the real features     rows j <= i - S
    keys of step t, 1 <= t <= S           row  j  = i - (S - t)      (t = S: the row itself)

Positions, tokens and targets are the rows' own at every step: only features are stale, which is
what sets this apart from EAGLE-3's training-time test. Predictions that are read are detached.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.data.batches import Batch
from slipstream.models.eagle import Eagle
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.documents import by_text, spans
from slipstream.train.objectives.feature import chain_hits, judge, noisy
from slipstream.train.objectives.labels import Labels, shift
from slipstream.train.objectives.protocol import Loss


class HarmonisedAlignment:
    """EAGLE-1's loss and top-K distillation, averaged over steps of context alignment.

    Args:
        vocabulary: draft ids and what they mean.
        num_aligned: steps, the first on real features alone; 3 in the paper.
        topk: K, the target's likeliest tokens that are distilled with more weight; 10.
        topk_weight: of -sum over them of p log q; 1 in the authors' second stage.
        token_weight: of the soft cross-entropy over all tokens; 0.1.
        noise: see `FeatureRegression`.
        num_measured: see `FeatureRegression`.
    """

    def __init__(
        self,
        vocabulary: DraftVocabulary,
        *,
        num_aligned: int = 3,
        topk: int = 10,
        topk_weight: float = 1.0,
        token_weight: float = 0.1,
        noise: float = 0.1,
        num_measured: int = 4,
    ) -> None:
        self.vocabulary = vocabulary
        self.num_aligned = num_aligned
        self.topk = topk
        self.topk_weight = topk_weight
        self.token_weight = token_weight
        self.noise = noise
        self.num_measured = num_measured
        self._draft_ids = vocabulary.draft_ids()

    def __call__(self, model: Eagle, batch: Batch, readout: Readout) -> Loss:
        """Loss of one packed batch; see `Loss` and `FeatureRegression.__call__`."""
        labels = Labels(batch, readout, self.vocabulary, self._draft_ids)
        head = readout.head[self.vocabulary.target_ids]  # [U, D]
        wanted = weigh(labels.probs, self.token_weight, self.topk, self.topk_weight)
        real = noisy(batch, self.noise) if model.training else batch.last_hidden
        embedded = readout.embed(shift(batch.tokens, 1)).to(real.dtype)
        is_first = (batch.positions == 0)[..., None]
        attend = AlignedAttention(batch.documents)
        features, total, parts, steps = real, real.new_zeros(()), {}, []
        for step in range(self.num_aligned):
            predicted = model.step(features, embedded, batch.positions, attend)
            judged = judge(predicted, batch, labels, head, wanted)
            loss = judged.regression + judged.tokens
            total = total + loss / self.num_aligned
            parts[f"loss_{step + 1}"] = loss.detach()
            steps.append(judged)
            late = F.pad(predicted.detach()[:, :-1], (0, 0, 1, 0))  # row i: predicted by row i-1
            features = torch.where(is_first, real, late.to(real.dtype))
        first = steps[0]
        parts["regression"] = first.regression.detach()
        if model.training:
            return Loss(total, parts, first.num_supervised, *first.first_hits)
        hits, count = chain_hits(model, batch, readout, labels, head, self.num_measured)
        return Loss(total, parts, first.num_supervised, hits, count)


def weigh(probs: Tensor, token_weight: float, topk: int, topk_weight: float) -> Tensor:
    """[P, U] what is wanted of each id: all of p a little, its K largest much more.

    Both terms are cross-entropies, so their weighted sum is the cross-entropy with the weighted
    sum of what they want, and one pass of the head serves both.

    Args:
        probs: [P, U], the target's.
        token_weight: of all ids.
        topk: K.
        topk_weight: of the K likeliest, on top.
    """
    best = probs.topk(min(topk, probs.shape[-1]), dim=-1)
    return (token_weight * probs).scatter_add(-1, best.indices, topk_weight * best.values)


class AlignedAttention:
    """Attention of context alignment; call it once a step, in order.

    Args:
        documents: [B, T] int64, which text each position belongs to, -1 where padded.
    """

    def __init__(self, documents: Tensor) -> None:
        self._spans = spans(documents)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, T, C] queries, [B, Hkv, T, C] keys and values of the step, to [B, H, T, C]."""
        group = q.shape[1] // k.shape[1]
        self._keys.append(k.repeat_interleave(group, 1))
        self._values.append(v.repeat_interleave(group, 1))
        return by_text(self._spans, q, lambda row, here: self._attend(q[row, :, here], row, here))

    def _attend(self, q: Tensor, row: int, here: slice) -> Tensor:
        """[H, t, C] of one text."""
        keys = [key[row, :, here] for key in self._keys]
        values = [value[row, :, here] for value in self._values]
        last, length = len(keys) - 1, q.shape[1]
        if last == 0:
            return F.scaled_dot_product_attention(
                q[None], keys[0][None], values[0][None], is_causal=True
            )[0]
        q = q / math.sqrt(q.shape[-1])
        visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-last)
        scores = [(q @ keys[0].transpose(-1, -2)).masked_fill(~visible, float("-inf"))]
        for step in range(1, last + 1):
            delay = last - step
            own = (q * _delay(keys[step], delay)).sum(-1, keepdim=True)  # [H, t, 1]
            absent = torch.arange(length, device=q.device) < delay
            scores.append(own.masked_fill(absent[:, None], float("-inf")))
        weights = torch.cat(scores, -1).softmax(-1)  # [H, t, t + last]
        mixed = weights[..., :length] @ values[0]
        for step in range(1, last + 1):
            mixed = mixed + weights[..., length + step - 1, None] * _delay(
                values[step], last - step
            )
        return mixed


def _delay(x: Tensor, rows: int) -> Tensor:
    """[H, t, C] moved down by some rows; row i holds what row i - rows held, zeros above."""
    return F.pad(x[:, : max(x.shape[1] - rows, 0)], (0, 0, min(rows, x.shape[1]), 0))
