import gzip
import json
from dataclasses import replace

import pytest

from chats import (
    CHINESE_ROLES,
    DROPS_LAST_THOUGHT,
    EMPTY_THOUGHTS,
    OPENS_THOUGHTS,
    OWN_BOS,
    PLAIN,
    STAYS_IN_THOUGHTS,
    STRIPS_THOUGHTS,
    TAGGED,
    TAGS_THE_END,
    TAGS_THE_TURN,
    TEXT_MARKERS,
    TOOLS,
    byte_tokenizer,
)
from slipstream.data.conversations import Conversation, Message, read_rows
from slipstream.data.loops import ends_in_loop
from slipstream.data.supervise import supervise
from slipstream.errors import DataError


class Wrapped:
    """The target's wrapper, as much of it as templates need."""

    def __init__(self, inner, **template_mode):
        self.inner = inner
        self.eos_ids = ()
        self.template_mode = template_mode


def chat(*turns):
    roles = ("user", "assistant")
    return Conversation("x", tuple(Message(roles[i % 2], t) for i, t in enumerate(turns)))


def supervised_text(tokenizer, row):
    """Decoded runs of the mask."""
    runs, current = [], []
    for token, is_on in zip([*row.tokens, -1], [*row.mask, False], strict=True):
        if is_on:
            current.append(token)
        elif current:
            runs.append(tokenizer.decode(current))
            current = []
    return runs


def served(tokenizer, messages, **mode):
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **mode
    )


def write(tmp_path, text, name="rows.jsonl"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


DIALECTS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b"},
        ]
    },
]


@pytest.mark.parametrize("row", DIALECTS)
def test_every_dialect_gives_the_same_conversation(tmp_path, row):
    (read,) = read_rows(write(tmp_path, json.dumps(row)))
    assert read.messages == (Message("user", "a"), Message("assistant", "b"))
    assert read.id == "rows:1"


def test_prompt_dialects_and_token_rows(tmp_path):
    rows = [
        {"id": 81, "task": "writing", "turns": ["one", "two"]},
        {"prompt": "one"},
        {"id": "t", "prompt_ids": [1, 2], "response_ids": [3], "finish": "length"},
    ]
    first, second, third = read_rows(write(tmp_path, "\n".join(map(json.dumps, rows))))
    assert (first.id, first.source) == ("81", "writing")
    assert [m.content for m in first.messages] == ["one", "two"] and not first.has_answer
    assert second.messages == (Message("user", "one"),)
    assert (third.prompt_ids, third.response_ids, third.finish) == ((1, 2), (3,), "length")


def test_an_answer_that_calls_tools_is_kept_as_history_and_not_half_learned(tmp_path):
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    said = {"type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    turns = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "content": "12:00", "tool_call_id": "c1"},
        {"role": "assistant", "content": "noon", "tool_calls": []},
    ]
    path = write(tmp_path, json.dumps({"prompt": "x"}) + "\n" + json.dumps({"messages": turns}))
    _, row = read_rows(path)
    assert row.messages[1].to_dict() == turns[1] | {"content": "", "tool_calls": [call]}
    assert row.messages[2].to_dict() == turns[2]
    assert all(Message.from_dict(m.to_dict()) == m for m in row.messages)
    tokenizer = byte_tokenizer(TOOLS)
    with pytest.raises(DataError, match=r"row rows:2 \(line 2\): an answer has tool_calls"):
        supervise(row, tokenizer, max_length=999)
    last = supervise(row, tokenizer, max_length=999, last_turn_only=True)
    assert supervised_text(tokenizer, last) == ["noon<|end|>"]
    assert '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}' in tokenizer.decode(
        last.tokens
    )
    cut = replace(row, messages=row.messages[:3])  # the call is the last answer now
    with pytest.raises(DataError, match="an answer has tool_calls"):
        supervise(cut, tokenizer, max_length=999, last_turn_only=True)
    turns[1]["tool_calls"] = [{"function": {"name": "now", "arguments": "{"}}]
    with pytest.raises(DataError, match=r"line 1: arguments in messages\[1\].tool_calls"):
        list(read_rows(write(tmp_path, json.dumps({"messages": turns}))))
    turns[1]["tool_calls"] = "now()"
    with pytest.raises(DataError, match=r"line 1: messages\[1\].tool_calls is text"):
        list(read_rows(write(tmp_path, json.dumps({"messages": turns}))))


def test_bom_crlf_blank_lines_and_odd_unicode(tmp_path):
    text = '\ufeff{"prompt": "a"}\r\n\r\n   \r\n'.encode()
    text += json.dumps({"prompt": "é\u2028😀"}, ensure_ascii=False).encode() + b"\r\n"
    text += b'{"prompt": "lone \\ud800 half"}\n'
    rows = list(read_rows(write(tmp_path, text)))
    assert [r.messages[0].content for r in rows] == ["a", "é\u2028😀", "lone � half"]
    assert [r.line for r in rows] == [1, 4, 5]


def test_gzip_and_limit(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n{"prompt": "b"}\nnot json\n'))
    assert [r.id for r in read_rows(path, limit=2)] == ["rows:1", "rows:2"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "x"', "not valid JSON"),
        ('[{"prompt": "x"}]', "one JSON array|found a list"),
        ("[" * 100_000, "not valid JSON"),
        ("17", "the number 17"),
        ('{"text": "x", "is_preformatted": true}', "pre-formatted"),
        ('{"question": "x"}', "found question"),
        ('{"messages": []}', "empty list"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\] has role"),
        ('{"messages": [{"role": "user", "content": null}]}', "null, expected text"),
        ('{"messages": [{"role": "oracle", "content": "x"}]}', "'oracle'"),
        ('{"prompt_ids": [1]}', "response_ids is missing"),
        ('{"prompt_ids": [1.5], "response_ids": []}', "prompt_ids"),
        ('{"prompt_ids": [], "response_ids": [1]}', "prompt_ids is empty"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path, b'{"prompt": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=says) as caught:
        list(read_rows(path))
    assert "rows.jsonl, line 2" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "\n\n \n", "\ufeff"])
def test_an_empty_file_is_an_error(tmp_path, text):
    with pytest.raises(DataError, match="no rows"):
        list(read_rows(write(tmp_path, text)))


def test_a_missing_file_and_a_broken_gzip(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        list(read_rows(tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match="cannot be read"):
        list(read_rows(write(tmp_path, b"not gzip", "rows.jsonl.gz")))
    cut = gzip.compress(b'{"prompt": "a"}\n' * 99)[:30]
    with pytest.raises(DataError, match="cannot be read"):
        list(read_rows(write(tmp_path, cut, "cut.jsonl.gz")))


@pytest.mark.parametrize(
    "template", [PLAIN, TAGGED, OWN_BOS, TAGS_THE_TURN, TAGS_THE_END], ids=["b", "a", "e", "t", "d"]
)
def test_mask_covers_answers_and_end_of_turn_only(template):
    tokenizer = byte_tokenizer(template)
    row = supervise(chat("hi", "héllo", "more?", "是😀"), tokenizer, max_length=999)
    assert supervised_text(tokenizer, row) == ["héllo<|end|>", "是😀<|end|>"]
    is_tagged = "generation %}" in template
    assert row.template_mode == ("generation tags" if is_tagged else "prefix rendering")
    assert row.num_supervised == 6 + 1 + 7 + 1
    assert row.tokens.count(tokenizer.bos_token_id) == (1 if template is OWN_BOS else 0)


@pytest.mark.parametrize(
    ("template", "mode"),
    [
        (PLAIN, {}),
        (TAGGED, {}),
        (TAGS_THE_TURN, {}),
        (TAGS_THE_END, {}),
        (STRIPS_THOUGHTS, {}),
        (EMPTY_THOUGHTS, {}),
        (EMPTY_THOUGHTS, {"enable_thinking": False}),
        (EMPTY_THOUGHTS, {"enable_thinking": True}),
        (OWN_BOS, {}),
        (CHINESE_ROLES, {}),
        (TEXT_MARKERS, {}),
    ],
)
def test_the_training_row_begins_with_the_served_prompt(template, mode):
    """B93: equal ids up to the answer, in every mode of the template."""
    tokenizer = byte_tokenizer(template)
    row = chat("hi", "<think>hm</think>one", "more?", "two")
    messages = [m.to_dict() for m in row.messages]
    trained = supervise(row, Wrapped(tokenizer, **mode), max_length=999)
    prompt = served(tokenizer, messages[:3], **mode)
    assert trained.tokens[: len(prompt)] == prompt
    assert not any(trained.mask[len(prompt) - 5 : len(prompt)])
    assert all(trained.mask[len(prompt) :])
    answer = tokenizer.decode(trained.tokens[len(prompt) :])
    assert answer == ("two" if template is TEXT_MARKERS else "two<|end|>")


def test_an_opened_thought_block_is_closed_or_told():
    """A row may not answer inside a block that its prompt has opened."""
    tokenizer = byte_tokenizer(OPENS_THOUGHTS)
    row = supervise(chat("hi", "one"), tokenizer, max_length=999)
    prompt = served(tokenizer, [{"role": "user", "content": "hi"}])
    assert row.tokens[: len(prompt)] == prompt
    assert supervised_text(tokenizer, row) == ["\n</think>\n\none<|end|>"]
    with pytest.raises(DataError, match="row x: the chat template rewrites the last answer"):
        supervise(chat("hi", "one"), byte_tokenizer(STAYS_IN_THOUGHTS), max_length=999)


def test_tagged_history_that_is_rewritten_is_left_out_and_counted():
    """The served prompt of the first answer has thoughts, which the template drops from history."""
    drops = TAGGED.replace("m['content'] }}{% end", "m['content'].split('</t>')[-1] }}{% end", 1)
    drops = drops.replace("<|assistant|>{% endif", "<|assistant|>{% if messages|length == 1 %}<t>"
                          "{% endif %}{% endif")  # fmt: skip
    tokenizer = byte_tokenizer(drops)
    row = supervise(chat("hi", "one", "more?", "two"), tokenizer, max_length=999)
    assert row.template_mode == "generation tags" and row.num_skipped_turns == 1
    assert supervised_text(tokenizer, row) == ["two<|end|>"]


def test_a_tagged_row_ends_with_its_turn_so_that_loops_are_seen():
    row = supervise(chat("hi", "la " * 20), byte_tokenizer(TAGS_THE_END), max_length=999)
    assert ends_in_loop(row.tokens)


def test_rewritten_history_is_left_out_and_counted():
    tokenizer = byte_tokenizer(STRIPS_THOUGHTS)
    row = supervise(chat("hi", "<think>hm</think>one", "more?", "two"), tokenizer, max_length=999)
    assert supervised_text(tokenizer, row) == ["two<|end|>"]
    assert row.num_skipped_turns == 1
    row = supervise(chat("hi", "one", "more?", "two"), tokenizer, max_length=999)
    assert supervised_text(tokenizer, row) == ["one<|end|>", "two<|end|>"]
    assert row.num_skipped_turns == 0
    talk = chat("hi", "<think>hm</think>one", "more?", "two", "and?", "three")
    row = supervise(talk, tokenizer, max_length=999)
    assert supervised_text(tokenizer, row) == ["two<|end|>", "three<|end|>"]
    assert row.num_skipped_turns == 1


def test_a_token_across_the_border_of_an_earlier_answer_keeps_the_served_ids():
    tokenizer = byte_tokenizer(TEXT_MARKERS, merges=[("\u0120", "o")])  # " o" is one token
    row = chat("hi", "one", "more?", "two")
    made = supervise(row, tokenizer, max_length=999)
    prompt = served(tokenizer, [m.to_dict() for m in row.messages[:3]])
    assert made.tokens[: len(prompt)] == prompt
    assert supervised_text(tokenizer, made) == ["two"] and made.num_skipped_turns == 1
    whole = supervise(chat("hi", "eno", "more?", "two"), tokenizer, max_length=999)
    assert supervised_text(tokenizer, whole) == ["eno", "two"] and whole.num_skipped_turns == 0


def test_a_template_that_rewrites_the_last_answer_is_an_error():
    with pytest.raises(DataError, match="row x: the chat template rewrites the last answer"):
        supervise(
            chat("hi", "<think>hm</think>one"),
            byte_tokenizer(DROPS_LAST_THOUGHT),
            max_length=999,
        )


def test_a_template_without_the_assistant_is_an_error():
    blind = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="does not show the assistant's text"):
        supervise(chat("hi", "one"), byte_tokenizer(blind), max_length=999)


def test_a_template_that_refuses_is_an_error():
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"refuses the roles .*roles must alternate"):
        supervise(chat("hi", "one"), byte_tokenizer(strict), max_length=999)
    with pytest.raises(DataError, match="no chat template"):
        supervise(chat("hi", "one"), byte_tokenizer(None), max_length=999)


@pytest.mark.parametrize("answer", ["", "end", "<", "slip", " spaced ", "a\n\nb", "assistant"])
@pytest.mark.parametrize("template", [PLAIN, TAGGED, CHINESE_ROLES, EMPTY_THOUGHTS])
def test_masked_tokens_are_as_many_as_by_construction(template, answer):
    """B95: odd role markers and odd answers; an empty answer still teaches the end of turn."""
    row = supervise(chat("hi", answer), byte_tokenizer(template), max_length=999)
    assert row.num_supervised == len(answer.encode()) + 1


def test_last_turn_only():
    for template in (PLAIN, TAGGED, TAGS_THE_TURN, TAGS_THE_END):
        tokenizer = byte_tokenizer(template)
        row = supervise(
            chat("hi", "one", "more?", "two"), tokenizer, max_length=999, last_turn_only=True
        )
        assert supervised_text(tokenizer, row) == ["two<|end|>"]


def test_token_rows_need_no_tokenizer_and_are_cut():
    row = Conversation("t", (), prompt_ids=(5, 6), response_ids=(7, 8, 9))
    whole = supervise(row, None, max_length=5)
    assert (whole.tokens, whole.mask) == ([5, 6, 7, 8, 9], [False, False, True, True, True])
    assert not whole.is_truncated
    cut = supervise(row, None, max_length=3)
    assert (cut.tokens, cut.mask, cut.is_truncated) == ([5, 6, 7], [False, False, True], True)


def test_prompts_alone_have_nothing_to_learn():
    with pytest.raises(DataError, match="nothing to learn"):
        supervise(chat("hi"), byte_tokenizer(PLAIN), max_length=9)


def test_long_rows_take_seconds_not_minutes():
    """B120: 20 rows of 40,000 tokens."""
    tokenizer = byte_tokenizer(PLAIN)
    text = "word " * 4000
    for _ in range(20):
        row = supervise(chat(text, text), tokenizer, max_length=40_000)
        assert len(row.tokens) == 40_000 and row.is_truncated
