"""Children that are chosen, drawn, distinct or mixed; statistics false-alarm once in 10,000."""

from __future__ import annotations

import pytest
import torch

from slipstream import methods
from slipstream.drafters.candidates import KINDS, pick
from slipstream.errors import ShapeError, UnknownNameError
from slipstream.sampling import Sampler
from slipstream.types import Sampling

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]).log()
INFINITE = float("-inf")


def sampler_at(temperature, seed=0, vocab_size=4):
    return Sampler(Sampling(temperature=temperature, seed=seed), vocab_size)


def picked(children, counts, sampler, logits=LOGITS, **changes):
    settings = {"position": 5, "target_ids": None, "vocab_size": sampler.vocab_size} | changes
    return pick(logits, children=children, counts=counts, sampler=sampler, **settings)


@pytest.mark.parametrize("children", KINDS)
def test_greedy_children_are_the_likeliest_however_they_are_wanted(children):
    found = picked(children, (3, 1), sampler_at(0))
    assert found.drawn is None
    assert found.tokens.tolist()[0] == [0, 1, 2] and found.tokens[1, 0] == 3
    assert torch.allclose(found.log_probs[0], LOGITS[0, :3])
    assert found.log_probs[1, 1:].tolist() == [INFINITE, INFINITE]


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_chosen_children_look_at_the_targets_noise(temperature):
    for seed in range(20):
        sampler = sampler_at(temperature, seed)
        found = picked("chosen", (4, 4), sampler, position=11)
        noisy = LOGITS / temperature + sampler.noise(11)
        assert torch.equal(found.tokens, noisy.argsort(dim=-1, descending=True))
        assert torch.allclose(
            found.log_probs, noisy.log_softmax(-1).sort(dim=-1, descending=True).values
        )
        assert found.drawn is None
        # A drafter that agrees with the target names its choice first.
        assert found.tokens[:, 0].tolist() == sampler.choose(LOGITS, [11, 11]).tolist()


def test_noise_is_of_the_target_ids():
    """The draft id's own noise would be another token's."""
    ids, sampler = torch.tensor([2, 5, 8]), sampler_at(1.0, vocab_size=9)
    logits = torch.zeros(1, 3)
    found = picked("chosen", (3,), sampler, logits, target_ids=ids)
    assert found.tokens[0].tolist() == ids[sampler.noise(5)[ids].argsort(descending=True)].tolist()


@pytest.mark.parametrize("children", KINDS)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_ids_beyond_the_target_are_never_offered(children, temperature):
    ids = torch.tensor([0, 3, 9, 11])
    sampler = sampler_at(temperature, vocab_size=9)
    for _ in range(20):
        found = picked(children, (4, 4), sampler, target_ids=ids, vocab_size=9)
        offered = found.tokens[found.log_probs > INFINITE]
        assert len(offered) >= 4 and set(offered.tolist()) <= {0, 3}
        if found.drawn is not None:
            assert found.drawn.draft_probs.shape == (2, 9)
            if children != "mixed":  # of which both tokens were chosen
                assert torch.allclose(found.drawn.draft_probs.sum(-1), torch.ones(2))


def frequencies(children, count, num=6000, temperature=1.0):
    """Tuples of the first node's tokens, counted."""
    sampler, seen = sampler_at(temperature, seed=3), {}
    for _ in range(num):
        tokens = tuple(picked(children, (count, 1), sampler).tokens[0].tolist())
        seen[tokens] = seen.get(tokens, 0) + 1
    return seen


def statistic(seen, expected):
    """Chi-square of counts against probabilities."""
    num = sum(seen.values())
    assert set(seen) <= {outcome for outcome, mass in expected.items() if mass > 0}
    return sum((seen.get(o, 0) - num * m) ** 2 / (num * m) for o, m in expected.items() if m > 0)


def test_drawn_children_are_independent():
    q = LOGITS[0].exp().tolist()
    expected = {(a, b): q[a] * q[b] for a in range(4) for b in range(4)}
    assert statistic(frequencies("drawn", 2), expected) < 44.3  # 15 degrees of freedom


def test_distinct_children_are_drawn_from_what_is_left():
    q = LOGITS[0].exp().tolist()
    expected = {(a, b): q[a] * q[b] / (1 - q[a]) for a in range(4) for b in range(4) if a != b}
    assert statistic(frequencies("distinct", 2), expected) < 37.4  # 11 degrees of freedom


def test_mixed_children_are_the_likeliest_then_a_draw_from_the_rest():
    tempered = (LOGITS[0] / 2).softmax(-1).tolist()
    rest = tempered[2] + tempered[3]
    expected = {(0, 1, 2): tempered[2] / rest, (0, 1, 3): tempered[3] / rest}
    assert statistic(frequencies("mixed", 3, temperature=2.0), expected) < 15.2  # 1 degree


@pytest.mark.parametrize("children", ["drawn", "distinct", "mixed"])
def test_draft_probs_are_the_numbers_that_were_drawn_from(children):
    """Report B14: float32, over the target's ids, at the request's temperature."""
    ids = torch.tensor([1, 4, 6, 7])
    found = picked(
        children, (2, 3), sampler_at(0.5, vocab_size=9), LOGITS.bfloat16(), target_ids=ids
    )
    q = (LOGITS.bfloat16().float() / 0.5).softmax(-1)
    assert torch.equal(found.log_probs[0, :2], q[0].log()[[ids.tolist().index(t) for t in
                       found.tokens[0, :2].tolist()]])  # fmt: skip
    if children == "mixed":
        for row, count in enumerate((2, 3)):
            q[row, q[row].topk(count - 1).indices] = 0
        q /= q.sum(-1, keepdim=True)
    expected = torch.zeros(2, 9)
    expected[:, ids] = q
    assert found.drawn.draft_probs.dtype == torch.float32
    assert torch.equal(found.drawn.draft_probs, expected)


def test_every_node_gets_as_many_as_it_wants():
    for children in ("drawn", "distinct", "mixed"):
        found = picked(children, (1, 3), sampler_at(1.0))
        assert (found.log_probs > INFINITE).tolist() == [[True, False, False], [True] * 3]
        last = [[True, False, False], [False, False, True]]
        every = [[True, False, False], [True, True, True]]
        assert found.drawn.is_drawn.tolist() == (last if children == "mixed" else every)


@pytest.mark.parametrize("children", ["distinct", "mixed"])
def test_an_exhausted_distribution_gives_fewer_children(children):
    logits = torch.tensor([[1.0, INFINITE, 2.0, INFINITE]])
    for _ in range(20):
        found = picked(children, (4,), sampler_at(1.0), logits)
        offered = found.log_probs[0] > INFINITE
        assert offered.sum() == 2 and set(found.tokens[0][offered].tolist()) == {0, 2}
        assert not bool((found.drawn.is_drawn[0] & ~offered).any())


def test_a_draft_network_that_says_nan_is_given_no_children():
    logits = torch.full((1, 4), float("nan"))
    for children in ("drawn", "distinct", "mixed"):
        assert not bool(
            (picked(children, (2,), sampler_at(1.0), logits).log_probs > INFINITE).any()
        )


def test_draws_come_from_the_requests_draft_stream():
    def run(seed, disturb=False):
        sampler = sampler_at(1.0, seed)
        if disturb:
            torch.rand((), generator=sampler.generator("verify"))
            torch.rand(())
        return [picked("drawn", (3, 3), sampler).tokens.tolist() for _ in range(10)]

    assert run(1) == run(1, disturb=True) and run(1) != run(2)


def test_what_does_not_agree_is_refused():
    sampler = sampler_at(1.0)
    with pytest.raises(UnknownNameError, match="Did you mean: chosen"):
        picked("choosen", (1, 1), sampler)
    with pytest.raises(ShapeError, match="pick: logits"):
        picked("drawn", (1,), sampler)
    with pytest.raises(ShapeError, match="target_ids"):
        picked("drawn", (1, 1), sampler, target_ids=torch.arange(3))


def test_the_catalogue_asks_for_kinds_there_are():
    assert methods.CHILDREN.keys() == methods.VERIFIERS.keys()
    assert set(methods.CHILDREN.values()) <= set(KINDS)
