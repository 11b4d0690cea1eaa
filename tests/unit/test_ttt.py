"""The training-time test: its pattern, its shifts, its loss."""

import pytest
import torch

from slipstream.data.batches import Batch, collate, plan
from slipstream.data.store import Sample
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.ttt import TrainingTimeTest, UnrolledAttention, shift

V, D, U, K = 31, 12, 19, 3


def network(seed=0):
    torch.manual_seed(seed)
    config = Eagle3Config(D, 16, 4, 2, 6, V, U, (0, 1, 2), D)
    model = Eagle3(config).double()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0, 0.3)
    vocabulary = DraftVocabulary(torch.randperm(V)[:U].sort().values, V)
    embedding = torch.randn(V, D, dtype=torch.float64)
    return model, vocabulary, Readout(embedding, torch.randn(V, D, dtype=torch.float64))


def sample(length, seed=0, supervised_from=2):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, V, (length,), generator=generator)
    mask = torch.arange(length) >= supervised_from
    best = torch.cat([tokens[1:], tokens[:1]])
    features = torch.randn(length, K * D, generator=generator, dtype=torch.float64)
    return Sample(
        tokens, mask, best, features,
        torch.randn(length, D, generator=generator, dtype=torch.float64),
    )  # fmt: skip


def batch_of(*rows):
    return collate(rows, max_length=64, dtype=torch.float64)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_attention_equals_the_dense_mask(steps):
    """Keys of step 0 below the diagonal, own keys of later steps: against one dense softmax."""
    torch.manual_seed(1)
    length, heads, kv, size = 7, 4, 2, 6
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, -1]])
    attend = UnrolledAttention(documents)
    keys, values = [], []
    for step in range(steps):
        q = torch.randn(1, heads, length, size, dtype=torch.float64)
        k = torch.randn(1, kv, length, size, dtype=torch.float64)
        v = torch.randn(1, kv, length, size, dtype=torch.float64)
        keys.append(k)
        values.append(v)
        got = attend(q, k, v)
        below = torch.ones(length, length).tril().bool()
        below &= documents[0, :, None] == documents[0, None, :]
        mask = torch.cat([below, *[torch.eye(length).bool()] * step], dim=1)
        every = torch.cat(keys, 2).repeat_interleave(2, 1)
        scores = q @ every.transpose(-1, -2) / size**0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        expected = weights @ torch.cat(values, 2).repeat_interleave(2, 1)
        assert torch.allclose(got[:, :, :-1], expected[:, :, :-1], atol=1e-12)
        assert not got[:, :, -1].any()  # padding


def test_packed_texts_do_not_see_each_other():
    model, vocabulary, readout = network()
    objective = TrainingTimeTest(vocabulary, num_unrolled=3)
    first, second = sample(9, 1), sample(12, 2)
    alone = [objective(model, batch_of([s]), readout) for s in (first, second)]
    packed = objective(model, batch_of([first, second]), readout)
    rows = objective(model, batch_of([first], [second]), readout)
    counts = torch.stack([loss.num_supervised for loss in alone]).double()
    assert int(packed.num_supervised) == int(counts.sum())
    for both in (packed, rows):
        assert torch.equal(both.prefix_hits, alone[0].prefix_hits + alone[1].prefix_hits)
    expected = (counts * torch.stack([loss.parts["loss_1"] for loss in alone])).sum() / counts.sum()
    assert float(packed.parts["loss_1"]) == pytest.approx(float(expected), abs=1e-10)
    assert float(rows.parts["loss_1"]) == pytest.approx(float(expected), abs=1e-10)


def test_padding_changes_nothing():
    """The same row behind 0, 10 and 100 pad tokens: identical loss and gradient (B99)."""
    model, vocabulary, readout = network()
    objective = TrainingTimeTest(vocabulary, num_unrolled=3)
    results = []
    for padding in (0, 10, 100):
        batch = batch_of([sample(14)])
        padded = Batch(*(
            torch.nn.functional.pad(
                getattr(batch, name),
                (0, 0, 0, padding) if getattr(batch, name).dim() == 3 else (0, padding),
                value=-1 if name == "documents" else 0,
            )
            for name in Batch.__slots__
            if name != "number"
        ))  # fmt: skip
        model.zero_grad()
        loss = objective(model, padded, readout)
        loss.total.backward()
        results.append((float(loss.total.detach()), model.fc.weight.grad.clone()))
    for total, gradient in results[1:]:
        assert total == pytest.approx(results[0][0], abs=1e-12)
        assert torch.allclose(gradient, results[0][1], atol=1e-12)


def test_the_last_label_is_not_trained():
    """Nothing depends on what follows the last supervised token (B98)."""
    model, vocabulary, readout = network()
    objective = TrainingTimeTest(vocabulary, num_unrolled=3)
    one = sample(10)
    last_hidden, best = one.last_hidden.clone(), one.best.clone()
    last_hidden[-1], best[-1] = 99.0, 0
    other = Sample(one.tokens, one.loss_mask, best, one.features, last_hidden)
    totals = [objective(model, batch_of([s]), readout).total for s in (one, other)]
    assert torch.equal(*totals)


def test_steps_read_data_tokens_and_own_states():
    """Step k embeds token i+1+k of the text, never the drafter's own guess (B102)."""
    model, vocabulary, readout = network()
    seen = []
    original = model.step

    def spy(states, embedded, positions, attend):
        seen.append((states, embedded, positions))
        return original(states, embedded, positions, attend)

    model.step = spy
    text = sample(11)
    TrainingTimeTest(vocabulary, num_unrolled=3)(model, batch_of([text]), readout)
    for step, (_, embedded, positions) in enumerate(seen):
        valid = len(text) - 1 - step
        expected = readout.embed(text.tokens[1 + step :])
        assert torch.equal(embedded[0, :valid], expected)
        assert torch.equal(positions[0], torch.arange(len(text)) + step)
    assert torch.equal(seen[0][0], model.fuse(text.features)[None])
    assert seen[1][0].shape == seen[0][0].shape and not torch.equal(seen[1][0], seen[0][0])


def test_a_choice_outside_the_vocabulary_is_a_miss_not_a_gap():
    model, vocabulary, readout = network()
    objective = TrainingTimeTest(vocabulary, num_unrolled=1)
    text = sample(12)
    outside = next(i for i in range(V) if i not in vocabulary.target_ids.tolist())
    best = torch.full_like(text.best, outside)
    loss = objective(
        model, batch_of([Sample(text.tokens, text.loss_mask, best, text.features,
                                text.last_hidden)]), readout,
    )  # fmt: skip
    assert float(loss.prefix_count) > 0 and float(loss.prefix_hits[0]) == 0
    assert int(loss.num_supervised) == 0 and float(loss.total.detach()) == 0


def test_one_batch_can_be_overfitted():
    model, vocabulary, readout = network()
    objective = TrainingTimeTest(vocabulary, num_unrolled=3)
    text = sample(16)
    ids = vocabulary.target_ids
    tokens = ids[text.tokens % U]
    best = torch.cat([tokens[1:], tokens[:1]])
    hidden = 40 * torch.nn.functional.normalize(readout.head[best], dim=-1)
    batch = batch_of([Sample(tokens, text.loss_mask, best, text.features, hidden)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = objective(model, batch, readout)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    accuracy = loss.prefix_hits / loss.prefix_count
    assert float(accuracy[-1]) > 0.9
    assert torch.equal(objective.accepted(model, batch, readout)[0, 3:11] >= 2,
                       torch.ones(8, dtype=torch.bool))  # fmt: skip


@pytest.mark.parametrize("num_unrolled", [1, 2, 3, 4])
def test_gradients_are_finite(num_unrolled):
    model, vocabulary, readout = network()
    loss = TrainingTimeTest(vocabulary, num_unrolled=num_unrolled)(
        model, batch_of([sample(9), sample(5, 4)]), readout
    )
    loss.total.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_plan_uses_each_sample_once_and_fits():
    lengths = [5, 9, 3, 30, 8, 8, 2, 16]
    batches = plan(lengths, max_length=16, rows=2, seed=3, epoch=1)
    used = sorted(i for batch in batches for row in batch for i in row)
    assert used == list(range(len(lengths)))
    assert all(sum(min(lengths[i], 16) for i in row) <= 16 for batch in batches for row in batch)
    assert batches == plan(lengths, max_length=16, rows=2, seed=3, epoch=1)
    assert batches != plan(lengths, max_length=16, rows=2, seed=3, epoch=2)


def test_shift_past_the_end_is_all_fill():
    assert shift(torch.ones(1, 3, dtype=torch.int64), 5, fill=-1).tolist() == [[-1, -1, -1]]


def test_an_early_step_is_the_first_alone_and_a_judged_network_unrolls_all():
    """Until `unroll_after` of a training is done; later, and where nothing is trained, all."""
    model, vocabulary, readout = network()
    batch = batch_of([sample(9)], [sample(7, seed=1)])
    whole = TrainingTimeTest(vocabulary, num_unrolled=3)
    first = TrainingTimeTest(vocabulary, num_unrolled=1)
    staged = TrainingTimeTest(vocabulary, num_unrolled=3, unroll_after=0.5)
    assert torch.equal(staged(model, batch, readout).total, whole(model, batch, readout).total)
    staged.advance(0.49)
    early = staged(model.train(), batch, readout)
    assert torch.equal(early.total, first(model, batch, readout).total)
    assert len(early.prefix_hits) == 1
    assert len(staged(model.eval(), batch, readout).prefix_hits) == 3
    staged.advance(0.5)
    assert torch.equal(
        staged(model.train(), batch, readout).total, whole(model, batch, readout).total
    )
