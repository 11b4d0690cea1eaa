"""The parser of a form has limits: reaching one is an error, with drafts exactly where without."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLParserLimits
from llguidance.hf import from_tokenizer

from fakes import OracleDrafter
from serving import plain_twin, tiny_engine
from slipstream.engine.engine import Engine
from slipstream.engine.request import Result
from slipstream.serve.grammar import GrammarShaper

CHAT = [{"role": "user", "content": "ab"}]
ANSWER = '{"a": [[{"b": 1}, [1, 2, 3]]]}'
RIGHT_RECURSIVE = 'start: a+ "c"\na: "x" | a a | "y" a'
CASES = [  # rules, what the model would say, a limit, tokens until it is reached
    (LLMatcher.grammar_from_json_schema('{"type": "object"}'), ANSWER, {"step_max_items": 20}, 6),
    (LLMatcher.grammar_from_json_schema('{"type": "object"}'), ANSWER, {"max_lexer_states": 40}, 2),
    (LLMatcher.grammar_from_lark(RIGHT_RECURSIVE), "xyxyxyxyc", {"max_items_in_row": 12}, 3),
]


def answer(engine: Engine, rules: str, limits: dict[str, int]) -> Result:
    tokenizer = engine.tokenizer.inner
    words = from_tokenizer(tokenizer, eos_token=[tokenizer.eos_token_id])
    matcher = LLMatcher(words, rules, limits=LLParserLimits(**limits), log_level=0)
    shaper = GrammarShaper(matcher, len(tokenizer), [tokenizer.eos_token_id])
    return engine.generate(CHAT, grammar=shaper, max_new_tokens=60)


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
@pytest.mark.parametrize(("rules", "says", "limits", "size"), CASES)
def test_a_limit_ends_an_answer_with_an_error(
    rules: str, says: str, limits: dict, size: int, depth: int
) -> None:
    """Not as if it were finished; and a draft that goes beyond it changes nothing."""
    engine = tiny_engine(says=says)
    prompt = engine.tokenizer.encode_chat(CHAT)
    plain = answer(plain_twin(engine), rules, limits)
    assert plain.finish_reason == "error" and "any further" in plain.error
    assert plain.num_tokens == size and plain.text == says[:size]
    words = engine.tokenizer.inner.encode(says, add_special_tokens=False)
    drafter = OracleDrafter([[*prompt, *words, 257]], depth=depth, vocab_size=261)
    found = answer(tiny_engine(drafter, says=says), rules, limits)
    assert (found.token_ids, found.text) == (plain.token_ids, plain.text)
    assert (found.finish_reason, found.error) == (plain.finish_reason, plain.error)


def test_within_the_limits_drafts_are_held_to_the_form() -> None:
    rules = LLMatcher.grammar_from_json_schema('{"type": "object"}')
    engine = tiny_engine(says=ANSWER)
    prompt = engine.tokenizer.encode_chat(CHAT)
    words = engine.tokenizer.inner.encode(ANSWER, add_special_tokens=False)
    drafter = OracleDrafter([[*prompt, *words, 257]], depth=5, siblings=1, vocab_size=261)
    found = answer(tiny_engine(drafter, says=ANSWER), rules, {})
    assert found.text == ANSWER == answer(plain_twin(engine), rules, {}).text
    assert found.finish_reason == "stop" and found.tau > 4
