"""Distilling a draft language model: what counts, what it is compared with, what packing keeps."""

from __future__ import annotations

import pytest
import torch

from slipstream.data.batches import collate
from slipstream.data.store import Sample
from slipstream.models.language import Language, LanguageConfig
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.distil import CausalAttention, Distil
from slipstream.train.objectives.documents import spans

V, D, U = 31, 12, 19


def network(seed: int = 0):
    torch.manual_seed(seed)
    model = Language(LanguageConfig(D, 16, 2, 4, 2, 6, V, U)).double()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0, 0.3)
    vocabulary = DraftVocabulary(torch.randperm(V)[:U].sort().values, V)
    matrices = torch.randn(2, V, D, dtype=torch.float64)
    return model, vocabulary, Readout(*matrices)


def sample(length: int, seed: int = 0, supervised_from: int = 3) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, V, (length,), generator=generator)
    hidden = torch.randn(length, D, generator=generator, dtype=torch.float64)
    best = torch.randint(0, V, (length,), generator=generator)
    return Sample(
        tokens, torch.arange(length) >= supervised_from, best, torch.zeros(length, 0), hidden
    )


def batch_of(*rows):
    return collate(rows, max_length=64, dtype=torch.float64)


def by_hand(model, vocabulary, readout, text):
    """Loss and hits of one text, a position at a time."""
    causal = torch.ones(len(text), len(text)).tril().bool()

    def attend(q, k, v):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~causal, -1e30)
        return scores.softmax(-1) @ v

    states = model(readout.embed(text.tokens)[None], torch.arange(len(text))[None], attend)[0]
    log_q = model.logits(states).log_softmax(-1)
    losses, hits = [], {}
    for t in range(len(text) - 1):
        if not text.loss_mask[t + 1]:
            continue
        best = int(text.best[t])
        hits[t] = best == int(vocabulary.target_ids[log_q[t].argmax()])
        if best in vocabulary.target_ids:
            p = (readout.head[vocabulary.target_ids] @ text.last_hidden[t]).softmax(-1)
            losses.append(-(p * log_q[t]).sum())
    return torch.stack(losses), hits


def test_the_loss_is_the_targets_cross_entropy_where_it_counts():
    model, vocabulary, readout = network()
    text = sample(17)
    losses, hits = by_hand(model, vocabulary, readout, text)
    loss = Distil(vocabulary, num_drafts=2)(model, batch_of([text]), readout)
    assert float(loss.total.detach()) == pytest.approx(float(losses.mean().detach()), abs=1e-6)
    assert int(loss.num_supervised) == len(losses) < len(hits)
    starts = [t for t in hits if t + 1 in hits]
    assert int(loss.prefix_count) == len(starts)
    expected = [sum(hits[t] for t in starts), sum(hits[t] and hits[t + 1] for t in starts)]
    assert loss.prefix_hits.tolist() == expected


def test_packed_texts_do_not_see_each_other():
    model, vocabulary, readout = network()
    objective = Distil(vocabulary, num_drafts=3)
    first, second = sample(9, 1), sample(12, 2)
    alone = [objective(model, batch_of([s]), readout) for s in (first, second)]
    weights = [float(loss.num_supervised) for loss in alone]
    expected = sum(w * float(a.total.detach()) for w, a in zip(weights, alone, strict=True))
    for batch in (batch_of([first, second]), batch_of([first], [second])):
        together = objective(model, batch, readout)
        assert torch.equal(together.prefix_hits, alone[0].prefix_hits + alone[1].prefix_hits)
        assert torch.equal(together.prefix_count, alone[0].prefix_count + alone[1].prefix_count)
        assert float(together.total.detach()) == pytest.approx(expected / sum(weights), abs=1e-6)


def test_attention_is_causal_within_a_text():
    torch.manual_seed(0)
    attend = CausalAttention(spans(torch.tensor([[0, 0, 0, 1, 1, -1]])))
    q = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 6, 6, dtype=torch.float64)
    before = attend(q, k, v)
    assert bool((before[:, :, 5] == 0).all())
    k[:, :, 2], v[:, :, 2] = 9, 9  # the last position of the first text
    after = attend(q, k, v)
    kept = [0, 1, 3, 4]
    assert torch.equal(before[:, :, kept], after[:, :, kept])
    assert not torch.equal(before[:, :, 2], after[:, :, 2])


def test_a_text_without_answer_gives_no_loss_and_no_gradient_of_nan():
    model, vocabulary, readout = network()
    loss = Distil(vocabulary)(model, batch_of([sample(8, supervised_from=8)]), readout)
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and float(loss.prefix_count) == 0
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
