"""Answers in JSON: each token by its true bytes, also half characters; speculation as in vLLM."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from chats import PLAIN, byte_tokenizer
from slipstream.engine.request import TokenScore
from slipstream.engine.text import Verbatim
from slipstream.serve.replies import LEAST, ChatScores, CompletionScores, Spelling, speculation
from slipstream.target.tokens import TargetTokenizer

END = 257


@pytest.fixture(scope="module")
def tokenizer() -> TargetTokenizer:
    return TargetTokenizer(byte_tokenizer(PLAIN), (END,))


def test_every_byte_and_name_is_itself(tokenizer: TargetTokenizer) -> None:
    spelling = Spelling(tokenizer)
    for text in ("aé☃ \n", "<|user|>x<|end|>"):
        ids = tokenizer.inner.encode(text, add_special_tokens=False)
        assert b"".join(spelling.bytes(token) for token in ids).decode() == text
    first = tokenizer.inner.encode("☃", add_special_tokens=False)[0]
    assert spelling.text(first) == "\ufffd" and spelling.bytes(first) == b"\xe2"
    assert spelling.text(END) == "<|end|>"


def test_sentencepiece_too() -> None:
    vocabulary = {0: "<s>", **{1 + byte: f"<0x{byte:02X}>" for byte in range(256)}, 300: "▁né"}
    inner = SimpleNamespace(
        get_vocab=lambda: {token: id for id, token in vocabulary.items()},
        added_tokens_decoder={0: SimpleNamespace(content="<s>")},
    )
    spelling = Spelling(TargetTokenizer(inner))
    assert [spelling.bytes(id) for id in (0, 1 + 0xE2, 300)] == [b"<s>", b"\xe2", " né".encode()]
    assert [spelling.text(id) for id in (0, 1 + 0x41, 300)] == ["<s>", "A", " né"]


def test_a_chats_entries_have_bytes(tokenizer: TargetTokenizer) -> None:
    ids = [*tokenizer.inner.encode("é", add_special_tokens=False), END]
    scores = [TokenScore(-1.0, ((id, -0.5),)) for id in ids]
    entries = ChatScores(Spelling(tokenizer))(ids, scores)["content"]
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9], list(b"<|end|>")]
    assert [entry["token"] for entry in entries] == ["\ufffd", "\ufffd", "<|end|>"]
    assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in entries)


@pytest.mark.parametrize("keeps_special", [True, False])
def test_a_completions_offsets_are_places_in_its_text(
    tokenizer: TargetTokenizer, keeps_special: bool
) -> None:
    text = "a☃<|user|>é!"
    ids = tokenizer.inner.encode(text, add_special_tokens=False)
    decoder = Verbatim(tokenizer) if keeps_special else tokenizer
    told = CompletionScores(Spelling(tokenizer), decoder)(ids, [TokenScore(-1.0, ())] * len(ids))
    size = len("<|user|>") if keeps_special else 0
    assert told["text_offset"] == [0, 1, 1, 1, 2, 2 + size, 2 + size, 3 + size]
    assert told["tokens"][:3] == ["a", "\ufffd", "\ufffd"]


def test_the_sampled_token_is_among_the_top(tokenizer: TargetTokenizer) -> None:
    """Also with logprobs 0; and of tokens that look alike the likelier one is told."""
    a, b = tokenizer.inner.encode("ab", add_special_tokens=False)
    spelling = Spelling(tokenizer)
    scores = CompletionScores(spelling, tokenizer)
    told = scores([b, b, a], [
        TokenScore(-3.0, ((a, -0.5),)), TokenScore(-2.0, ()), TokenScore(-math.inf, ((b, -1.0),)),
    ])  # fmt: skip
    assert told["top_logprobs"] == [{"a": -0.5, "b": -3.0}, {"b": -2.0}, {"b": -1.0, "a": LEAST}]
    spelling.text = lambda token: "same"
    assert scores([b], [TokenScore(-2.0, ((a, -0.5), (b, -2.0)))])["top_logprobs"] == [
        {"same": -0.5}
    ]


def test_passes_that_drafted_nothing_are_no_steps_of_speculation() -> None:
    """Ten passes, four of which drafted three nodes each; two of them kept one, one kept two."""
    result = SimpleNamespace(
        num_draft_nodes=12, num_draft_steps=4, num_target_passes=10, num_accepted=4,
        reach=(0.3, 0.1, 0.0),
    )  # fmt: skip
    told = speculation([result, result], depth=3)
    assert told["mean_acceptance_length"] == 2.0 and told["num_spec_steps"] == 8
    assert told["acceptance_histogram"] == [2, 4, 2, 0]
    idle = SimpleNamespace(
        num_draft_nodes=0, num_draft_steps=0, num_target_passes=3, num_accepted=0, reach=()
    )
    assert speculation([result, idle], depth=3)["mean_acceptance_length"] == 2.0
    assert speculation([idle], depth=3) is None
