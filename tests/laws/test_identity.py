"""Speculative output is plain output, token for token: any drafter, tree, sampling or batch.

The plain twin of a table is `TableTarget.answer`, which knows no engine; the plain twin of a
network is `transformers` itself for greedy decoding, and the drafter `none` above temperature 0.
Bug reports B01, B03, B06, B17, B79.
"""

from __future__ import annotations

import pytest
import torch

from fakes import (
    OracleDrafter,
    RandomDrafter,
    TableTarget,
    random_dflash,
    random_eagle,
    random_eagle3,
    random_language,
    random_medusa,
    random_peagle,
    tiny_model,
    tiny_target,
)
from slipstream import methods
from slipstream.drafters.lookahead import LookaheadDrafter
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.drafters.union import UnionDrafter
from slipstream.engine.engine import Engine
from slipstream.target.compiled import why_not_compiled
from slipstream.target.hf import HFTarget
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
        "lookahead": LookaheadDrafter(),
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


def network_drafters(target: object, answers: list[list[int]]) -> dict[str, object]:
    """The shapes again, and the catalogue's drafters under each of their trees."""
    chosen = ("oracle-tree", "half-chain", "half-tree", "ngram", "lookahead")
    found = {name: drafters(answers)[name] for name in chosen}
    for tree in methods.get("eagle3").trees:
        found[f"eagle3-{tree}"] = random_eagle3(target, tree=tree)
    for method in ("eagle", "eagle2", "hass"):  # one drafter, whose rollout is EAGLE-3's
        record = methods.get(method)
        found[method] = random_eagle(target, tree=record.tree, budget=record.budget)
    for tree in ("chain", "kary"):
        found[f"dflash-{tree}"] = random_dflash(target, tree=tree, topk=3)
    for tree in methods.get("peagle").trees:
        found[f"peagle-{tree}"] = random_peagle(target, tree=tree, budget=8)
    found["ddtree"] = random_dflash(target, tree="best-first", budget=12)
    found["dspark"] = random_dflash(target, tree="best-first", budget=12, path_rank=8)
    for tree in ("best-first", "static"):
        found[f"medusa-{tree}"] = random_medusa(target, tree=tree)
    for name, tree in (("chain", "chain"), ("specinfer", "kary"), ("sequoia", "sequoia")):
        found[name] = random_language(target, tree=tree, budget=7, topk=3)
    found["eagle3+lookup"] = UnionDrafter(random_eagle3(target), NgramDrafter(), 16)
    found["lookahead+lookup"] = UnionDrafter(LookaheadDrafter(), NgramDrafter(), 25)
    found["half+lookup"] = UnionDrafter(found["half-tree"], NgramDrafter(), 12)
    return found


@pytest.mark.parametrize(
    ("sampling", "dtype"),
    [
        ("greedy", torch.float32),
        ("greedy", torch.float64),
        ("T0.7", torch.float32),
        ("T1", torch.float32),
    ],
    ids=str,
)
def test_network_says_the_same(sampling: str, dtype: torch.dtype) -> None:
    target, options = tiny_target(dtype=dtype), {"max_new_tokens": 20, **SAMPLINGS[sampling]}
    plain = Engine(target, NoDrafter(), walk).generate(PROMPTS, **options)
    expected = [list(r.token_ids) for r in plain]
    assert len({tuple(ids) for ids in expected}) > 4, "the target says the same to everyone"
    answers = [p + ids for p, ids in zip(PROMPTS, expected, strict=True)]
    for name, drafter in network_drafters(target, answers).items():
        for num_rows in (1, 8) if name in ("half-tree", "eagle3-dynamic") else (8,):
            results = Engine(target, drafter, walk).generate(PROMPTS, num_rows=num_rows, **options)
            assert [list(r.token_ids) for r in results] == expected, (name, num_rows)
            if name == "oracle-tree":
                assert all(r.tau > 3 for r in results)


@pytest.mark.parametrize("decoder", ["fused", "compiled"])
@pytest.mark.parametrize("sampling", ["greedy", "T1"])
def test_fast_decoders_say_the_same(decoder: str, sampling: str) -> None:
    """The compiled decoder runs bfloat16, and is held to exactly the same tokens there."""
    model = tiny_model()
    if decoder == "compiled":
        model = model.bfloat16()
        reason = why_not_compiled(model)
        if reason is not None:
            pytest.skip(reason)
    target = HFTarget(model, decoder=decoder)
    options = {"max_new_tokens": 20, **SAMPLINGS[sampling]}
    plain = Engine(target, NoDrafter(), walk).generate(PROMPTS, **options)
    expected = [list(r.token_ids) for r in plain]
    answers = [p + ids for p, ids in zip(PROMPTS, expected, strict=True)]
    found = network_drafters(target, answers)
    for name in ("oracle-tree", "half-tree", "ngram", "eagle3-dynamic", "eagle3-chain"):
        results = Engine(target, found[name], walk).generate(PROMPTS, num_rows=8, **options)
        assert [list(r.token_ids) for r in results] == expected, name


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_plain_greedy_is_what_transformers_generates(kind: str) -> None:
    plain_model, target = tiny_model(kind), tiny_target(kind)
    engine = Engine(target, NoDrafter(), walk, chunk=7)
    for prompt in PROMPTS[:4]:
        inputs = torch.tensor([prompt])
        expected = plain_model.generate(
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


def test_every_method_is_covered() -> None:
    """A method added to the catalogue has to be added to these laws."""
    named = {*NAMES, *(name.split("-")[0] for name in network_drafters(tiny_target(), []))}
    assert {method.name for method in methods.all()} <= named
