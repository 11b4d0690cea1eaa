"""Streamed pieces join to the whole: text, tokens and result, whole characters only.

Bug reports B27, B33, B35, B129.
"""

from __future__ import annotations

import pytest

from fakes import ByteTokenizer, OracleDrafter, ScriptTarget
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.verify.walk import walk

TEXT = "naïve 中文字 🙂🙃 done. 这是。 Ünïcödé — end"
PROMPT = [10, 20, 30]


def engine_for(text: str | bytes, *, depth: int, eos_ids: tuple[int, ...] = (256,)) -> Engine:
    """An engine that says `text`, then the end id, drafting `depth` right tokens a step."""
    said = text if isinstance(text, bytes) else text.encode()
    script = [*said, 256]
    target = ScriptTarget(
        script, len(PROMPT), vocab_size=257, eos_ids=eos_ids, tokenizer=ByteTokenizer()
    )
    drafter = OracleDrafter([PROMPT + script], depth=depth) if depth else NoDrafter()
    return Engine(target, drafter, walk)


@pytest.mark.parametrize("depth", range(12))
def test_pieces_join_to_the_text(depth: int) -> None:
    """B129: steps that end in every possible byte."""
    pieces = list(engine_for(TEXT, depth=depth).stream(PROMPT))
    assert "".join(piece.text for piece in pieces) == TEXT
    assert all("\ufffd" not in piece.text for piece in pieces)
    result = pieces[-1].result
    assert [piece.result for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert sum((piece.token_ids for piece in pieces), ()) == result.token_ids
    assert result.text == TEXT and result.finish_reason == "stop"
    assert result.token_ids == (*TEXT.encode(), 256)


@pytest.mark.parametrize("cap", range(1, 30))
def test_a_cap_inside_a_character_flushes_what_there_is(cap: int) -> None:
    engine = engine_for(TEXT, depth=3)
    pieces = list(engine.stream(PROMPT, max_new_tokens=cap))
    whole = TEXT.encode()[:cap]
    assert "".join(p.text for p in pieces) == whole.decode(errors="replace")
    assert pieces[-1].result.token_ids == tuple(whole)


@pytest.mark.parametrize("depth", [0, 3, 12])
@pytest.mark.parametrize("stop", ["字", " done", "🙂", "end", "n", "ï", "zzz", ["end", "中文"]])
def test_text_is_cut_at_the_first_stop_string(stop: str | list[str], depth: int) -> None:
    """B33: early in an accepted run, across steps, on a multi-byte character."""
    stops = [stop] if isinstance(stop, str) else stop
    places = [TEXT.find(s) for s in stops if s in TEXT]
    expected = TEXT[: min(places)] if places else TEXT
    pieces = list(engine_for(TEXT, depth=depth).stream(PROMPT, stop=stop))
    result = pieces[-1].result
    assert "".join(p.text for p in pieces) == result.text == expected
    assert result.finish_reason == "stop"
    shown = ""
    for piece in pieces:
        shown += piece.text
        assert expected.startswith(shown), "a piece held part of a stop string"
    if places:  # the token that completes the stop string is the last one
        first = min((TEXT.find(s), s) for s in stops if s in TEXT)[1]
        assert bytes(result.token_ids) == (expected + first).encode()


@pytest.mark.parametrize("offset", range(11))
def test_a_stop_string_is_found_at_every_offset(offset: int) -> None:
    """B35: two ids at each place of accepted runs of 5, also straddling two steps."""
    text = "." * offset + "##" + "." * 9
    result = engine_for(text, depth=5).generate(PROMPT, stop="##")
    assert result.text == "." * offset
    assert len(result.token_ids) == offset + 2


def test_stopping_does_not_depend_on_the_drafter() -> None:
    for stop in ("文字 🙂", "Ünïcödé", "e"):
        results = [engine_for(TEXT, depth=d).generate(PROMPT, stop=stop) for d in range(10)]
        assert len({(r.token_ids, r.text, r.finish_reason) for r in results}) == 1


def test_a_started_stop_string_that_is_not_one_is_released() -> None:
    text = "aab aabb ab end"
    pieces = list(engine_for(text, depth=0).stream(PROMPT, stop=["aabbb", "endless"]))
    assert "".join(p.text for p in pieces) == text


def test_invalid_bytes_do_not_hold_the_text_for_ever() -> None:
    said = b"ok" + b"\xff" * 100 + b" fine"
    pieces = list(engine_for(said, depth=2).stream(PROMPT))
    assert "".join(p.text for p in pieces) == said.decode(errors="replace")
    assert any(p.text.startswith("\ufffd") for p in pieces[:-1])


def test_an_abandoned_stream_gives_its_row_back() -> None:
    engine = engine_for(TEXT, depth=3)
    stream = engine.stream(PROMPT)
    next(stream)
    next(stream)
    stream.close()
    assert engine.drafter.rows == set()
    assert engine.target.caches[0].lengths == [0]
    assert engine.generate(PROMPT).text == TEXT


def test_two_streams_at_once_do_not_share_rows() -> None:
    engine = engine_for(TEXT, depth=3)
    both = [engine.stream(PROMPT), engine.stream(PROMPT)]
    texts = ["", ""]
    for pieces in zip(*both, strict=True):
        for i, piece in enumerate(pieces):
            texts[i] += piece.text
    assert texts == [TEXT, TEXT]
