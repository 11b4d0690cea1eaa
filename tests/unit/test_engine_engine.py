"""Prompts of every kind, settings that are refused, interrupts that keep what is done."""

from __future__ import annotations

import pytest

from fakes import ByteTokenizer, OracleDrafter, TableTarget
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.prompts import encode
from slipstream.engine.request import Result
from slipstream.errors import SettingError
from slipstream.verify.walk import walk


def chat_engine(**options: object) -> Engine:
    target = TableTarget(257, eos_ids=(256,), tokenizer=ByteTokenizer(), max_length=300)
    return Engine(target, NoDrafter(), walk, **options)


def test_prompts_of_every_kind_are_the_same_prompt() -> None:
    engine, tokenizer = chat_engine(), ByteTokenizer()
    chat = [{"role": "user", "content": "hi"}]
    ids = tokenizer.encode_chat(chat)
    results = [engine.generate(p, max_new_tokens=4) for p in ("hi", chat, ids)]
    assert all(list(r.prompt_ids) == ids for r in results)
    assert len({r.token_ids for r in results}) == 1
    together = engine.generate(["hi", chat, ids], max_new_tokens=4)
    assert [r.token_ids for r in together] == [r.token_ids for r in results]
    raw = engine.generate("hi", max_new_tokens=4, raw=True)
    assert list(raw.prompt_ids) == list(b"hi")


def test_one_in_one_out_list_in_list_out() -> None:
    engine = chat_engine()
    assert isinstance(engine.generate("hi", max_new_tokens=2), Result)
    assert isinstance(engine.generate(["hi"], max_new_tokens=2), list)
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "prompt is empty"),
        ([[]], "prompt is empty"),
        ([1, 257], "prompt token is 257, expected 0..256"),
        ([-1], "prompt token is -1"),
        ([1, "a"], "a str, a list of messages, or token ids"),
    ],
)
def test_prompts_that_are_none(prompt: object, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        chat_engine().generate(prompt)


def test_a_target_without_tokenizer_takes_ids_only() -> None:
    engine = Engine(TableTarget(), NoDrafter(), walk)
    assert engine.generate([1, 2], max_new_tokens=3).text == ""
    with pytest.raises(SettingError, match="no tokenizer"):
        engine.generate("hi")
    with pytest.raises(SettingError, match="no tokenizer"):
        engine.generate([1], stop="x")
    assert encode([1, 2], None, 97) == [1, 2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max-new-tokens is 0"),
        ({"num_rows": 0}, "num-rows is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top-p is 0.0"),
        ({"top_p": 1.5}, "top-p is 1.5"),
        ({"top_k": -1}, "top-k is -1"),
        ({"stop": [""]}, "non-empty"),
    ],
)
def test_settings_outside_their_range_are_refused_before_anything_runs(
    options: dict, words: str
) -> None:
    engine = chat_engine()
    with pytest.raises(SettingError, match=words):
        engine.generate("hi", **options)
    assert engine.target.calls == []


def test_streams_check_when_asked_not_when_read() -> None:
    with pytest.raises(SettingError, match="max-new-tokens"):
        chat_engine().stream("hi", max_new_tokens=0)


@pytest.mark.parametrize(
    "options", [{"max_length": 0}, {"chunk": 0}, {"max_nodes": 0}, {"max_length": 301}]
)
def test_engine_settings_are_checked(options: dict) -> None:
    with pytest.raises(SettingError):
        chat_engine(**options)


def test_a_shorter_context_may_be_asked_for() -> None:
    result = chat_engine(max_length=40).generate([1] * 30, max_new_tokens=100)
    assert result.num_tokens == 10 and result.finish_reason == "length"


def test_an_interrupt_keeps_what_is_done() -> None:
    target = TableTarget()
    prompts = [[i, 2, 3] for i in range(6)]
    drafter = OracleDrafter([p + target.answer(p, 10) for p in prompts])
    engine, done = Engine(target, drafter, walk), []

    def note(result: Result) -> None:
        done.append(result)
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, max_new_tokens=10, num_rows=2, on_result=note)
    assert len(done) == 3
    for result in done:
        assert list(result.token_ids) == target.answer(prompts[result.prompt_index], 10)
    assert drafter.rows == set() and target.caches[0].lengths == [0, 0]
    again = engine.generate(prompts, max_new_tokens=10, num_rows=2)
    assert [list(r.token_ids) for r in again] == [target.answer(p, 10) for p in prompts]


def test_results_are_told_as_they_finish() -> None:
    target, told = TableTarget(), []
    answer = target.answer([1, 2], 30)
    ending = TableTarget(eos_ids=(answer[2],))
    results = Engine(ending, NoDrafter(), walk).generate(
        [[9, 9, 9], [1, 2]], max_new_tokens=30, num_rows=2, on_result=told.append
    )
    assert sorted(told, key=lambda r: r.prompt_index) == results
    assert [r.prompt_index for r in told] == [1, 0]


def test_describe_names_what_runs() -> None:
    seen = chat_engine(settings={"tree": "chain"}).describe()
    assert seen | {"model": "table", "method": "none", "dtype": "float32", "tree": "chain"} == seen
