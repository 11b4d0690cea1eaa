"""Distilling a draft language model: at every supervised token, the target's distribution.

Paper: Zhou et al. 2024, DistillSpec, arXiv:2310.08461, section 4 (forward divergence on the
target's own text).
Differs: the target's distribution is restricted to the draft vocabulary and normalised, and
positions whose likeliest token lies outside it do not count; texts are not sampled from the
draft.

Row i reads tokens x[0..i] of its text and predicts x[i+1]. A chain of k drafts that starts behind
root x[i] is accepted in full where the predictions of rows i..i+k-1 are all the target's choices,
as long as the text itself is what the target would choose.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.data.batches import Batch
from slipstream.models.language import Language
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.documents import Spans, by_text, spans
from slipstream.train.objectives.labels import shift
from slipstream.train.objectives.protocol import Loss
from slipstream.train.objectives.soft_cross_entropy import soft_cross_entropy


class Distil:
    """Soft cross-entropy against the target at every supervised position.

    Args:
        vocabulary: draft ids and what they mean.
        num_drafts: longest chain whose joint prefix accuracy is measured.
    """

    def __init__(self, vocabulary: DraftVocabulary, *, num_drafts: int = 4) -> None:
        self.vocabulary = vocabulary
        self.num_drafts = num_drafts
        self._draft_ids = vocabulary.draft_ids()

    def __call__(self, model: Language, batch: Batch, readout: Readout) -> Loss:
        """Loss of one packed batch; see `Loss`."""
        supervised = self._supervised(batch)
        choice = self._draft_ids[batch.best]  # [B, T] int64, -1 outside the vocabulary
        counted = supervised & (choice >= 0)
        with torch.no_grad():
            logits = readout.logits(batch.last_hidden[counted], self.vocabulary.target_ids)
            probs = logits.float().softmax(-1)  # [M, U]
        said = soft_cross_entropy(
            model.norm(self._states(model, batch, readout)[counted]),
            model.lm_head.weight,
            probs,
            torch.arange(len(probs), device=probs.device),
        )
        hit = torch.zeros_like(counted)
        hit[counted] = said.choice == choice[counted]
        hits, count = self._prefixes(hit, supervised, batch)
        return Loss(
            total=said.loss,
            parts={"loss_1": said.loss.detach()},
            num_supervised=counted.sum(),
            prefix_hits=hits,
            prefix_count=count,
        )

    def _states(self, model: Language, batch: Batch, readout: Readout) -> Tensor:
        """[B, T, D] states, every text on its own."""
        embedded = readout.embed(batch.tokens).to(batch.last_hidden.dtype)
        return model(embedded, batch.positions, CausalAttention(spans(batch.documents)))

    def _supervised(self, batch: Batch) -> Tensor:
        """[B, T] bool: the token after each row is supervised and of the same text."""
        same = shift(batch.documents, 1, fill=-2) == batch.documents
        return same & shift(batch.loss_mask, 1) & (batch.documents >= 0)

    def _prefixes(self, hit: Tensor, supervised: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """[K] hits and [] count of chains that start at each row and stay within its answer."""
        alive = torch.ones_like(hit)
        countable = torch.ones_like(hit)
        prefixes = []
        for step in range(self.num_drafts):
            alive = alive & shift(hit, step)
            countable = countable & shift(supervised, step)
            countable = countable & (shift(batch.documents, step, fill=-2) == batch.documents)
            prefixes.append(alive)
        hits = torch.stack([(prefix & countable).sum() for prefix in prefixes])
        return hits.float(), countable.sum().float()


class CausalAttention:
    """Every text of a packed batch attends to itself, causally.

    Args:
        texts: where they lie.
    """

    def __init__(self, texts: Spans) -> None:
        self._texts = texts

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, T, C] queries, [B, Hkv, T, C] keys and values, to [B, H, T, C]."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return by_text(
            self._texts,
            q,
            lambda row, here: F.scaled_dot_product_attention(
                q[row, None, :, here], k[row, None, :, here], v[row, None, :, here], is_causal=True
            )[0],
        )
