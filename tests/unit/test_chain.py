"""The chain rule on tensors; its law is enumerated in tests/laws/test_law.py."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import ShapeError, VerifierMismatchError
from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Sampling
from slipstream.verify.chain import chain
from slipstream.verify.protocol import GeneratorChance, children, residual, without
from slipstream.verify.walk import walk

V = 6


def drawn_chain(root, tokens, draft_probs):
    n = len(tokens) + 1
    return DraftTree(
        torch.tensor([root, *tokens]),
        torch.arange(-1, n - 1),
        is_drawn=torch.tensor([False] + [True] * (n - 1)),
        draft_probs=draft_probs,
    )


def draw_chain(q, sampler, depth=2):
    """Drafts from the very tensor that the rule will divide by (report B14)."""
    tokens = torch.multinomial(q, depth, replacement=True, generator=sampler.generator("draft"))
    return drawn_chain(0, tokens.tolist(), q.expand(depth + 1, -1))


@pytest.mark.parametrize(("top_p", "critical"), [(1.0, 26.1), (0.7, 16.3)])
def test_joint_law_of_a_step_on_tensors(top_p, critical):
    """Chi-square of the first two emitted tokens, 1,500 steps; false alarm once in 1,000."""
    p_logits = torch.tensor([0.5, 0.3, 0.2]).log()
    q = torch.tensor([0.2, 0.3, 0.5])
    sampler = Sampler(Sampling(temperature=1.0, top_p=top_p, seed=1), 3)
    p = sampler.probs(p_logits.unsqueeze(0))[0]
    more = torch.Generator().manual_seed(9)
    counts = torch.zeros(3, 3)
    for _ in range(1500):
        tree = draw_chain(q, sampler, depth=1)
        kept = chain(tree, p_logits.expand(2, -1), sampler, 0)
        emitted = [int(tree.tokens[node]) for node in kept.path[1:]] + [kept.next_token]
        if len(emitted) < 2:
            emitted.append(int(torch.multinomial(p, 1, generator=more)))
        counts[emitted[0], emitted[1]] += 1
    expected = torch.outer(p, p) * 1500
    possible = expected > 0
    assert float(counts[~possible].sum()) == 0
    assert int(possible.sum()) == {1.0: 9, 0.7: 4}[top_p]
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert statistic < critical


def test_draft_from_the_target_is_always_kept():
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(3))
    sampler = Sampler(Sampling(temperature=0.8, seed=2), V)
    q = sampler.probs(logits)[0]
    for _ in range(200):
        kept = chain(draw_chain(q, sampler, depth=3), logits.expand(4, -1), sampler, 0)
        assert kept.num_accepted == 3 and kept.is_bonus


def test_a_token_outside_the_truncation_is_never_kept():
    logits = torch.tensor([[0.5, 0.3, 0.2, 1e-6, 1e-6, 1e-6]]).log().expand(2, -1)
    sampler = Sampler(Sampling(temperature=1.0, top_k=2), V)
    q = torch.full((2, V), 1 / V)
    for token in (2, 3, 4, 5):
        for _ in range(50):
            kept = chain(drawn_chain(0, [token], q), logits, sampler, 0)
            assert kept.num_accepted == 0 and kept.next_token in (0, 1)


def test_temperature_zero_is_the_longest_match():
    logits = torch.zeros(3, V)
    logits[[0, 1, 2], [1, 2, 3]] = 5.0
    sampler = Sampler(Sampling(), V)
    q = torch.full((3, V), 1 / V)
    for tokens, accepted in (([1, 2], 2), ([1, 5], 1), ([4, 2], 0)):
        for tree in (drawn_chain(0, tokens, q), DraftTree.chain([0, *tokens])):
            kept = chain(tree, logits, sampler, 0)
            assert kept == walk(tree, logits, sampler, 0) and kept.num_accepted == accepted


def test_a_root_alone_draws_from_the_target():
    logits = torch.tensor([[0.0, 50.0, 0.0, 0.0, 0.0, 0.0]])
    kept = chain(DraftTree.chain([0]), logits, Sampler(Sampling(temperature=1.0), V), 0)
    assert kept.path == (0,) and kept.next_token == 1 and not kept.is_bonus


def test_the_same_seed_gives_the_same_verdicts():
    """Report B135: draws come from the request's own generator."""
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(5))
    q = torch.full((V,), 1 / V)

    def run(seed):
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), V)
        torch.rand(7)
        return [chain(draw_chain(q, sampler), logits, sampler, 0) for _ in range(30)]

    assert run(1) == run(1) and run(1) != run(2)


def test_what_does_not_fit_is_refused_by_name():
    sampler, q = Sampler(Sampling(temperature=1.0), V), torch.full((2, V), 1 / V)
    logits = torch.zeros(2, V)
    drawn = torch.tensor([False, True])
    cases = [
        (DraftTree.chain([0, 1]), "chosen"),
        (DraftTree(torch.tensor([0, 1]), torch.tensor([-1, 0]), is_drawn=drawn), "draft_probs"),
        (drawn_chain(0, [1], q.bfloat16()), "bfloat16"),  # report B14
    ]
    for tree, message in cases:
        with pytest.raises(VerifierMismatchError, match=message):
            chain(tree, logits, sampler, 0)
    siblings = DraftTree(
        torch.tensor([0, 1, 2]),
        torch.tensor([-1, 0, 0]),
        is_drawn=torch.tensor([False, True, True]),
        draft_probs=torch.full((3, V), 1 / V),
    )
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        with pytest.raises(VerifierMismatchError, match="expected a chain"):
            chain(siblings, torch.zeros(3, V), Sampler(sampling, V), 0)
    with pytest.raises(ShapeError, match="V=7"):
        chain(drawn_chain(0, [1], torch.full((2, V + 1), 0.1)), logits, sampler, 0)
    with pytest.raises(ShapeError):
        chain(DraftTree.chain([0, 1]), torch.zeros(3, V), sampler, 0)


def test_one_probability_tensor_is_drawn_from_and_divided_by():
    """Report B14: q of the ratio is q of the draw, to the last bit."""
    logits = torch.randn(V, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = logits.float().softmax(-1)
    tree = draw_chain(q, Sampler(Sampling(temperature=1.0), V), depth=1)
    assert tree.draft_probs is not None and tree.draft_probs.data_ptr() == q.data_ptr()
    seen = []

    class Watched(GeneratorChance):
        def accepts(self, target, draft):
            seen.append(float(draft))
            return super().accepts(target, draft)

    from slipstream.verify.chain import chain_rule

    chance = Watched(torch.Generator().manual_seed(0))
    chain_rule(tree, lambda node: q, lambda node: tree.draft_probs[node], chance)
    assert seen == [float(q[tree.tokens[1]])]


def test_residual_falls_back_and_draws_skip_zero():
    p = torch.tensor([0.25, 0.75])
    assert torch.equal(residual(p, p), p)
    assert torch.equal(residual(p, p + 1e-9), p)
    assert without(torch.tensor([1.0, 0.0]), 0).tolist() == [1.0, 0.0]
    untouched = torch.tensor([0.5, 0.5])
    without(untouched, 0)
    assert untouched.tolist() == [0.5, 0.5]
    chance = GeneratorChance(torch.Generator().manual_seed(0))
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0])
    drawn = torch.bincount(torch.tensor([chance.draws(weights) for _ in range(2000)]), minlength=5)
    assert drawn[[0, 2, 4]].sum() == 0 and abs(int(drawn[3]) - 1500) < 4 * (2000 * 0.1875) ** 0.5
    assert not chance.accepts(0.0, 0.5) and chance.accepts(0.5, 0.5)


def test_children_keep_draft_order():
    tree = DraftTree(torch.tensor([0, 5, 2, 9]), torch.tensor([-1, 0, 0, 1]))
    assert children(tree) == [[1, 2], [3], [], []]
