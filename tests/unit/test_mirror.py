"""Mirror-SD from its parts: the arithmetic, the exits, and the command."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import slipstream
from fakes import OracleDrafter, tiny_target
from slipstream.bench.mirror import Parts, exit_hits, steps_end
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.verify.walk import walk

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "mirror.py"
PROMPT = [5, 6, 7]
PARTS = Parts(
    plain_seconds=8.0, draft_seconds=4.0, target_seconds=10.0, other_seconds=1.0, tau=2.0,
    num_layers=10,
)  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "hits", "seconds"),
    [
        (5, 1.0, 11.0),  # 5 early, 5 more that hide a draft of 4
        (8, 1.0, 13.0),  # 2 are left: the draft is longer by 2
        (5, 0.5, 13.0),  # every second draft is made again
        (10, 0.0, 15.0),  # never right: one after the other
    ],
)
def test_a_mirrored_step(layer: int, hits: float, seconds: float) -> None:
    assert PARTS.mirrored_seconds(layer, hits) == pytest.approx(seconds)
    assert PARTS.serial_seconds == 15.0
    assert PARTS.speedup(seconds) == pytest.approx(16.0 / seconds)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def oracle(target) -> Engine:
    plain = Engine(target, NoDrafter(), walk).generate(PROMPT, max_new_tokens=40)
    answer = [*plain.prompt_ids, *plain.token_ids]
    drafter = OracleDrafter([answer], depth=3, wrong=0.3, vocab_size=target.spec.vocab_size)
    return Engine(target, drafter, walk, max_nodes=8)


def test_steps_end_at_the_targets_own_tokens(oracle) -> None:
    result = oracle.generate(PROMPT, max_new_tokens=24, trace=True)
    tokens, ends = [*result.prompt_ids, *result.token_ids], steps_end(result)
    said = [s.verdict.next_token for s in result.steps if len(s.emitted) == s.verdict.num_emitted]
    assert len(ends) > 3 and [tokens[place] for place in ends] == said


def test_an_exit_is_the_head_on_an_inner_state(target) -> None:
    tokens, layer, size = [5, 6, 7, 8, 9, 10], 1, target.spec.hidden_size
    state = target.extract(torch.tensor([tokens]), (layer,)).features[0]
    eps = target.draft_shape()["rms_norm_eps"]
    normed = F.rms_norm(state.float(), (size,), target.final_norm().float(), eps)
    ranked = (normed @ target.head().float().T).argsort(-1, descending=True)
    places = [2, 4, 5]
    for count in (1, 7, target.spec.vocab_size):
        wanted = [tokens[place] in ranked[place - 1, :count].tolist() for place in places]
        found = exit_hits(target, [(tokens, places), (tokens, [])], [layer], [count])
        assert found == {(layer, count): pytest.approx(sum(wanted) / 3)}
    assert found[layer, target.spec.vocab_size] == 1.0


def test_the_command(target, oracle, tmp_path, monkeypatch, capsys) -> None:
    script = runpy.run_path(str(SCRIPT))

    class Prompt:
        text = PROMPT

    def load(model, method, **_settings):
        return Engine(target, NoDrafter(), walk) if method == "none" else oracle

    monkeypatch.setattr(slipstream, "load", load)
    monkeypatch.setitem(script["main"].__globals__, "read_task", lambda *_, **__: [Prompt()])
    monkeypatch.setitem(script["main"].__globals__, "describe", lambda _target: {})
    out = tmp_path / "mirror.json"

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["mirror.py", "--tokens", "12", "--out", str(out), *words])
        return script["exit_status"](script["main"])

    assert run("--exits", str(target.spec.num_layers)) == 2 and not out.exists()
    assert "exits is" in capsys.readouterr().err
    assert run("--exits", "1", "--candidates", "1,4") == 0
    value = json.loads(out.read_text())
    parts = Parts(**value["parts"])
    assert [(row["layer"], row["candidates"]) for row in value["rows"]] == [(1, 1), (1, 4)]
    for row in value["rows"]:
        assert row["seconds"] == pytest.approx(parts.mirrored_seconds(1, row["hits"]))
    assert parts.tau > 1 and "one after the other" in capsys.readouterr().out
