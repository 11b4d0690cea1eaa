"""The detokeniser: whole characters, short windows, any tokenizer habit. Bug report B129."""

from __future__ import annotations

import random

import pytest

from fakes import ByteTokenizer
from slipstream.engine.text import MAX_HELD, Detokenizer, TextStream
from slipstream.errors import SettingError


class PiecesDecoder:
    """SentencePiece habits: a leading space is dropped, and a run of byte pieces that is not
    valid as a whole shows one U+FFFD per byte."""

    def __init__(self) -> None:
        self.words = {300: " Hello", 301: " world", 302: "!", 303: " 中"}
        self.longest = 0

    def decode(self, ids: list[int]) -> str:
        self.longest = max(self.longest, len(ids))
        text, run = "", b""
        for token in [*ids, None]:
            if token is not None and token < 256:
                run += bytes([token])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run = b""
            text += self.words.get(token, "")
        return text.removeprefix(" ")


def joined(decoder: object, ids: list[int], cuts: list[int]) -> str:
    detokenizer, pieces, at = Detokenizer(decoder), [], 0
    for size in cuts:
        pieces.append(detokenizer.push(ids[at : at + size]))
        at += size
    return "".join(pieces) + detokenizer.flush()


@pytest.mark.parametrize("seed", range(30))
def test_any_cut_of_bytes_gives_the_whole(seed: int) -> None:
    chooser = random.Random(seed)
    text = "".join(chooser.choice("ab é中🙂\n") for _ in range(200))
    ids, cuts = list(text.encode()), []
    while sum(cuts) < len(ids):
        cuts.append(chooser.randint(0, 13))
    assert joined(ByteTokenizer(), ids, cuts) == text


@pytest.mark.parametrize("size", range(1, 9))
def test_sentencepiece_habits(size: int) -> None:
    decoder = PiecesDecoder()
    ids = [300, 301, *"é中🙂".encode(), 302, *"中".encode(), 303, 301, 300] * 6
    cuts = [size] * (len(ids) // size + 1)
    assert joined(decoder, ids, cuts) == decoder.decode(ids)


def test_a_step_decodes_a_short_window() -> None:
    decoder = PiecesDecoder()
    detokenizer = Detokenizer(decoder)
    for _ in range(500):
        detokenizer.push([301, 302, 303])
    assert decoder.longest <= 6


def test_invalid_text_is_held_a_while_only() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    pieces = [detokenizer.push([0xFF]) for _ in range(3 * MAX_HELD)]
    assert "".join(pieces).count("\ufffd") >= 2 * MAX_HELD
    assert max(map(len, pieces)) <= MAX_HELD + 1


def test_nothing_is_nothing() -> None:
    stream = TextStream(ByteTokenizer(), ["x"])
    stream.push([])
    stream.finish()
    assert stream.take() == stream.text == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(SettingError, match="non-empty"):
        TextStream(ByteTokenizer(), ["a", ""])


def test_what_a_caller_watches_for_ends_the_text_with_its_piece() -> None:
    told: list[str] = []

    def is_over(piece: str) -> bool:
        told.append(piece)
        return "".join(told).count("x") == 2

    stream = TextStream(ByteTokenizer(), ["yz"], is_over)
    for letter in b"axyaxyz":
        stream.push([letter])
    stream.finish()
    assert stream.is_stopped and stream.text == "".join(told) == "axyax"


def test_text_after_a_stop_is_dropped() -> None:
    stream = TextStream(ByteTokenizer(), ["##", "END"])
    stream.push(b"say ")
    assert stream.take() == "say "
    stream.push(b"E")
    assert stream.take() == ""
    stream.push(b"Nz#")
    assert stream.take() == "ENz"
    stream.push(b"# more ENDless")
    stream.push(b"and more")
    stream.finish()
    assert stream.is_stopped and stream.take() == "" and stream.text == "say ENz"
