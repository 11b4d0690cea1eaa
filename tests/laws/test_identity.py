"""Speculative output is plain output, token for token: any drafter, tree, sampling or batch.

The plain twin of a table is `TableTarget.answer`, which knows no engine; the plain twin of a
network is `transformers` itself for greedy decoding, and the drafter `none` above temperature 0.
Bug reports B01, B03, B06, B17, B79.
"""

from __future__ import annotations

import pytest
import torch

from fakes import OracleDrafter, RandomDrafter, TableTarget, tiny_target
from slipstream import methods
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.verify.walk import walk

NUM_TOKENS = 40
SAMPLINGS = {
    "greedy": {},
    "T0.7": {"temperature": 0.7, "top_p": 0.95, "seed": 3},
    "T1": {"temperature": 1.0, "top_p": 0.95, "seed": 4},
    "T1-topk": {"temperature": 1.0, "top_k": 5, "seed": 5},
}
PROMPTS = [
    [(7 * i + 3 * j) % 97 for j in range(length)]
    for i, length in enumerate((3, 11, 1, 29, 6, 17, 2, 8))
]


def drafters(answers: list[list[int]]) -> dict[str, object]:
    """Every quality and shape: right, half wrong, wrong, chains, trees."""
    return {
        "oracle-chain": OracleDrafter(answers, depth=6),
        "oracle-tree": OracleDrafter(answers, depth=4, siblings=2),
        "half-chain": OracleDrafter(answers, depth=6, wrong=0.5),
        "half-tree": OracleDrafter(answers, depth=4, siblings=3, wrong=0.5, seed=1),
        "wrong-chain": OracleDrafter(answers, depth=3, wrong=1.0),
        "random-tree": RandomDrafter(12),
        "careless-tree": RandomDrafter(90, overdraw=True),
        "ngram": NgramDrafter(),
        "none": NoDrafter(),
    }


NAMES = tuple(drafters([]))


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_table_says_the_same(name: str, sampling: str, num_rows: int) -> None:
    target = TableTarget(scale=2.0)
    options = SAMPLINGS[sampling]
    plain = [target.answer(prompt, NUM_TOKENS, **options) for prompt in PROMPTS]
    drafter = drafters([p + a for p, a in zip(PROMPTS, plain, strict=True)])[name]
    results = Engine(target, drafter, walk).generate(
        PROMPTS, max_new_tokens=NUM_TOKENS, num_rows=num_rows, **options
    )
    assert [list(r.token_ids) for r in results] == plain
    if name == "oracle-chain":  # the laws above would hold for a drafter that is never believed
        assert all(r.tau > 5 for r in results)
    if name == "half-tree":
        assert 1.2 < sum(r.tau for r in results) / len(results) < 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sampling", ["greedy", "T0.7", "T1"])
def test_network_says_the_same(sampling: str, dtype: torch.dtype) -> None:
    target, options = tiny_target(dtype=dtype), SAMPLINGS[sampling]
    plain = [
        list(r.token_ids)
        for r in Engine(target, NoDrafter(), walk).generate(
            PROMPTS, max_new_tokens=NUM_TOKENS, **options
        )
    ]
    answers = [p + a for p, a in zip(PROMPTS, plain, strict=True)]
    assert len({tuple(a) for a in plain}) > 4, "the target says the same whatever it is asked"
    for name in NAMES:
        for num_rows in (1, 8):
            engine = Engine(target, drafters(answers)[name], walk)
            results = engine.generate(
                PROMPTS, max_new_tokens=NUM_TOKENS, num_rows=num_rows, **options
            )
            assert [list(r.token_ids) for r in results] == plain, (name, num_rows)
            if name == "oracle-tree":
                assert all(r.tau > 3.5 for r in results)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_plain_greedy_is_what_transformers_generates(kind: str) -> None:
    target = tiny_target(kind)
    engine = Engine(target, NoDrafter(), walk, chunk=7)
    for prompt in PROMPTS[:4]:
        inputs = torch.tensor([prompt])
        expected = target.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=24,
            pad_token_id=0,
        )
        result = engine.generate(prompt, max_new_tokens=24)
        assert list(result.token_ids) == expected[0, len(prompt) :].tolist()


def test_positions_go_on_without_gap_or_repeat() -> None:
    """B03: with 0, 1, ..., K drafts accepted per pass, a pass starts at the committed length."""
    target, prompt = TableTarget(), [5, 6, 7]
    answer = target.answer(prompt, 60)
    drafter = OracleDrafter([prompt + answer], depth=5, wrong=0.35)
    Engine(target, drafter, walk, chunk=2).generate(prompt, max_new_tokens=60)
    calls = [call[0] for call in target.calls]
    assert {v.num_accepted for v in drafter.verdicts} == set(range(6))
    assert [positions for _, _, positions in calls[:2]] == [[0, 1], [2]]
    root = 3
    for (_, tokens, positions), verdict in zip(calls[2:], drafter.verdicts, strict=False):
        assert positions == list(range(root, root + len(tokens)))
        root += verdict.num_emitted


@pytest.mark.parametrize("wrong", range(4))
def test_nothing_survives_a_refused_token(wrong: int) -> None:
    """B17: one wrong token at each place of a chain; sampling from a peaked target is greedy."""
    target, prompt = TableTarget(scale=3000.0), [1, 2, 3, 4]
    answer = target.answer(prompt, 30)
    places = range(len(prompt) + 1 + wrong, 200, 5)
    drafter = OracleDrafter([prompt + answer], depth=4, wrong_positions=places)
    result = Engine(target, drafter, walk).generate(
        prompt, max_new_tokens=30, temperature=1.0, seed=9
    )
    assert list(result.token_ids) == answer


def test_every_method_without_network_is_covered() -> None:
    """A method added to the catalogue has to be added to a law."""
    plain = {m.name for m in methods.all() if not m.needs_checkpoint}
    assert plain <= set(NAMES)
