"""Rules for drawn nodes refuse by name a tree that was made otherwise; rounding loses nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream import methods
from slipstream.errors import NumericError, ShapeError, VerifierMismatchError
from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Sampling

V = 6
WARM = Sampler(Sampling(temperature=1.0), V)
COLD = Sampler(Sampling(), V)
DRAWN = tuple(name for name, children in methods.CHILDREN.items() if children != "chosen")
LOGITS = torch.zeros(4, V)


def verify(name, tree, logits=LOGITS, sampler=WARM):
    return methods.resolve(methods.VERIFIERS[name])(tree, logits, sampler, 0)


def tree_for(name, tokens=(1, 2, 3)):
    """Three nodes made as the rule needs them: a chain, or three siblings."""
    n = len(tokens)
    kind = methods.CHILDREN[name]
    parents = range(-1, n) if name in methods.FOR_CHAINS else [-1] + [0] * n
    drawn = [False] * n + [True] if kind == "mixed" else [False] + [True] * n
    return DraftTree(
        torch.tensor([0, *tokens]),
        torch.tensor(list(parents)),
        is_drawn=torch.tensor(drawn),
        draft_probs=torch.full((n + 1, V), 1 / V),
    )


@pytest.mark.parametrize("name", DRAWN)
def test_a_tree_that_fits_is_judged(name):
    assert verify(name, tree_for(name)).path[0] == 0


@pytest.mark.parametrize("name", DRAWN)
def test_a_root_alone_draws_from_the_target(name):
    logits = torch.tensor([[0.0, 50.0, 0.0, 0.0, 0.0, 0.0]])
    kept = verify(name, DraftTree.chain([0]), logits)
    assert kept.path == (0,) and kept.next_token == 1 and not kept.is_bonus


@pytest.mark.parametrize("name", DRAWN)
def test_what_does_not_fit_is_refused_by_name(name):
    fitting = tree_for(name)
    wrong = [
        (replace(fitting, draft_probs=None), "without draft_probs"),
        (replace(fitting, draft_probs=fitting.draft_probs.bfloat16()), "bfloat16"),  # report B14
    ]
    if methods.CHILDREN[name] == "mixed":
        every = torch.tensor([False, True, True, True])
        first = torch.tensor([False, True, False, False])
        wrong += [(replace(fitting, is_drawn=d), "at most one") for d in (every, first)]
    else:
        some = torch.tensor([False, True, False, False])
        wrong += [
            (replace(fitting, is_drawn=some), "2 chosen nodes of 3"),
            (replace(fitting, is_drawn=None), "3 chosen nodes of 3"),
        ]
    if methods.CHILDREN[name] in ("distinct", "mixed"):
        wrong.append((tree_for(name, (1, 2, 2)), "expected distinct"))
    for tree, words in wrong:
        with pytest.raises(VerifierMismatchError, match=f"verifier '{name}' got.*{words}") as found:
            verify(name, tree)
        assert found.value.hint
    with pytest.raises(ShapeError, match=f"{name}: .*V=7"):
        verify(name, replace(fitting, draft_probs=torch.full((4, V + 1), 0.1)))
    with pytest.raises(ShapeError, match=f"{name}: logits"):
        verify(name, fitting, torch.zeros(5, V))


@pytest.mark.parametrize("name", DRAWN)
def test_repeated_siblings_fit_independent_draws_alone(name):
    tree = tree_for(name, (2, 2, 2))
    if methods.CHILDREN[name] == "drawn":
        assert verify(name, tree).path[0] == 0
    else:
        with pytest.raises(VerifierMismatchError, match="distinct"):
            verify(name, tree)


@pytest.mark.parametrize("name", methods.FOR_CHAINS)
@pytest.mark.parametrize("sampler", [COLD, WARM])
def test_rules_for_chains_refuse_siblings_at_every_temperature(name, sampler):
    siblings = tree_for("with-replacement")
    with pytest.raises(VerifierMismatchError, match=f"'{name}'.*expected a chain"):
        verify(name, siblings, sampler=sampler)


@pytest.mark.parametrize("name", methods.VERIFIERS)
def test_nan_logits_are_told(name):
    with pytest.raises(NumericError):
        verify(name, tree_for(name), torch.full((4, V), float("nan")))


@pytest.mark.parametrize("name", DRAWN)
def test_a_token_outside_the_truncation_is_never_kept(name):
    logits = torch.tensor([[0.5, 0.3, 0.2, 1e-6, 1e-6, 1e-6]]).log().expand(4, -1)
    sampler = Sampler(Sampling(temperature=1.0, top_k=2), V)
    for _ in range(30):
        kept = verify(name, tree_for(name, (5, 3, 4)), logits, sampler)
        assert kept.num_accepted == 0 and kept.next_token in (0, 1)


def test_what_a_refused_token_leaves_of_a_peaked_q_is_not_rounded_away():
    """q leaves 1e-9 beside the first token; the second, drawn from that, is drawn with certainty.

    p gives it 0.2 of what the first one leaves: kept with 0.2 / 1.0, not with 0.2 / 1e-9.
    """
    q = torch.tensor([1 - 1e-9, 1e-9, 0, 0, 0, 0])
    p_logits = torch.tensor([1e-30, 0.2, 0.8, 1e-30, 1e-30, 1e-30]).log()
    tree = DraftTree(
        torch.tensor([0, 0, 1]),
        torch.tensor([-1, 0, 0]),
        is_drawn=torch.tensor([False, True, True]),
        draft_probs=q.expand(3, -1),
    )
    for name in ("without-replacement", "traversal"):
        sampler = Sampler(Sampling(temperature=1.0, seed=1), V)
        kept = sum(verify(name, tree, p_logits.expand(3, -1), sampler).num_accepted
                   for _ in range(400))  # fmt: skip
        assert abs(kept - 80) < 4 * (400 * 0.2 * 0.8) ** 0.5


@pytest.mark.parametrize("name", DRAWN)
def test_the_same_seed_gives_the_same_verdicts(name):
    """Report B135: draws come from the request's own generator."""
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(5))

    def run(seed):
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), V)
        torch.rand(7)
        return [verify(name, tree_for(name), logits, sampler) for _ in range(30)]

    assert run(1) == run(1) and run(1) != run(2)
