"""The EAGLE-3 drafter: parity with training, exact cache, any tree."""

import pytest
import torch
from torch import Tensor

from fakes import growth
from slipstream.data.batches import collate
from slipstream.data.store import Sample
from slipstream.drafters.eagle import EagleDrafter
from slipstream.formats.checkpoint import Eagle3Checkpoint
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.sampling import Sampler
from slipstream.train.objectives.ttt import TrainingTimeTest
from slipstream.types import Sampling, Verdict

V, D, U = 97, 48, 61


def network(seed: int = 0, taps=(1, 2, 3), vocabulary: DraftVocabulary | None = None):
    generator = torch.Generator().manual_seed(seed)
    config = Eagle3Config(D, 64, 6, 2, 16, V, U, taps, D, 1e-5, 10000.0)
    model = Eagle3(config).double()
    for parameter in model.parameters():
        with torch.no_grad():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.2, generator=generator)
    ids = torch.randperm(V, generator=generator)[:U].sort().values
    return Eagle3Checkpoint(model.eval(), vocabulary or DraftVocabulary(ids, V))


class OneRow:
    def __init__(self, tokens, key=0, max_depth=5, max_nodes=60):
        self.key, self.tokens = key, list(tokens)
        self.max_depth, self.max_nodes = max_depth, max_nodes
        self.sampler = Sampler(Sampling(), V)


class BareTarget:
    """Just enough of a target to fit a drafter to."""

    def __init__(self, embedding: Tensor):
        from slipstream.target.protocol import TargetSpec

        self._embedding = embedding
        self.spec = TargetSpec(
            "tiny", V, D, 4, 256, (), embedding.dtype, torch.device("cpu"), "Tiny"
        )

    def embedding(self) -> Tensor:
        return self._embedding


def setup(seed=0, **tree):
    generator = torch.Generator().manual_seed(seed + 100)
    embedding = torch.randn(V, D, generator=generator, dtype=torch.float64)
    checkpoint = network(seed)
    drafter = EagleDrafter.from_model(checkpoint, BareTarget(embedding), growth(**tree))
    return drafter, checkpoint, embedding, generator


def text(generator, length=24):
    tokens = torch.randint(0, V, (length,), generator=generator)
    features = torch.randn(length, 3 * D, generator=generator, dtype=torch.float64)
    last_hidden = torch.randn(length, D, generator=generator, dtype=torch.float64)
    return tokens, features, last_hidden


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_training_accuracy_is_what_chain_drafting_accepts(depth):
    """The joint prefix accuracy of training equals chain drafting from the same position."""
    drafter, checkpoint, embedding, generator = setup(tree="chain", depth=depth, budget=depth)
    tokens, features, last_hidden = text(generator)
    # A text whose every token is the drafter's own greedy choice after some position would be
    # trivial; instead let half of the tokens follow the drafter, so that lengths vary.
    best = torch.cat([tokens[1:], tokens[:1]])
    objective = TrainingTimeTest(checkpoint.vocabulary, num_unrolled=depth)
    readout = Readout(embedding, embedding)
    for start in range(6, len(tokens) - depth - 1):
        row = OneRow(tokens[: start + 2], key=start)
        drafter.open(row, features[: start + 1])
        tree = drafter.propose([row])[0]
        drafter.close(row)
        if start % 3:  # make the text agree with the draft for a varying stretch
            agree = start % (depth + 1)
            tokens[start + 2 : start + 2 + agree] = tree.tokens[1 : 1 + agree]
    best = torch.cat([tokens[1:], tokens[:1]])
    sample = Sample(tokens, torch.ones_like(tokens, dtype=torch.bool), best, features, last_hidden)
    batch = collate([[sample]], max_length=64, dtype=torch.float64)
    lengths = objective.accepted(checkpoint.model, batch, readout)[0]
    seen = set()
    for start in range(len(tokens) - depth - 1):
        row = OneRow(tokens[: start + 2], key=start)
        drafter.open(row, features[: start + 1])
        tree = drafter.propose([row])[0]
        drafter.close(row)
        drafted = tree.tokens[1:].tolist()
        wanted = tokens[start + 2 : start + 2 + depth].tolist()
        accepted = 0
        while accepted < depth and drafted[accepted] == wanted[accepted]:
            accepted += 1
        assert accepted == int(lengths[start]), start
        seen.add(accepted)
    assert len(seen) > 1, "the comparison must meet more than one length"
    assert (lengths[len(tokens) - depth - 1 :] == -1).all()


def test_later_levels_use_the_drafters_own_states():
    """Log-probabilities of a drafted chain equal the unrolled training logits."""
    drafter, checkpoint, embedding, generator = setup(tree="chain", depth=3, budget=3)
    tokens, features, _ = text(generator, 12)
    row = OneRow(tokens[:8])
    drafter.open(row, features[:7])
    tree = drafter.propose([row])[0]
    from slipstream.train.objectives.ttt import UnrolledAttention

    model = checkpoint.model
    full = torch.cat([tokens[:8], tree.tokens[1:]])
    attend = UnrolledAttention(torch.zeros(1, 7, dtype=torch.int64))
    states = model.fuse(features[None, :7])
    for step in range(3):
        nexts = full[1 + step : 8 + step]
        states = model.step(states, embedding[nexts][None], torch.arange(7)[None] + step, attend)
        log_probs = model.logits(states[0, -1]).log_softmax(-1)
        chosen = int(log_probs.argmax())
        assert int(checkpoint.vocabulary.target_ids[chosen]) == int(tree.tokens[step + 1])
        assert float(tree.log_probs[step + 1]) == pytest.approx(
            float(log_probs[chosen].detach()), abs=1e-5
        )


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
def test_incremental_equals_fresh(tree):
    """After any accepted path the next tree equals that of a drafter opened on the whole text."""
    drafter, checkpoint, embedding, generator = setup(tree=tree, depth=4, budget=12, topk=3)
    tokens, features, _ = text(generator, 60)
    row = OneRow(tokens[:9])
    drafter.open(row, features[:8])
    for accepted in (0, 3, 1, 0, 4, 2):
        drafter.propose([row])
        size = len(row.tokens)
        row.tokens = tokens[: size + accepted + 1].tolist()
        verdict = Verdict(tuple(range(accepted + 1)), row.tokens[-1])
        drafter.observe(row, verdict, features[size - 1 : size + accepted])
        fresh = EagleDrafter.from_model(
            checkpoint, BareTarget(embedding), growth(tree=tree, depth=4, budget=12, topk=3)
        )
        fresh.open(row, features[: len(row.tokens) - 1])
        ours, theirs = drafter.propose([row])[0], fresh.propose([row])[0]
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.parents, theirs.parents)
        assert torch.allclose(ours.log_probs, theirs.log_probs, atol=1e-6)


def test_rows_do_not_see_each_other():
    """Rows of different lengths, pending features and room draft as they would alone."""
    drafter, checkpoint, embedding, generator = setup(tree="dynamic", depth=3, budget=9, topk=3)
    rows, expected = [], []
    for key, (length, depth, nodes) in enumerate([(5, 3, 9), (300, 3, 4), (17, 0, 9), (8, 1, 9)]):
        tokens, features, _ = text(generator, length)
        row = OneRow(tokens, key=key, max_depth=depth, max_nodes=nodes)
        drafter.open(row, features[:-1])
        alone = EagleDrafter.from_model(
            checkpoint, BareTarget(embedding), growth(depth=3, budget=9, topk=3)
        )
        alone.open(row, features[:-1])
        expected.append(alone.propose([row])[0])
        rows.append(row)
    for ours, theirs in zip(drafter.propose(rows), expected, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.parents, theirs.parents)
    assert [len(tree) for tree in expected][1:3] == [5, 1]
    for row in rows:
        drafter.close(row)
    rollout = drafter._rollout
    assert not rollout._stems and len(rollout._free) == rollout._cache.num_rows


def test_prompt_chunks_change_nothing(monkeypatch):
    drafter, _, _, generator = setup(tree="dynamic", depth=3, budget=9, topk=3)
    tokens, features, _ = text(generator, 40)
    trees = []
    for chunk in (7, 16, 64):
        monkeypatch.setattr("slipstream.drafters.rollout.CHUNK", chunk)
        row = OneRow(tokens, key=chunk)
        drafter.open(row, features[:-1])
        trees.append(drafter.propose([row])[0])
    assert all(torch.equal(trees[0].tokens, tree.tokens) for tree in trees[1:])
    assert all(torch.allclose(trees[0].log_probs, t.log_probs, atol=1e-6) for t in trees[1:])


def test_refused_branches_leave_no_trace():
    """Keys of refused nodes are not read by the next proposal."""
    drafter, _, _, generator = setup(tree="dynamic", depth=4, budget=12, topk=3)
    tokens, features, _ = text(generator, 30)
    row = OneRow(tokens[:10])
    drafter.open(row, features[:9])
    drafter.propose([row])
    rollout = drafter._rollout
    slot = rollout._stems[row.key].slot
    committed = rollout._cache.lengths[slot]
    assert committed == len(row.tokens) - 1
    first = drafter.propose([row])[0]
    rollout._cache.keys[:, slot, :, committed:] = 1e6
    rollout._cache.values[:, slot, :, committed:] = 1e6
    again = drafter.propose([row])[0]
    assert torch.equal(first.tokens, again.tokens)
    assert torch.allclose(first.log_probs, again.log_probs)


def test_ids_beyond_the_targets_are_never_drafted():
    checkpoint = network(vocabulary=DraftVocabulary(torch.arange(V - U, V), V))
    embedding = torch.randn(V, D, dtype=torch.float64)
    target = BareTarget(embedding)
    target.spec = type(target.spec)(
        "tiny", V - 20, D, 4, 256, (), torch.float64, torch.device("cpu"), "Tiny"
    )
    drafter = EagleDrafter.from_model(checkpoint, target, growth(depth=3, budget=60, topk=8))
    generator = torch.Generator().manual_seed(3)
    tokens, features, _ = text(generator, 20)
    row = OneRow(tokens.clamp(max=V - 21))
    drafter.open(row, features[:-1])
    assert int(drafter.propose([row])[0].tokens.max()) < V - 20
