"""Do sampled tokens have the target's law? A score test against p, which is known.

Rules that draw random numbers of their own cannot be compared token for token, but the target's
distribution p at every emitted position can be computed afresh from the answer alone, by passes
that know nothing of drafting. If tokens follow p, two sums have mean zero and a known variance,
whatever the contexts were (martingale differences):

    surprise   -log p(token) - entropy(p): a wrong temperature, a forgotten nucleus, a wrong context
    favour     f(token) - sum of p f: too much, or too little, of what the drafter likes

For children that were drawn from q, f is q/p, cut at 4: whether a drawn child is hit depends on
the rule, but f depends on the context alone. For chosen children f is 1 on them.

Both are normalised to z; the p-value is two-sided, for the worse of the two. The power is computed
at the same contexts for stated faults, and a control (the same test on tokens drawn at half the
temperature) has to fail, or nothing is concluded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slipstream.bench.equality import EDGE, Ids, replay
from slipstream.sampling import Sampler
from slipstream.target.protocol import Target
from slipstream.types import DraftTree, Sampling, Verdict
from slipstream.verify.protocol import Verify

LEVEL = 1e-3  # a p-value below it is a no
ENOUGH_POWER = 0.9
FEWEST_TOKENS = 100
COLDER = 0.8  # the stated fault of the temperature: this times what it should be
UNCHECKED = 0.2  # the stated fault of the rule: share of tokens taken from the drafter unchecked
CONTROL = 0.5  # the control's temperature, times what it should be
LARGEST_RATIO = 4.0
NUM_KEPT = 64  # of q's tokens, the likeliest
RAREST = 1e-9  # stands for the probability of a token that p gives none
ALTERNATIVE = (
    f"a temperature {1 - COLDER:.0%} too low, or {UNCHECKED:.0%} of the tokens taken from the "
    "drafter unchecked"
)


@dataclass(frozen=True, slots=True)
class Favour:
    """What the drafter liked at one position.

    Args:
        ids: [K] int64.
        weights: [K] probabilities under q, or 1 for chosen children.
        is_drawn: children were drawn from q.
    """

    ids: Tensor
    weights: Tensor
    is_drawn: bool


class Witness:
    """A verifier that judges as another one does and keeps what the drafter liked where.

    Args:
        verify: who judges.
    """

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        self.favours: dict[int, Favour] = {}  # by absolute position of the token that was chosen

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int
    ) -> Verdict:
        """The other one's verdict."""
        verdict = self._verify(tree, logits, sampler, root_position)
        for depth, node in enumerate(verdict.path):
            found = _favour(tree, node)
            if found is not None:
                self.favours[root_position + 1 + depth] = found
        return verdict


def _favour(tree: DraftTree, node: int) -> Favour | None:
    """None at a node without children."""
    children = tree.tokens[tree.parents == node]
    if not len(children):
        return None
    if tree.draft_probs is None:
        chosen = children.unique()
        return Favour(chosen, torch.ones(len(chosen)), is_drawn=False)
    probs = tree.draft_probs[node].float().cpu()
    best = probs.topk(min(NUM_KEPT, len(probs)))
    return Favour(best.indices, best.values, is_drawn=True)


@dataclass(slots=True)
class Sums:
    """The sums of one statistic: seen, of the control, its variance, its shift under a fault."""

    seen: float = 0.0
    variance: float = 0.0
    shift: float = 0.0
    control: float = 0.0

    def z(self, seen: float) -> float:
        """Normalised; 0 where nothing was random."""
        return seen / math.sqrt(self.variance) if self.variance > 0 else 0.0


@dataclass(slots=True)
class ScoreTest:
    """Takes in answers one by one; `report` is what they add up to.

    Args:
        target: gives p, in passes that know nothing of drafting.
        sampling: how tokens should have been drawn.
        seed: of the control's draws.
    """

    target: Target
    sampling: Sampling
    seed: int = 0
    surprise: Sums = field(default_factory=Sums)
    favour: Sums = field(default_factory=Sums)
    num_tokens: int = 0
    num_impossible: int = 0

    def add(self, prompt_ids: Ids, answer: Ids, favours: dict[int, Favour] | None = None) -> None:
        """Take in an answer.

        Args:
            prompt_ids: what was answered.
            answer: emitted tokens.
            favours: what the drafter liked, by absolute position; see `Witness`.
        """
        if not answer:
            return
        vocab_size = self.target.spec.vocab_size
        # A nucleus' edge is decided by rounding: tokens just outside are taken as inside.
        edge = min(1.0, self.sampling.top_p * (1 + EDGE))
        right, colder, control = (
            Sampler(replace(self.sampling, top_p=edge, temperature=t * self.sampling.temperature),
                    vocab_size)
            for t in (1.0, COLDER, CONTROL)
        )  # fmt: skip
        generator = torch.Generator().manual_seed(self.seed + self.num_tokens)
        for index, logits in enumerate(replay(self.target, prompt_ids, answer)):
            p, cold, wrong = (
                sampler.probs(logits[None])[0].cpu().double()
                for sampler in (right, colder, control)
            )
            drawn = int(torch.multinomial(wrong, 1, generator=generator))
            self._surprise(p, cold, answer[index], drawn)
            found = (favours or {}).get(len(prompt_ids) + index)
            if found is not None:
                self._favour(p, found, answer[index], drawn)

    def _surprise(self, p: Tensor, cold: Tensor, token: int, drawn: int) -> None:
        self.num_tokens += 1
        self.num_impossible += float(p[token]) == 0
        cost = -p.clamp(min=RAREST).log()  # [V]
        entropy = float((p * cost).sum())
        self.surprise.seen += float(cost[token]) - entropy
        self.surprise.control += float(cost[drawn]) - entropy
        self.surprise.variance += max(float((p * cost * cost).sum()) - entropy**2, 0.0)
        self.surprise.shift += float((cold * cost).sum()) - entropy

    def _favour(self, p: Tensor, found: Favour, token: int, drawn: int) -> None:
        ids, weights = found.ids.cpu(), found.weights.double().cpu()
        here = p[ids]
        liking = weights
        if found.is_drawn:
            liking = (weights / here.clamp(min=RAREST)).clamp(max=LARGEST_RATIO)
        mean = float((here * liking).sum())
        of = dict(zip(ids.tolist(), liking.tolist(), strict=True))
        self.favour.seen += of.get(token, 0.0) - mean
        self.favour.control += of.get(drawn, 0.0) - mean
        self.favour.variance += max(float((here * liking * liking).sum()) - mean**2, 0.0)
        unchecked = float((weights / weights.sum() * liking).sum())
        self.favour.shift += UNCHECKED * (unchecked - mean)

    def report(self, *, is_exact: bool) -> ScoreReport:
        """What all answers say.

        Args:
            is_exact: float32 or wider, where a token that p gives nothing cannot be rounding.
        """
        sums = [self.surprise, self.favour] if self.favour.variance else [self.surprise]
        z = [each.z(each.seen) for each in sums]
        p_value = worst(z)
        control = worst([each.z(each.control) for each in sums])
        power = min(_power(each.z(each.shift), len(sums)) for each in sums)
        is_wrong = p_value < LEVEL or (is_exact and self.num_impossible > 0)
        is_able = self.num_tokens >= FEWEST_TOKENS and power >= ENOUGH_POWER and control < LEVEL
        return ScoreReport(
            verdict="different" if is_wrong else "lossless" if is_able else "inconclusive",
            p_value=p_value,
            control_p_value=control,
            power=power,
            alternative=ALTERNATIVE if len(sums) > 1 else ALTERNATIVE.split(",")[0],
            z_surprise=z[0],
            z_favour=z[1] if len(z) > 1 else None,
            num_tokens=self.num_tokens,
            num_impossible=self.num_impossible,
        )


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """What a score test found.

    Args:
        verdict: "lossless": nothing found by a test that would have. "different": the tokens do
            not follow p. "inconclusive": too few tokens to tell.
        p_value: chance of a worse score if all is right.
        control_p_value: the same for tokens drawn at half the temperature; has to be tiny.
        power: chance that the stated faults would have been found.
        alternative: those faults, in words.
        z_surprise: surprise, in standard deviations; below 0 is too sure.
        z_favour: favour, likewise; above 0 is too much of the drafter. None without a drafter.
        num_tokens: tested.
        num_impossible: tokens that the target gives probability 0.
    """

    verdict: str
    p_value: float
    control_p_value: float
    power: float
    alternative: str
    z_surprise: float
    z_favour: float | None
    num_tokens: int
    num_impossible: int


def worst(scores: Sequence[float]) -> float:
    """Two-sided p-value of the largest of several z scores, corrected for their number.

    Example:
        >>> round(worst([1.96]), 3), worst([0.0, 0.1])
        (0.05, 1.0)
    """
    smallest = min(math.erfc(abs(z) / math.sqrt(2)) for z in scores)
    return min(1.0, len(scores) * smallest)


def _power(shift: float, num_tests: int) -> float:
    """Chance that a score shifted by so many standard deviations falls below LEVEL."""
    limit = _limit(num_tests)
    return 0.5 * math.erfc((limit - abs(shift)) / math.sqrt(2))


def _limit(num_tests: int) -> float:
    """The |z| whose corrected p-value is LEVEL."""
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if worst([middle] * num_tests) > LEVEL else (low, middle)
    return high
