"""EAGLE-1's objective against a plain twin, and against what drafting accepts."""

import pytest
import torch
from torch.nn import functional as F

from fakes import growth
from pairs import D, U, V, batch_of, network, sample
from slipstream.data.batches import Batch
from slipstream.data.store import Sample
from slipstream.drafters.eagle import FeatureEagleDrafter
from slipstream.formats.checkpoint import EagleCheckpoint
from slipstream.sampling import Sampler
from slipstream.target.protocol import TargetSpec
from slipstream.train.objectives.feature import FeatureRegression, noisy
from slipstream.types import Sampling


def predict(model, readout, text):
    """[T, D] teacher-forced predictions of one text, written out: one dense softmax a head."""
    layer, size = model.layers[0], len(text)
    nexts = torch.cat([text.tokens[1:], text.tokens[:1]])
    x = model.fc(torch.cat([readout.embedding[nexts], text.last_hidden], -1))

    def attend(q, k, v):
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 6**0.5
        below = torch.ones(size, size).tril().bool()
        return scores.masked_fill(~below, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)

    x = x[None] + layer.self_attn(x[None], torch.arange(size)[None], model.frequencies, attend)
    return (x + layer.mlp(layer.post_attention_layernorm(x)))[0]


def twin(model, vocabulary, readout, texts, token_weight):
    """The loss, row by row."""
    regressions, tokens = [], []
    ids = vocabulary.target_ids
    for text in texts:
        predicted = predict(model, readout, text)
        for row in range(len(text) - 2):
            if not text.loss_mask[row + 2]:
                continue
            regressions.append(F.smooth_l1_loss(predicted[row], text.last_hidden[row + 1]))
            if int(text.best[row + 1]) in ids.tolist():
                p = (readout.head @ text.last_hidden[row + 1])[ids].softmax(-1)
                log_q = (readout.head @ predicted[row])[ids].log_softmax(-1)
                tokens.append(-(p * log_q).sum())
    return torch.stack(regressions).mean() + token_weight * torch.stack(tokens).mean()


@pytest.mark.parametrize("pack", [lambda a, b: batch_of([a, b]), lambda a, b: batch_of([a], [b])])
def test_loss_and_gradients_equal_the_plain_twin(pack):
    model, vocabulary, readout = network()
    texts = (sample(9, 1), sample(13, 2, supervised_from=5))
    loss = FeatureRegression(vocabulary, token_weight=0.1)(model, pack(*texts), readout)
    expected = twin(model, vocabulary, readout, texts, 0.1)
    assert float(loss.total.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(loss.total, parameters)
    theirs = torch.autograd.grad(expected, parameters)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
    assert int(loss.num_supervised) == 7 + 8


def test_padding_changes_nothing():
    model, vocabulary, readout = network()
    objective = FeatureRegression(vocabulary)
    batch = batch_of([sample(14)])
    names = [name for name in Batch.__slots__ if name != "number"]
    padded = Batch(*(
        F.pad(
            getattr(batch, name),
            (0, 0, 0, 20) if getattr(batch, name).dim() == 3 else (0, 20),
            value=-1 if name == "documents" else 0,
        )
        for name in names
    ))  # fmt: skip
    for mode in (True, False):
        model.train(mode)
        objective.noise = 0.0
        losses = [objective(model, one, readout) for one in (batch, padded)]
        assert float(losses[0].total) == pytest.approx(float(losses[1].total), abs=1e-9)
        assert torch.equal(losses[0].prefix_hits, losses[1].prefix_hits)


def test_noise_is_bounded_keyed_by_the_batch_and_absent_from_evaluation():
    model, vocabulary, readout = network()
    short, long = sample(8, 1), sample(32, 2)
    batch = batch_of([short, long], number=3)
    added = noisy(batch, 0.1) - batch.last_hidden
    for here, length in ((added[0, :8], 8), (added[0, 8:], 32)):
        largest = 0.1 * 512 / length
        assert 0.9 * largest < float(here.abs().max()) <= largest
    assert torch.equal(noisy(batch, 0.1), noisy(batch, 0.1))
    other = noisy(batch_of([short, long], number=4), 0.1)
    assert not torch.equal(noisy(batch, 0.1), other)
    losses = [
        float(FeatureRegression(vocabulary, noise=noise)(model.train(mode), batch, readout).total)
        for mode, noise in ((False, 0.1), (False, 0.0), (True, 0.0), (True, 0.1))
    ]
    assert losses[0] == losses[1] == losses[2] != losses[3]


def test_what_follows_the_last_supervised_token_is_not_trained():
    model, vocabulary, readout = network()
    one = sample(10)
    hidden, best = one.last_hidden.clone(), one.best.clone()
    hidden[-1], best[-1] = 99.0, 0
    other = Sample(one.tokens, one.loss_mask, best, one.features, hidden)
    objective = FeatureRegression(vocabulary)
    totals = [objective(model, batch_of([s]), readout).total for s in (one, other)]
    assert torch.equal(*totals)


def test_a_batch_without_supervised_rows_is_zero():
    model, vocabulary, readout = network()
    loss = FeatureRegression(vocabulary)(model, batch_of([sample(6, supervised_from=9)]), readout)
    loss.total.backward()
    assert float(loss.total) == 0 and int(loss.num_supervised) == 0


class BareTarget:
    """Just enough of a target to fit a drafter to."""

    def __init__(self, readout):
        self._readout = readout
        self.spec = TargetSpec(
            "tiny", V, D, 4, 256, (), torch.float64, torch.device("cpu"), "Tiny"
        )  # fmt: skip

    def embedding(self):
        return self._readout.embedding

    def head(self):
        return self._readout.head


class OneRow:
    def __init__(self, tokens, key):
        self.key, self.tokens, self.max_depth, self.max_nodes = key, list(tokens), 5, 60
        self.sampler = Sampler(Sampling(), V)


def draft(drafter, text, start):
    """The chain after root x[start + 1], from features up to `start`."""
    row = OneRow(text.tokens[: start + 2].tolist(), start)
    drafter.open(row, text.last_hidden[: start + 1])
    tree = drafter.propose([row])[0]
    drafter.close(row)
    return tree


def test_a_chain_of_one_is_the_teacher_forced_prediction():
    model, vocabulary, readout = network()
    drafter = FeatureEagleDrafter.from_model(
        EagleCheckpoint(model, vocabulary),
        BareTarget(readout),
        growth(tree="chain", depth=1, budget=1),
    )
    assert drafter.taps == (4,)
    text = sample(12)
    predicted = predict(model, readout, text)
    for start in range(1, 10):
        tree = draft(drafter, text, start)
        log_q = (readout.head @ predicted[start])[vocabulary.target_ids].log_softmax(-1)
        best = int(log_q.argmax())
        assert int(tree.tokens[1]) == int(vocabulary.target_ids[best])
        assert float(tree.log_probs[1]) == pytest.approx(float(log_q[best]), abs=1e-5)


def test_prefix_accuracy_is_what_chain_drafting_accepts():
    model, vocabulary, readout = network(scale=0.8)
    depth = 3
    drafter = FeatureEagleDrafter.from_model(
        EagleCheckpoint(model, vocabulary),
        BareTarget(readout),
        growth(tree="chain", depth=depth, budget=3),
    )
    text = sample(40, supervised_from=0)
    tokens = text.tokens.clone()
    for start in range(1, len(text) - depth - 1):  # let the text follow the drafter for a while
        agree = start % (depth + 1)
        tree = draft(drafter, Sample(tokens, *_rest(text)), start)
        tokens[start + 2 : start + 2 + agree] = tree.tokens[1 : 1 + agree]
    best = torch.cat([tokens[1:], tokens[:1]])
    text = Sample(tokens, text.loss_mask, best, text.features, text.last_hidden)
    loss = FeatureRegression(vocabulary, num_measured=depth)(model, batch_of([text]), readout)
    hits = torch.zeros(depth)
    for start in range(len(text) - depth - 1):
        drafted = draft(drafter, text, start).tokens[1:]
        same = (drafted == tokens[start + 2 : start + 2 + depth]).long().cumprod(0)
        hits += same
    assert torch.equal(loss.prefix_hits, hits)
    assert float(loss.prefix_count) == len(text) - depth - 1
    assert 0 < float(hits[-1]) < float(hits[0]), "the comparison must meet several lengths"


def _rest(text):
    return text.loss_mask, text.best, text.features, text.last_hidden


def test_training_reports_the_first_token_and_evaluation_the_chain():
    model, vocabulary, readout = network()
    objective = FeatureRegression(vocabulary, noise=0.0, num_measured=3)
    batch = batch_of([sample(20)])
    evaluated, trained = objective(model, batch, readout), objective(model.train(), batch, readout)
    assert len(trained.prefix_hits) == 1 and len(evaluated.prefix_hits) == 3
    assert float(trained.prefix_count) == 18 and float(evaluated.prefix_count) == 16


def test_one_batch_can_be_overfitted():
    model, vocabulary, readout = network()
    text = sample(16)
    tokens = vocabulary.target_ids[text.tokens % U]
    best = torch.cat([tokens[1:], tokens[:1]])
    hidden = 6 * F.normalize(readout.head[best], dim=-1)
    batch = batch_of([Sample(tokens, text.loss_mask, best, text.features, hidden)])
    objective = FeatureRegression(vocabulary, noise=0.0, num_measured=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(250):
        loss = objective(model.train(), batch, readout)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    loss = objective(model.eval(), batch, readout)
    assert float(loss.prefix_hits[-1] / loss.prefix_count) > 0.8
