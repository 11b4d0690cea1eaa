"""The draft-cost measurement counts what is done; how fast is another matter."""

import pytest
import torch

from fakes import tiny_target
from slipstream.bench.draft_cost import DeepEagle3, measure
from slipstream.models.eagle3 import Eagle3Config


@pytest.fixture(scope="module")
def rows():
    found = measure(
        tiny_target(), tokens=(2, 5), eagle3_layers=(1, 2), dflash_layers=(1, 3),
        draft_vocab_size=50, context=12, rounds=1,
    )  # fmt: skip
    assert found["draft_vocab_size"] == 50 and found["rounds"] == 1
    return {(r["method"], r["layers"], r["tokens"]): r for r in found["rows"]}


def test_token_by_token_costs_a_pass_and_a_head_call_each(rows):
    for (method, _, tokens), row in rows.items():
        expected = tokens if method == "eagle3" else 1
        assert row["passes"] == row["head_calls"] == expected
        assert row["seconds"] > 0


def test_dispatches_grow_with_the_draft_or_stay(rows):
    for layers in (1, 2):
        few, many = (rows["eagle3", layers, n]["dispatches"] for n in (2, 5))
        assert many > 1.8 * few
    for layers in (1, 3):
        few, many = (rows["dflash", layers, n]["dispatches"] for n in (2, 5))
        assert many < 1.5 * few
    assert rows["dflash", 3, 5]["dispatches"] > rows["dflash", 1, 5]["dispatches"]


def test_a_deep_network_is_the_shallow_one_and_more():
    config = Eagle3Config(**tiny_target().draft_shape(), draft_vocab_size=50, taps=(1, 2, 3))
    deep = DeepEagle3(config, 3)
    calls = []

    def attend(q, _k, v):
        calls.append(1)
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    states, embedded = torch.randn(2, 1, 4, 48)
    out = deep.step(states, embedded, torch.arange(4)[None], attend)
    assert out.shape == (1, 4, 48) and len(calls) == 3
