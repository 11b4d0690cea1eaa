"""The exact law of a verification rule, enumerated with fractions on tiny vocabularies.

A rule draws everything through a `Chance`. `enumerate_law` runs a step once per path through its
decisions, with the probability of that path as a `Fraction`, so the law of what is emitted comes
out exactly: equality with ancestral sampling is `==`, not a tolerance. The rule is the very
function the engine runs (see `verify.protocol`); only numbers and chance are exchanged. Drafting
is part of the step: a drafter that draws takes its tokens from the same chance.

`verify.toy` has tables and drafters to feed it.

Example: a chosen child must not be kept by the ratio p / q.

    >>> from slipstream.verify.chain import chain_rule
    >>> from slipstream.verify.toy import chosen_step, table
    >>> target = table({(): [Fraction(3, 10), Fraction(7, 10)]})
    >>> draft = table({(): [Fraction(6, 10), Fraction(4, 10)]})
    >>> naive = chosen_step(chain_rule, target, draft, lambda prefix: [0] if not prefix else [])
    >>> law = emitted_law(naive, target, horizon=1)
    >>> str(law[(0,)]), str(ancestral_law(target, 2, horizon=1)[(0,)])
    ('1/2', '3/10')
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias, TypeVar

from slipstream.verify.protocol import Chance, Probs

Prefix: TypeAlias = tuple[int, ...]
"""Tokens emitted since the root."""

Conditional: TypeAlias = Callable[[Prefix], Probs]
"""The next token's distribution after a prefix: [V] fractions."""

EmittedLaw: TypeAlias = dict[Prefix, Fraction]
"""Probability of each sequence; sequences of probability 0 are left out."""

StepOf: TypeAlias = Callable[[Chance], Prefix]
"""One step: drafts, verifies, returns the emitted tokens (accepted, then the target's own)."""

Outcome = TypeVar("Outcome", bound=Hashable)


class Branches:
    """A chance that follows a script of decisions, then takes the first branch of each new one.

    Attributes:
        taken: index of the branch taken at each decision.
        open: branches of positive probability not yet taken at each decision.
        probability: of the path followed.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        self._script = script
        self.taken: list[int] = []
        self.open: list[list[int]] = []
        self.probability = Fraction(1)

    def accepts(self, target: Any, draft: Any) -> bool:
        """Both answers, with min(1, target / draft) and the rest."""
        keep = Fraction(1) if draft <= target else Fraction(target) / Fraction(draft)
        return self._branch([keep, 1 - keep]) == 0

    def draws(self, weights: Probs) -> int:
        """Every index of positive weight, with its share."""
        total = sum(weights)
        return self._branch([Fraction(weight) / Fraction(total) for weight in weights])

    def _branch(self, probabilities: list[Fraction]) -> int:
        assert min(probabilities) >= 0, "a rule asked for a negative probability"
        depth = len(self.taken)
        possible = [i for i, probability in enumerate(probabilities) if probability > 0]
        if depth < len(self._script):
            index, later = self._script[depth], []
        else:
            index, later = possible[0], possible[1:]
        self.taken.append(index)
        self.open.append(later)
        self.probability *= probabilities[index]
        return index


def enumerate_law(run: Callable[[Chance], Outcome]) -> dict[Outcome, Fraction]:
    """The exact law of what `run` returns when all of its randomness comes from the chance.

    Args:
        run: deterministic given the chance's answers; called once per path of decisions.

    Example:
        >>> law = enumerate_law(lambda chance: chance.draws([1, 2]) + chance.draws([1, 1]))
        >>> {total: str(probability) for total, probability in sorted(law.items())}
        {0: '1/6', 1: '1/2', 2: '1/3'}
    """
    law: dict[Outcome, Fraction] = {}
    scripts: list[list[int]] = [[]]
    while scripts:
        branches = Branches(scripts.pop())
        outcome = run(branches)
        law[outcome] = law.get(outcome, Fraction(0)) + branches.probability
        for depth, later in enumerate(branches.open):
            scripts.extend([*branches.taken[:depth], index] for index in later)
    return law


def ancestral_law(target: Conditional, vocab_size: int, *, horizon: int) -> EmittedLaw:
    """The law plain decoding has: each token drawn from the target given those before."""
    law: EmittedLaw = {(): Fraction(1)}
    for _ in range(horizon):
        law = {
            (*prefix, token): mass * target(prefix)[token]
            for prefix, mass in law.items()
            for token in range(vocab_size)
            if target(prefix)[token] > 0
        }
    return law


def emitted_law(step: StepOf, target: Conditional, *, horizon: int) -> EmittedLaw:
    """The joint law of the first `horizon` tokens: one step, then plain decoding.

    A step that emits more is cut. A rule is lossless exactly when this equals `ancestral_law`
    for every target, drafter and horizon.
    """

    def run(chance: Chance) -> Prefix:
        emitted = step(chance)[:horizon]
        while len(emitted) < horizon:
            emitted = (*emitted, chance.draws(target(emitted)))
        return emitted

    return enumerate_law(run)


def expected_accepted(step: StepOf) -> Fraction:
    """Mean number of accepted drafted tokens of a step."""
    law = enumerate_law(lambda chance: len(step(chance)) - 1)
    return sum((count * mass for count, mass in law.items()), Fraction(0))


def distance(one: EmittedLaw, other: EmittedLaw) -> Fraction:
    """Largest difference in the probability of any sequence; 0 for equal laws."""
    sequences = one.keys() | other.keys()
    return max(abs(one.get(s, Fraction(0)) - other.get(s, Fraction(0))) for s in sequences)
