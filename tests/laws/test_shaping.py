"""Penalties, bias, min-p and masks act at every node by its own prefix: identity is the law."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fakes import OracleDrafter, RandomDrafter, TableTarget
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.shaping import Penalties, paths, shapers
from slipstream.errors import SettingError
from slipstream.types import DraftTree
from slipstream.verify.walk import walk

CASES = {
    "repetition": Penalties(repetition=1.8),
    "presence": Penalties(presence=1.5),
    "frequency": Penalties(frequency=1.2),
    "bias": Penalties(bias={3: 4.0, 50: -100.0}),
    "min-p": Penalties(min_p=0.2),
    "all": Penalties(1.2, 0.4, 0.3, {7: 2.0}, 0.05),
}
PROMPT = [4, 8, 15, 16, 23, 42]


class OnlyRising:
    """A grammar: each token of the answer is larger than the one before it, modulo 97."""

    def __call__(self, logits: Tensor, tree: DraftTree, tokens: Sequence[int]) -> Tensor:
        last = [(path or tokens)[-1] for path in paths(tree)]
        steps = (torch.arange(97) - torch.tensor(last)[:, None]) % 97
        return logits.masked_fill((steps < 1) | (steps > 9), -math.inf)


def by_hand(logits: Tensor, tokens: list[int], wish: Penalties, temperature: float) -> Tensor:
    """The definition, token by token."""
    shaped = logits.clone()
    for token in range(len(logits)):
        times = tokens[len(PROMPT) :].count(token)
        if token in tokens and wish.repetition != 1:
            value = shaped[token]
            shaped[token] = value / wish.repetition if value > 0 else value * wish.repetition
        shaped[token] -= wish.frequency * times + wish.presence * (times > 0)
        shaped[token] += wish.bias.get(token, 0.0)
    if wish.min_p and temperature:
        probs = (shaped / temperature).softmax(-1)
        shaped[probs < wish.min_p * probs.max()] = -math.inf
    return shaped


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_shaped_speculation_is_shaped_plain_decoding(name: str, temperature: float) -> None:
    target = TableTarget(scale=1.5)
    options = {
        "max_new_tokens": 40, "temperature": temperature, "seed": 3, "penalties": CASES[name],
    }  # fmt: skip
    plain = Engine(target, NoDrafter(), walk).generate(PROMPT, **options)
    right = OracleDrafter([PROMPT + list(plain.token_ids)], depth=6, siblings=2, wrong=0.2)
    for drafter in (right, RandomDrafter(20)):
        result = Engine(target, drafter, walk).generate(PROMPT, **options)
        assert result.token_ids == plain.token_ids
    assert Engine(target, right, walk).generate(PROMPT, **options).tau > 2
    if name != "min-p" or temperature:
        unshaped = options | {"penalties": None}
        assert Engine(target, NoDrafter(), walk).generate(PROMPT, **unshaped) != plain


@pytest.mark.parametrize("name", CASES)
def test_every_node_is_shaped_by_its_own_prefix(name: str) -> None:
    wish, tokens = CASES[name], [*PROMPT, 9, 8, 9]
    tree = DraftTree(torch.tensor([9, 5, 8, 5, 3]), torch.tensor([-1, 0, 0, 1, 2]))
    logits = torch.randn(5, 97)
    shaped = logits
    for shaper in shapers(wish, len(PROMPT), 0.8):
        shaped = shaper(shaped, tree, tokens)
    for node, path in enumerate([[], [5], [8], [5, 5], [8, 3]]):
        expected = by_hand(logits[node], tokens + path, wish, 0.8)
        assert torch.allclose(shaped[node], expected, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_holds_whatever_is_drafted(temperature: float) -> None:
    """B133: the drafter proposes illegal tokens; the answer is legal and plain decoding's."""
    target = TableTarget()
    options = {"max_new_tokens": 30, "temperature": temperature, "seed": 1}
    plain = Engine(target, NoDrafter(), walk).generate(PROMPT, grammar=OnlyRising(), **options)
    said = [PROMPT[-1], *plain.token_ids]
    assert all(1 <= (b - a) % 97 <= 9 for a, b in pairwise(said))
    free = PROMPT + target.answer(PROMPT, 40)  # what the target would say without a mask
    for answers in ([PROMPT + list(plain.token_ids)], [free]):
        drafter = OracleDrafter(answers, depth=5, siblings=2)
        result = Engine(target, drafter, walk).generate(PROMPT, grammar=OnlyRising(), **options)
        assert result.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"repetition": 0.0}, "repetition-penalty is 0.0"),
        ({"repetition": float("nan")}, "repetition-penalty is nan"),
        ({"presence": 2.5}, "presence-penalty is 2.5"),
        ({"frequency": -2.5}, "frequency-penalty is -2.5"),
        ({"min_p": 1.5}, "min-p is 1.5"),
        ({"bias": {-1: 0.0}}, "bias of token -1"),
        ({"bias": {1: 101.0}}, "bias of token 1 is 101.0"),
    ],
)
def test_penalties_outside_their_range(wish: dict, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Penalties(**wish)


def test_a_bias_for_a_foreign_token_is_refused() -> None:
    with pytest.raises(SettingError, match="biased token is 97"):
        Engine(TableTarget(), NoDrafter(), walk).request(PROMPT, penalties=Penalties(bias={97: 1}))
    assert Penalties().is_none and not shapers(Penalties(), 3, 1.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_are_the_targets_own(temperature: float) -> None:
    """B131: accepted, corrected and bonus tokens carry log-probabilities of a plain pass."""
    target = TableTarget(scale=1.5)
    answer = target.answer(PROMPT, 25, temperature=temperature, seed=4)
    drafter = OracleDrafter([PROMPT + answer], depth=4, siblings=1, wrong=0.3)
    result = Engine(target, drafter, walk).generate(
        PROMPT, max_new_tokens=25, temperature=temperature, seed=4, num_top=3,
        stop=[answer[-2]],
    )  # fmt: skip
    assert len(result.scores) == result.num_tokens
    for place, (token, score) in enumerate(zip(result.token_ids, result.scores, strict=True)):
        log_probs = target.logits_of(PROMPT + answer[:place]).log_softmax(-1)
        assert score.log_prob == pytest.approx(float(log_probs[token]), abs=1e-5)
        best = log_probs.topk(3)
        assert [i for i, _ in score.top] == best.indices.tolist()
        assert [p for _, p in score.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    bare = Engine(target, drafter, walk).generate(PROMPT, max_new_tokens=5, num_top=0)
    assert len(bare.scores) == 5 and bare.scores[0].top == ()


def test_who_wrote_a_token_is_known() -> None:
    target = TableTarget()
    answer = target.answer(PROMPT, 20)
    drafter = OracleDrafter([PROMPT + answer], depth=3, wrong=0.3)
    engine = Engine(target, drafter, walk)
    pieces = list(engine.stream(PROMPT, max_new_tokens=20, trace=True))
    drafted = [flag for piece in pieces for flag in piece.drafted]
    assert len(drafted) == 20
    expected = [False]
    for step in pieces[-1].result.steps:
        of_step = [True] * step.verdict.num_accepted + [False]
        expected += of_step[: len(step.emitted)]
    assert drafted == expected and any(drafted)
