"""HASS's objective: which keys a row sees, what is detached, and that it is what drafting meets."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from pairs import U, batch_of, network, sample
from slipstream.train.objectives.feature import FeatureRegression
from slipstream.train.objectives.hass import AlignedAttention, HarmonisedAlignment, weigh
from slipstream.train.objectives.labels import shift
from slipstream.train.objectives.ttt import UnrolledAttention


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_attention_equals_the_dense_mask(steps):
    torch.manual_seed(1)
    length, heads, kv, size = 8, 4, 2, 6
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, -1]])
    attend = AlignedAttention(documents)
    keys, values = [], []
    for last in range(steps):
        q = torch.randn(1, heads, length, size, dtype=torch.float64)
        keys.append(torch.randn(1, kv, length, size, dtype=torch.float64))
        values.append(torch.randn(1, kv, length, size, dtype=torch.float64))
        got = attend(q, keys[-1], values[-1])
        i, j = torch.arange(length)[:, None], torch.arange(length)[None]
        same = documents[0, :, None] == documents[0, None, :]
        masks = [same & (j <= i - last)]
        masks += [same & (j == i - (last - step)) for step in range(1, last + 1)]
        scores = q @ torch.cat(keys, 2).repeat_interleave(2, 1).transpose(-1, -2) / size**0.5
        weights = scores.masked_fill(~torch.cat(masks, 1), float("-inf")).softmax(-1)
        expected = weights @ torch.cat(values, 2).repeat_interleave(2, 1)
        real = documents[0] >= 0
        assert torch.allclose(got[:, :, real], expected[:, :, real], atol=1e-12)


def test_masked_keys_have_no_weight():
    """Not even in the softmax's denominator: their gradient is exactly zero."""
    torch.manual_seed(2)
    attend = AlignedAttention(torch.zeros(1, 6, dtype=torch.int64))
    first, second = (torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(2))
    attend(torch.randn(1, 2, 6, 4), first, torch.randn(1, 2, 6, 4))
    out = attend(torch.randn(1, 2, 6, 4), second, torch.randn(1, 2, 6, 4))
    seen, own = torch.autograd.grad(out[0, :, 3].sum(), (first, second))
    assert (seen[0, :, 3:] == 0).all() and (seen[0, :, :3] != 0).any(-1).all()
    assert (own[0, :, [0, 1, 2, 4, 5]] == 0).all() and (own[0, :, 3] != 0).any()


def spied(model):
    """What `step` was called with and what it returned."""
    seen, original = [], model.step

    def step(states, embedded, positions, attend):
        out = original(states, embedded, positions, attend)
        seen.append((states, embedded, positions, out))
        return out

    model.step = step
    return seen


def test_a_step_reads_the_features_that_the_row_before_predicted():
    model, vocabulary, readout = network()
    batch = batch_of([sample(9, 1), sample(6, 2)])
    seen = spied(model.train())
    HarmonisedAlignment(vocabulary, num_aligned=3, noise=0.0)(model, batch, readout)
    assert len(seen) == 3
    for before, now in pairwise(seen):
        assert not now[0].requires_grad
        expected = before[3].detach().roll(1, 1)
        expected[0, [0, 9]] = batch.last_hidden[0, [0, 9]]  # a text's first row keeps its own
        assert torch.equal(now[0], expected)
    assert all(torch.equal(call[1], seen[0][1]) for call in seen)
    assert all(torch.equal(call[2], batch.positions) for call in seen)


@pytest.mark.parametrize("num_aligned", [2, 3, 4])
def test_the_last_step_sees_what_a_drafted_chain_sees(num_aligned):
    """Row i at step s is a chain started s rows before, fed the text's own tokens."""
    model, vocabulary, readout = network()
    batch = batch_of([sample(12)])
    seen = spied(model)
    HarmonisedAlignment(vocabulary, num_aligned=num_aligned, num_measured=1)(model, batch, readout)
    aligned = [call[3] for call in seen[:num_aligned]]
    attend, states = UnrolledAttention(batch.documents), batch.last_hidden
    for step in range(num_aligned):
        embedded = readout.embed(shift(batch.tokens, 1 + step))
        states = model.step(states, embedded, batch.positions + step, attend)
        valid = 12 - step - 1
        assert torch.allclose(aligned[step][0, step : step + valid], states[0, :valid], atol=1e-9)


def test_one_step_is_eagles_loss_and_the_topk_term():
    model, vocabulary, readout = network()
    batch = batch_of([sample(15)])
    ours = HarmonisedAlignment(vocabulary, num_aligned=1, topk=4, topk_weight=0.7)
    eagles = FeatureRegression(vocabulary)(model, batch, readout)
    seen = spied(model)
    loss = ours(model, batch, readout)
    ids, predicted = vocabulary.target_ids, seen[0][3][0]
    terms = []
    for row in range(13):
        if batch.loss_mask[0, row + 2] and int(batch.best[0, row + 1]) in ids.tolist():
            p = (readout.head @ batch.last_hidden[0, row + 1])[ids].softmax(-1)
            log_q = (readout.head @ predicted[row])[ids].log_softmax(-1)
            best = p.topk(4).indices
            terms.append(-(p[best] * log_q[best]).sum())
    expected = eagles.total + 0.7 * torch.stack(terms).mean()
    assert float(loss.total.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    assert torch.equal(loss.prefix_hits, eagles.prefix_hits)


def test_weights_of_the_likeliest_tokens():
    probs = torch.tensor([[0.5, 0.1, 0.3, 0.1]])
    wanted = weigh(probs, 0.1, 2, 1.0)
    assert torch.allclose(wanted, torch.tensor([[0.55, 0.01, 0.33, 0.01]]))
    assert torch.allclose(weigh(probs, 0.1, 99, 1.0), 1.1 * probs)


def test_packed_texts_do_not_see_each_other():
    model, vocabulary, readout = network()
    objective = HarmonisedAlignment(vocabulary, num_aligned=3)
    first, second = sample(9, 1), sample(12, 2)
    alone = [objective(model, batch_of([s]), readout) for s in (first, second)]
    for packed in (batch_of([first, second]), batch_of([first], [second])):
        loss = objective(model, packed, readout)
        assert torch.equal(loss.prefix_hits, alone[0].prefix_hits + alone[1].prefix_hits)
        counts = torch.stack([one.num_supervised for one in alone]).double()
        parts = torch.stack([one.parts["regression"] for one in alone])
        expected = (counts * parts).sum() / counts.sum()
        assert float(loss.parts["regression"]) == pytest.approx(float(expected), abs=1e-9)


def test_one_batch_can_be_overfitted_with_finite_gradients():
    model, vocabulary, readout = network()
    text = sample(16)
    tokens = vocabulary.target_ids[text.tokens % U]
    best = torch.cat([tokens[1:], tokens[:1]])
    hidden = 6 * F.normalize(readout.head[best], dim=-1)
    batch = batch_of([type(text)(tokens, text.loss_mask, best, text.features, hidden)])
    objective = HarmonisedAlignment(vocabulary, noise=0.0, num_measured=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = objective(model.train(), batch, readout)
        optimizer.zero_grad()
        loss.total.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    loss = objective(model.eval(), batch, readout)
    assert float(loss.prefix_hits[-1] / loss.prefix_count) > 0.8
