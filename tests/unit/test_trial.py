"""Rules are tried in a process that can be killed; whatever they do, the next ones are read."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher

from chats import PLAIN, byte_tokenizer
from slipstream.serve.trial import Trial

USUAL = LLMatcher.grammar_from_json_schema('{"type": "object"}')


def schema(value: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(value))


def intersection(count: int) -> str:
    """Patterns that all must match: what it takes doubles with each."""
    patterns = [{"type": "string", "pattern": f"a.*b{n}.*c"} for n in range(count)]
    return schema({"allOf": patterns})


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    inner = byte_tokenizer(PLAIN)
    end = inner.convert_tokens_to_ids("<|end|>")
    made = Trial(inner.backend_tokenizer.to_str(), len(inner), (end,), seconds=1.0)
    yield made
    made.close()


def test_usual_rules_are_read_once(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trial.fault(USUAL) is None
    monkeypatch.setattr(trial, "_ask", None)  # nobody is asked again
    assert trial.fault(USUAL) is None


@pytest.mark.parametrize("rules", [intersection(40), schema({"multipleOf": 999983})])
def test_what_takes_too_long_is_killed(trial: Trial, rules: str) -> None:
    assert "longer than 1 s" in trial.fault(rules)
    assert trial.fault(schema({"type": "array"})) is None


@pytest.mark.parametrize(
    "rules",
    [
        "start: nothing",
        schema({"$ref": "#"}),  # there is no finite answer
        LLMatcher.grammar_from_regex(r"[^\s\S]"),
    ],
)
def test_what_no_answer_can_follow_is_told(trial: Trial, rules: str) -> None:
    assert trial.fault(rules)


def test_a_child_that_died_is_started_again(trial: Trial) -> None:
    assert trial.fault(schema({"type": "string"})) is None
    trial._child.kill()
    trial._child.wait()
    assert trial.fault(schema({"type": "integer"})) is None
