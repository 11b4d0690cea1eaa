import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from slipstream.data.conversations import Conversation, Message, read_rows
from slipstream.data.regenerate import regenerate
from slipstream.data.supervise import supervise
from slipstream.errors import DataError, OutputError, SettingError, TemplateRefusalError
from slipstream.types import Sampling

EOS = 0


class Letters:
    """One id per character; a chat is its turns joined by newlines."""

    eos_ids = (EOS,)
    template_mode = None

    def encode_chat(self, messages):
        if any("refuse" in m["content"] for m in messages):
            raise TemplateRefusalError("messages", "refused", "roles that alternate")
        return [ord(c) for c in "\n".join(m["content"] for m in messages)] + [10]


@dataclass
class Shouter:
    """An engine whose answer to a prompt is its last line in capitals."""

    max_length: int = 50
    dies_after: int | None = None
    calls: list = field(default_factory=list)
    target: object = field(
        default_factory=lambda: SimpleNamespace(
            spec=SimpleNamespace(name="shouter", max_length=50), tokenizer=Letters()
        )
    )

    def generate(self, prompts, *, num_rows, on_result, max_new_tokens, **sampling):
        self.calls.append((len(prompts), num_rows, sampling))
        for index in reversed(range(len(prompts))):  # the last one finishes first
            if self.dies_after is not None and self.dies_after == 0:
                raise KeyboardInterrupt
            self.dies_after = None if self.dies_after is None else self.dies_after - 1
            prompt = prompts[index]
            assert len(prompt) < self.max_length
            text = "".join(map(chr, prompt)).strip().split("\n")[-1].upper()
            ids = [*map(ord, text), EOS][:max_new_tokens]
            is_error = text.startswith("BREAK")
            on_result(
                SimpleNamespace(
                    prompt_index=index,
                    prompt_ids=tuple(prompt),
                    token_ids=() if is_error else tuple(ids),
                    text=text[:max_new_tokens],
                    finish_reason="error" if is_error else "stop" if ids[-1] == EOS else "length",
                    error="NaN" if is_error else None,
                )
            )


def prompts(*texts):
    return [Conversation(str(i), (Message("user", t),), source="s") for i, t in enumerate(texts)]


def rows_of(path):
    return {r["id"]: r for r in map(json.loads, path.read_text().splitlines())}


def test_rows_have_the_answers_format(tmp_path):
    out = tmp_path / "answers.jsonl"
    report = regenerate(Shouter(), prompts("hé", "longer than six"), out, max_new_tokens=6)
    rows = rows_of(out)
    assert list(rows["0"]) == [
        "id", "source", "prompt_ids", "response_ids", "finish", "messages"
    ]  # fmt: skip
    assert rows["0"]["response_ids"] == [ord("H"), ord("É"), EOS]
    assert (rows["0"]["finish"], rows["1"]["finish"]) == ("stop", "length")
    assert rows["0"]["messages"][-1] == {"role": "assistant", "content": "HÉ"}
    assert (report.rows, report.tokens, report.bytes) == (2, 9, out.stat().st_size)
    assert report.counts["truncated_answers"] == 1
    read = {r.id: r for r in read_rows(out)}  # what we write we read
    made = supervise(read["0"], None, max_length=99)
    assert made.tokens == [ord("h"), ord("é"), 10, ord("H"), ord("É"), EOS]
    assert made.mask == [False] * 3 + [True] * 3


def test_several_turns_are_answered_turn_by_turn(tmp_path):
    out = tmp_path / "answers.jsonl"
    talk = Conversation(
        "x",
        (
            Message("system", "sys"),
            Message("user", "a"),
            Message("assistant", "somebody else's"),
            Message("user", "b"),
        ),
    )
    report = regenerate(Shouter(), [talk, *prompts("q")], out)
    rows = rows_of(out)
    assert set(rows) == {"x", "x:2", "0"} and report.rows == 3
    assert [m["content"] for m in rows["x:2"]["messages"]] == ["sys", "a", "A", "b", "B"]
    assert rows["x:2"]["prompt_ids"] == [ord(c) for c in "sys\na\nA\nb\n"]
    kept = tmp_path / "kept.jsonl"
    regenerate(Shouter(), [talk], kept, keep_history=True)
    assert [m["content"] for m in rows_of(kept)["x"]["messages"]] == [
        "sys", "a", "somebody else's", "b", "B"
    ]  # fmt: skip


@pytest.mark.parametrize("change", ["mode", "template", "history"])
def test_answers_under_another_template_or_history_are_not_mixed(tmp_path, change):
    out, engine = tmp_path / "answers.jsonl", Shouter()
    tokenizer = engine.target.tokenizer
    tokenizer.fingerprint, tokenizer.template_mode = "abc", {"enable_thinking": True}
    regenerate(engine, prompts("a"), out)
    assert regenerate(engine, prompts("a", "b"), out).rows == 1
    if change == "mode":
        tokenizer.template_mode = {"enable_thinking": False}
    elif change == "template":
        tokenizer.fingerprint = "def"
    with pytest.raises(OutputError, match=r"was made with (template|keep_history)"):
        regenerate(engine, prompts("a", "b", "c"), out, keep_history=change == "history")
    assert len(rows_of(out)) == 2


def test_a_killed_run_resumes_to_the_same_rows(tmp_path):
    texts = [Conversation("x", (Message("user", "a"), Message("user", "b")))]
    texts += prompts(*[f"prompt {i}" for i in range(40)])
    whole = tmp_path / "whole.jsonl"
    regenerate(Shouter(), texts, whole, num_rows=1)
    out = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        regenerate(Shouter(dies_after=16), texts, out, num_rows=1)  # dies between x and x:2
    assert "x" in rows_of(out) and "x:2" not in rows_of(out) and len(rows_of(out)) == 16
    half = out.read_bytes()
    out.write_bytes(half + b'{"id": "7", "source": "s", "prompt_i')
    engine = Shouter()
    report = regenerate(engine, texts, out, num_rows=1)
    assert rows_of(out) == rows_of(whole)
    assert out.read_bytes().startswith(half)
    assert report.rows == 42 - 16 and report.counts["already_there"] == 15
    again = Shouter()
    assert regenerate(again, texts, out).rows == 0 and again.calls == []


def test_an_existing_file_is_not_touched_without_resume(tmp_path):
    out = tmp_path / "answers.jsonl"
    out.write_text("mine\n")
    with pytest.raises(OutputError, match="exists"):
        regenerate(Shouter(), prompts("a"), out, resume=False)
    with pytest.raises(DataError, match="line 1: not a row of an answers file"):
        regenerate(Shouter(), prompts("a"), out, resume=True)
    assert out.read_text() == "mine\n"
    with pytest.raises(OutputError, match="cannot be written"):
        regenerate(Shouter(), prompts("a"), out / "below.jsonl")


def test_other_settings_cannot_be_mixed_in(tmp_path):
    out = tmp_path / "answers.jsonl"
    regenerate(Shouter(), prompts("a"), out)
    before = out.read_bytes()
    with pytest.raises(OutputError, match=r"temperature 0.0, this run has 0.7"):
        regenerate(Shouter(), prompts("a", "b"), out, sampling=Sampling(temperature=0.7))
    assert out.read_bytes() == before


def test_sampled_rows_say_so(tmp_path):
    out = tmp_path / "answers.jsonl"
    engine = Shouter()
    regenerate(engine, prompts("a"), out, sampling=Sampling(temperature=0.7, top_p=0.9, seed=5))
    assert engine.calls[0][2] == {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "seed": 5}
    (row,) = read_rows(out)
    assert row.temperature == 0.7


def test_what_cannot_be_answered_is_counted(tmp_path):
    out = tmp_path / "answers.jsonl"
    rows = prompts("a" * 48, "a" * 49, "refuse me", "break", "fine", "loop " * 8)
    rows += [rows[0], Conversation("s", (Message("system", "only"),))]
    report = regenerate(Shouter(), rows, out)
    assert report.counts == {
        "long_prompts_skipped": 1,
        "refused_by_template": 1,
        "failed": 1,
        "duplicates_skipped": 1,
        "no_user_turn": 1,
        "truncated_answers": 0,
        "loops": 2,
    }
    assert set(rows_of(out)) == {"0", "4", "5"}


def test_progress_limit_and_batches(tmp_path):
    seen = []
    engine = Shouter()
    report = regenerate(
        engine,
        prompts(*"abcdef"),
        tmp_path / "a.jsonl",
        num_rows=3,
        limit=4,
        on_progress=seen.append,
    )
    assert engine.calls[0][:2] == (4, 3)
    assert [(p.rows, p.done, p.total, p.tokens) for p in seen] == [
        (i, i, 4, 2 * i) for i in (1, 2, 3, 4)
    ]
    assert seen[-1].remaining_seconds == 0 and seen[0].remaining_seconds > 0
    assert report.tokens_per_second == pytest.approx(8 / report.seconds)


def test_token_rows_can_be_answered_again(tmp_path):
    out = tmp_path / "answers.jsonl"
    row = Conversation("t", (), prompt_ids=(97, 98), response_ids=(1,))
    regenerate(Shouter(), [row], out)
    assert rows_of(out)["t"]["response_ids"] == [65, 66, EOS]


def test_bad_settings(tmp_path):
    for settings in ({"max_new_tokens": 0}, {"num_rows": 0}, {"limit": 0}):
        with pytest.raises(SettingError, match="1 or more"):
            regenerate(Shouter(), prompts("a"), tmp_path / "a.jsonl", **settings)
    with pytest.raises(DataError, match="no prompts"):
        regenerate(Shouter(), [], tmp_path / "a.jsonl")
    assert list(tmp_path.iterdir()) == []
