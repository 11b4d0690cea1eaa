"""Medusa-1: which head learns what from which hidden state."""

from __future__ import annotations

import pytest
import torch
from test_distil import D, U, V, sample

from slipstream.data.batches import collate
from slipstream.models.medusa import Medusa, MedusaConfig
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.medusa import MedusaHeads


def heads(*, borrows: bool = True):
    torch.manual_seed(0)
    model = Medusa(MedusaConfig(D, 3, 2, V, U, borrows)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    vocabulary = DraftVocabulary(torch.randperm(V)[:U].sort().values, V)
    head = torch.randn(V, D, dtype=torch.float64)
    return model, vocabulary, Readout(head, head)


def batch_of(*rows):
    return collate(rows, max_length=64, dtype=torch.float64)


@pytest.mark.parametrize("borrows", [True, False])
@pytest.mark.parametrize("soft", [True, False])
def test_head_i_reads_row_t_and_learns_what_the_target_says_at_t_plus_1_plus_i(borrows, soft):
    model, vocabulary, readout = heads(borrows=borrows)
    text = sample(15)
    ids = vocabulary.target_ids
    project = (lambda x: x @ readout.head[ids].T) if borrows else None
    log_q = model.logits(text.last_hidden, project).log_softmax(-1)  # [3, T, U]
    draft_ids = vocabulary.draft_ids()
    total = 0.0
    for index in range(3):
        losses = []
        for t in range(len(text) - 2 - index):
            at = t + 1 + index
            choice = int(draft_ids[text.best[at]])
            if not text.loss_mask[at + 1] or choice < 0:
                continue
            p = (readout.head[ids] @ text.last_hidden[at]).softmax(-1)
            if soft:
                losses.append(-(p * log_q[index, t]).sum())
            else:
                losses.append(-log_q[index, t, p.argmax()])
        total = total + 0.8**index * torch.stack(losses).mean()
    loss = MedusaHeads(vocabulary, soft=soft)(model, batch_of([text]), readout)
    expected = float((total / (1 + 0.8 + 0.64)).detach())
    assert float(loss.total.detach()) == pytest.approx(expected, abs=1e-6)


def test_prefix_hits_are_joint_and_count_what_the_vocabulary_lacks_as_misses():
    model, vocabulary, readout = heads()
    text = sample(15)
    ids = vocabulary.target_ids
    said = ids[model.logits(text.last_hidden, lambda x: x @ readout.head[ids].T).argmax(-1)]
    starts = [t for t in range(15 - 4) if all(text.loss_mask[t + 2 : t + 5])]
    hits = [
        sum(all(said[i, t] == text.best[t + 1 + i] for i in range(depth + 1)) for t in starts)
        for depth in range(3)
    ]
    loss = MedusaHeads(vocabulary)(model, batch_of([text]), readout)
    assert int(loss.prefix_count) == len(starts) and loss.prefix_hits.tolist() == hits


def test_packed_texts_do_not_reach_into_each_other():
    model, vocabulary, readout = heads()
    objective = MedusaHeads(vocabulary)
    first, second = sample(9, 1), sample(12, 2)
    alone = [objective(model, batch_of([s]), readout) for s in (first, second)]
    together = objective(model, batch_of([first, second]), readout)
    assert int(together.num_supervised) == sum(int(loss.num_supervised) for loss in alone)
    assert torch.equal(together.prefix_hits, alone[0].prefix_hits + alone[1].prefix_hits)


def test_the_targets_head_is_not_trained():
    model, vocabulary, readout = heads()
    readout.head.requires_grad_(True)
    MedusaHeads(vocabulary)(model, batch_of([sample(9)]), readout).total.backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.any() for p in model.parameters())


def test_a_fresh_head_says_what_the_target_says():
    """Zero blocks: every head starts as the target's own (paper, section 2.1)."""
    model = Medusa(MedusaConfig(D, 3, 2, V, V, True)).double()
    hidden, head = torch.randn(5, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    logits = model.logits(hidden, lambda x: x @ head.T)
    torch.testing.assert_close(logits, (hidden @ head.T).expand(3, 5, V), rtol=1e-12, atol=1e-12)
