"""Equality with plain decoding where things end, restart or run out of room.

Small vocabularies with several end tokens, so that answers stop inside accepted paths and the
next request takes the same cache row; contexts that end within a tree; windows narrower than a
tree; extreme seeds and warps; unions of drafters that propose the same nodes.
"""

from __future__ import annotations

import copy

import pytest
import torch

from fakes import OracleDrafter, RandomDrafter, TableTarget, random_eagle3, tiny_model
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.drafters.union import UnionDrafter
from slipstream.engine.engine import Engine
from slipstream.sampling import Sampler
from slipstream.types import Sampling
from slipstream.verify.walk import walk

VOCAB, CONTEXT, EOS = 13, 40, (3, 7)
PROMPTS = [[1], [2], [1, 2, 4] * 10, [5] * (CONTEXT - 1), [6, 8, 9], [1], [4] * 20, [11, 12]]
SAMPLINGS = [
    {},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-9, "seed": 1},
    {"temperature": 0.7, "top_p": 0.95, "seed": 2**63},
    {"temperature": 1.3, "seed": -1},
    {"temperature": 5.0, "top_k": 3, "top_p": 0.5, "seed": 2**64 - 1},
]


def until_end(answer: list[int]) -> list[int]:
    """Up to the first end token, that token included."""
    for place, token in enumerate(answer):
        if token in EOS:
            return answer[: place + 1]
    return answer


def drafters(answers: list[list[int]]) -> dict[str, object]:
    """The answers go on behind their end, so that drafts reach beyond it."""
    longer = [[*answer, 1, 3, 5, 7, 9, 11] for answer in answers]
    half = OracleDrafter(longer, depth=4, siblings=3, wrong=0.3, vocab_size=VOCAB)
    again = OracleDrafter(longer, depth=5, siblings=2, wrong=0.3, vocab_size=VOCAB)
    return {
        "none": NoDrafter(),
        "oracle": OracleDrafter(longer, depth=6, vocab_size=VOCAB),
        "half": half,
        "careless": RandomDrafter(70, vocab_size=VOCAB, overdraw=True),
        "same twice": UnionDrafter(half, again, 64),
        "narrow union": UnionDrafter(RandomDrafter(8, vocab_size=VOCAB), NgramDrafter(), 1),
    }


def check(
    target: object, plain: list[list[int]], limit: int, options: dict, *, names: tuple = ()
) -> None:
    """Every drafter (or those named), with more prompts than rows, twice on one engine."""
    answers = [prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)]
    ends = ["stop" if answer[-1] in EOS else "length" for answer in plain]
    for name, drafter in drafters(answers).items():
        if names and name not in names:
            continue
        engine = Engine(target, drafter, walk, chunk=3, max_nodes=20)
        for num_rows in (1, 3):
            results = engine.generate(PROMPTS, max_new_tokens=limit, num_rows=num_rows, **options)
            assert [list(r.token_ids) for r in results] == plain, (name, num_rows)
            assert [r.finish_reason for r in results] == ends, (name, num_rows)


@pytest.mark.parametrize("limit", [1, 2, 100])
@pytest.mark.parametrize("options", SAMPLINGS, ids=str)
def test_ends_and_restarts_of_a_table(limit: int, options: dict) -> None:
    target = TableTarget(VOCAB, eos_ids=EOS, max_length=CONTEXT, scale=2.0)
    plain = [
        until_end(target.answer(prompt, min(limit, CONTEXT - len(prompt)), **options))
        for prompt in PROMPTS
    ]
    check(target, plain, limit, options)
    if limit == 100:
        assert {len(answer) for answer in plain} > {1}, "no answer of one token"
        assert any(answer[-1] not in EOS for answer in plain), "no answer that fills the context"


@pytest.mark.parametrize(("window", "options"), [(2, SAMPLINGS[0])], ids=["greedy"])
def test_windows_narrower_than_a_tree(window: int, options: dict) -> None:
    """Against recomputation of the whole text by stock code, without any cache."""
    from slipstream.target.hf import HFTarget

    model = tiny_model(
        "mistral", vocab_size=VOCAB, max_position_embeddings=CONTEXT, sliding_window=window,
        eos_token_id=list(EOS),
    ).double()  # fmt: skip
    stock, target = copy.deepcopy(model), HFTarget(model, None, name="window")
    sampler = Sampler(Sampling(**options), VOCAB)
    plain = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        while len(tokens) < min(CONTEXT, len(prompt) + 5):
            with torch.no_grad():
                logits = stock(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
            tokens.append(int(sampler.choose(logits, [len(tokens)])[0]))
        plain.append(until_end(tokens[len(prompt) :]))
    check(target, plain, 5, options, names=("half",))
    united = UnionDrafter(random_eagle3(target, size=VOCAB), NgramDrafter(), 16)
    results = Engine(target, united, walk).generate(
        PROMPTS, max_new_tokens=5, num_rows=3, **options
    )
    assert [list(r.token_ids) for r in results] == plain
