"""Block diffusion in training: what a block sees, what it is judged by, and how it is weighted."""

import math

import pytest
import torch

from slipstream.data.batches import Batch, collate
from slipstream.data.store import Sample
from slipstream.formats.checkpoint import DFlashCheckpoint
from slipstream.models.dflash import DFlash, DFlashConfig
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.block_attention import BlockAttention
from slipstream.train.objectives.dflash import BlockDiffusion, Text, block_states
from slipstream.train.recipes.dflash import DSparkSettings, path_objective

V, D, U, K, W = 31, 12, 19, 3, 4
MASK = 30


def network(seed=0, *, is_shifted=False, num_layers=2):
    torch.manual_seed(seed)
    config = DFlashConfig(D, 16, 4, 2, 6, num_layers, V, U, (0, 1, 2), D, W, MASK, is_shifted)
    model = DFlash(config).double()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0, 0.3)
    vocabulary = DraftVocabulary(torch.randperm(V - 1)[:U].sort().values, V)
    embedding = torch.randn(V, D, dtype=torch.float64)
    return model, vocabulary, Readout(embedding, torch.randn(V, D, dtype=torch.float64))


def sample(length, seed=0, supervised_from=2, supervised_to=None):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, V - 1, (length,), generator=generator)
    place = torch.arange(length)
    mask = (place >= supervised_from) & (place < (supervised_to or length))
    best = torch.cat([tokens[1:], tokens[:1]])
    features = torch.randn(length, K * D, generator=generator, dtype=torch.float64)
    hidden = torch.randn(length, D, generator=generator, dtype=torch.float64)
    return Sample(tokens, mask, best, features, hidden)


def batch_of(*rows):
    return collate(rows, max_length=64, dtype=torch.float64)


def states_of(model, batch, anchors, readout):
    text = Text.of(batch)
    fused = model.fuse(batch.features.flatten(0, 1)[None])
    context = model.context(fused, text.positions[None])
    return block_states(model, text, anchors, context, readout, W)


PACKED = [[sample(9, 1), sample(12, 2)], [sample(17, 3)]]
ANCHORS = torch.tensor([3, 5, 7, 12, 14, 24, 30])  # in rows of 21: three texts


@pytest.mark.parametrize("group", [1, 2, 32])
def test_attention_equals_one_dense_mask(group):
    """Against a softmax over all context and all slots of all blocks at once."""
    torch.manual_seed(1)
    batch = batch_of(*PACKED)
    number, num_slots = Text.of(batch).number, len(ANCHORS) * W
    heads, kv, size = 4, 2, 6
    context = [tuple(torch.randn(1, kv, len(number), size, dtype=torch.float64) for _ in "kv")]
    q = torch.randn(1, heads, num_slots, size, dtype=torch.float64)
    k, v = (torch.randn(1, kv, num_slots, size, dtype=torch.float64) for _ in "kv")
    got = BlockAttention(context, number, ANCHORS, W, group=group)(q, k, v)
    anchor = ANCHORS.repeat_interleave(W)[:, None]
    place = torch.arange(len(number))
    sees_text = (place < anchor) & (number == number[anchor])
    block = torch.arange(num_slots) // W
    mask = torch.cat([sees_text, block[:, None] == block], 1)
    keys = torch.cat([context[0][0], k], 2).repeat_interleave(2, 1)
    values = torch.cat([context[0][1], v], 2).repeat_interleave(2, 1)
    scores = (q @ keys.transpose(-1, -2) / size**0.5).masked_fill(~mask, float("-inf"))
    assert torch.allclose(got, scores.softmax(-1) @ values, atol=1e-12)


@pytest.mark.parametrize("is_shifted", [False, True])
@pytest.mark.parametrize("block", range(len(ANCHORS)))
def test_a_block_hears_nothing_but_its_past_and_itself(block, is_shifted):
    """Exactly zero gradient to features at or after the anchor, and to every other block."""
    model, _, readout = network(is_shifted=is_shifted)
    batch = batch_of(*PACKED)
    features = batch.features.clone().requires_grad_()
    text = Text.of(batch)
    embedded = readout.embed(model.block(text.tokens[ANCHORS], W)).view(1, -1, D).requires_grad_()
    context = model.context(model.fuse(features.flatten(0, 1)[None]), text.positions[None])
    positions = (text.positions[ANCHORS][:, None] + torch.arange(W)).view(1, -1)
    attend = BlockAttention(context, text.number, ANCHORS, W)
    states = model.denoise(embedded, positions, attend).view(len(ANCHORS), W, D)
    model.read_out(states[block : block + 1]).square().sum().backward()
    anchor, place = int(ANCHORS[block]), torch.arange(len(text.number))
    past = (place < anchor) & (text.number == text.number[anchor])
    heard = features.grad.flatten(0, 1).abs().sum(1)
    assert torch.equal(heard > 0, past)
    own = torch.arange(len(ANCHORS) * W) // W == block
    assert torch.equal(embedded.grad[0].abs().sum(1) > 0, own)


def test_a_block_among_many_is_the_block_alone():
    model, _, readout = network()
    together = states_of(model, batch_of(*PACKED), ANCHORS, readout)
    text = PACKED[0][1]  # begins at flat position 9
    alone = states_of(model, batch_of([text]), torch.tensor([3, 5]), readout)
    assert torch.allclose(alone, together[3:5], atol=1e-12)


def test_an_anchor_has_a_past_and_a_supervised_successor():
    text = Text.of(batch_of([sample(6, 1, supervised_from=0), sample(7, 2, 3, 6)]))
    assert text.valid.nonzero()[:, 0].tolist() == [1, 2, 3, 4, 6 + 3, 6 + 4]


def plain_loss(model, vocabulary, batch, readout, objective):
    """The same loss, one block at a time with a dense softmax; hits as well."""
    text = Text.of(batch)
    count = max(1, round(objective.density * batch.num_tokens / W))
    generator = torch.Generator().manual_seed(0)
    torch.rand((), generator=generator)
    anchors = objective._anchors(text, count, generator)
    best, hidden = batch.best.flatten(), batch.last_hidden.flatten(0, 1)
    head, ids = readout.head[vocabulary.target_ids], vocabulary.draft_ids()
    losses, weights, hits = [], [], []
    for anchor in anchors.tolist():
        states = states_of(model, batch, torch.tensor([anchor]), readout)[0]
        alive, whole = [], True
        for slot, state in enumerate(states):
            at = anchor + slot
            in_text = at + 1 < len(best) and text.number[at + 1] == text.number[anchor]
            if not (in_text and text.supervised[at + 1]):
                whole = False
                continue
            logits, choice = head @ state, int(ids[best[at]])
            alive.append(choice >= 0 and int(logits.argmax()) == choice)
            if choice < 0:
                continue
            p = (head @ hidden[at]).softmax(-1) * (1 - objective.hard)
            p[choice] += objective.hard
            losses.append(-(p * logits.log_softmax(-1)).sum())
            weights.append(math.exp(-slot / objective.gamma))
        if whole:
            hits.append([all(alive[: i + 1]) for i in range(len(alive))])
    weights = torch.tensor(weights, dtype=torch.float64)
    return (torch.stack(losses) * weights).sum() / weights.sum(), torch.tensor(hits).sum(0)


@pytest.mark.parametrize("is_shifted", [False, True])
@pytest.mark.parametrize("hard", [0.0, 0.25, 1.0])
def test_loss_is_the_plain_one(hard, is_shifted):
    model, vocabulary, readout = network(is_shifted=is_shifted)
    objective = BlockDiffusion(vocabulary, gamma=2.0, hard=hard, density=2.0)
    batch = batch_of(*PACKED)
    loss = objective(model, batch, readout)
    expected, hits = plain_loss(model, vocabulary, batch, readout, objective)
    assert float(loss.total.detach()) == pytest.approx(float(expected), abs=1e-6)
    assert loss.prefix_hits.tolist() == hits.tolist()
    assert len(loss.prefix_hits) == (W if is_shifted else W - 1)


def test_padding_changes_nothing():
    model, vocabulary, readout = network()
    objective = BlockDiffusion(vocabulary)
    found = []
    for padding in (0, 7, 40):
        batch = batch_of([sample(14)])
        padded = Batch(*(
            torch.nn.functional.pad(
                getattr(batch, name),
                (0, 0, 0, padding) if getattr(batch, name).dim() == 3 else (0, padding),
                value=-1 if name == "documents" else 0,
            )
            for name in Batch.__slots__[:-1]
        ))  # fmt: skip
        model.zero_grad()
        loss = objective(model, padded, readout)
        loss.total.backward()
        found.append((float(loss.total.detach()), model.fc.weight.grad.clone()))
    for total, gradient in found[1:]:
        assert total == pytest.approx(found[0][0], abs=1e-6)
        assert torch.allclose(gradient, found[0][1], atol=1e-6)


def test_anchors_are_a_function_of_the_batch_and_its_number():
    model, vocabulary, readout = network()
    batch, later = (collate([[sample(30)]], max_length=64, dtype=torch.float64, number=n)
                    for n in (0, 1))  # fmt: skip
    objective, twin = BlockDiffusion(vocabulary, seed=5), BlockDiffusion(vocabulary, seed=5)
    calls = ((objective, batch), (objective, later), (objective, batch), (twin, batch))
    totals = [run(model, it, readout).total for run, it in calls]
    assert totals[0] == totals[2] == totals[3] != totals[1]
    other = BlockDiffusion(vocabulary, seed=6)(model, batch, readout)
    assert other.total != totals[0]


def test_pace_weighs_by_what_hangs_on_a_slot():
    objective = BlockDiffusion(DraftVocabulary.full(3), weighting="pace")
    at = torch.tensor([[3, 4, 5]])

    class Labels:
        head = torch.eye(3)

        @staticmethod
        def choice_at(places):
            return torch.zeros_like(places)

    sure = torch.tensor([[60.0, 0.0, 0.0]] * 3)  # q = 1 at every slot: s = 1
    everywhere = torch.ones(1, 3, dtype=torch.bool)
    assert objective._pace(sure, everywhere, Labels, at).tolist() == [[3.0, 2.0, 1.0]]
    hopeless = torch.tensor([[-60.0, 0.0, 0.0]] * 3)  # q = 0: s = 1/2
    assert objective._pace(hopeless, everywhere, Labels, at).tolist() == [[0.875, 0.375, 0.125]]


def test_later_rounds_start_where_the_drafter_stops():
    model, vocabulary, readout = network()
    objective = BlockDiffusion(vocabulary, rounds=2, density=1.5)
    batch, seen = batch_of(*PACKED), []
    original = objective._judge

    def spy(states, text, anchors, labels):
        outcome = original(states, text, anchors, labels)
        seen.append((anchors, outcome.hits.sum(1)))
        return outcome

    objective._judge = spy
    objective(model, batch, readout)
    (first, reach), (second, _) = seen
    text = Text.of(batch)
    stops = {int(a) + int(r) + 1 for a, r in zip(first, reach, strict=True)}
    assert set(second.tolist()) == {s for s in stops if s < len(text.valid) and text.valid[s]}


@pytest.mark.parametrize("is_shifted", [False, True])
def test_narrow_blocks_are_for_training_only(is_shifted):
    model, vocabulary, readout = network(is_shifted=is_shifted)
    objective, widest = BlockDiffusion(vocabulary, narrow=0.7), (3, 4)[is_shifted]
    judge, drafts = objective._judge, []

    def spy(states, *more):
        drafts.append(states.shape[1])
        return judge(states, *more)

    objective._judge = spy
    for number in range(16):
        batch = collate([[sample(30)]], max_length=64, dtype=torch.float64, number=number)
        assert objective(model.eval(), batch, readout).prefix_count and drafts.pop() == widest
        loss = objective(model.train(), batch, readout)
        assert len(loss.prefix_hits) == widest  # one length, or batches could not be added
        assert bool(loss.prefix_count) == (drafts[-1] == widest)
        assert bool(loss.prefix_count) or not loss.prefix_hits.any()
    assert set(drafts) == ({1, 2, 3, 4} if is_shifted else {1, 2, 3})


@pytest.mark.parametrize("is_shifted", [False, True])
def test_one_batch_can_be_overfitted(is_shifted):
    model, vocabulary, readout = network(is_shifted=is_shifted)
    objective = BlockDiffusion(vocabulary, density=4.0, hard=1.0)
    text = sample(24)
    tokens = vocabulary.target_ids[text.tokens % U]
    best = torch.cat([tokens[1:], tokens[:1]])
    hidden = 40 * torch.nn.functional.normalize(readout.head[best], dim=-1)
    batch = batch_of([Sample(tokens, text.loss_mask, best, text.features, hidden)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = objective(model, batch, readout)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    assert float((loss.prefix_hits / loss.prefix_count)[-1]) > 0.9


def test_a_path_head_learns_on_a_network_that_stays():
    """Fresh it changes nothing; trained alone it tells what follows which token."""
    model, vocabulary, readout = network()
    objective = BlockDiffusion(vocabulary, density=4.0, hard=1.0, only_path=True)
    text = sample(24)
    tokens = vocabulary.target_ids[(3 * torch.arange(24)) % 5]  # each token has one successor
    best = torch.cat([tokens[1:], tokens[:1]])
    batch = batch_of([Sample(tokens, text.loss_mask, best, text.features, text.last_hidden)])
    without = objective(model, batch, readout).total
    model.add_path(6)
    model.double()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert torch.equal(objective(model, batch, readout).total, without)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(60):
        loss = objective(model, batch, readout)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    assert float((loss.prefix_hits / loss.prefix_count)[-1]) > 0.9
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]) != name.startswith("path"), name


def test_a_network_that_stays_asks_for_no_gradients():
    """Other processes would wait for them at the second step."""
    model, vocabulary, _ = network()
    settings = DSparkSettings(only_path=True, path_rank=6)
    path_objective(DFlashCheckpoint(model, vocabulary), settings)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == {f"path.{name}.weight" for name in ("read", "down", "up")}


def test_a_batch_without_supervision_gives_zero():
    model, vocabulary, readout = network()
    batch = batch_of([sample(8, supervised_from=8)])
    loss = BlockDiffusion(vocabulary)(model, batch, readout)
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and int(loss.num_supervised) == 0
    assert loss.prefix_hits.tolist() == [0.0] * (W - 1) and not loss.prefix_count
