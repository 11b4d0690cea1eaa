"""The chat page: one file without other addresses; in a browser it talks, marks and switches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

import pytest

from browser import PROGRAM, browser_page
from serving import Running, plain_twin, running, tiny_engine

PAGE = files("slipstream.serve").joinpath("page.html").read_text("utf-8")
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")
ANSWER = "[...document.querySelectorAll('.answer')].map(each => each.textContent)"


def test_the_page_is_whole() -> None:
    assert not re.findall(r"(?:https?:)?//[\w.]", re.sub(r"(?m)// .*$", "", PAGE))
    assert re.findall(r'(?:src|href)="([^"]*)"', PAGE) == ["data:,"]
    used = set(re.findall(r'\$\("(\w+)"\)', PAGE))
    assert used and used <= set(re.findall(r'id="(\w+)"', PAGE))
    assert 'name="viewport"' in PAGE and "prefers-color-scheme: dark" in PAGE
    assert "innerHTML" not in PAGE, "what the model says is text, never markup"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(tiny_engine(), num_rows=2) as found:
        yield found


@pytest.fixture(scope="module")
def tab() -> Iterator[object]:
    with browser_page() as page:
        yield page


def open_page(tab: object, served: Running) -> None:
    tab.call("Page.navigate", url=served.url)
    tab.wait(
        "document.readyState === 'complete' && !!document.getElementById('model')?.textContent"
    )


def say(tab: object, words: str) -> str:
    """Send a message and wait for the note below its answer."""
    count = tab.run("document.querySelectorAll('.note').length")
    tab.run(f"document.getElementById('prompt').value = {words!r}")
    tab.click("#send")
    tab.wait(f"document.querySelectorAll('.note').length > {count}")
    return tab.run(f"{ANSWER}.at(-1)")


@needs_browser
def test_a_chat_in_the_browser(tab: object, served: Running) -> None:
    tab.size(1000, 800)
    open_page(tab, served)
    assert tab.run("document.getElementById('model').textContent") == "tiny"
    assert tab.run("document.getElementById('method').textContent") == "ngram"
    first = say(tab, "abc abc abc")
    chat = [{"role": "user", "content": "abc abc abc"}]
    twin = plain_twin(served.server.engine)
    expected = twin.generate(chat, max_new_tokens=256)
    assert first == expected.text
    assert tab.run("document.querySelectorAll('.answer .drafted').length") > 0
    assert tab.run("document.querySelectorAll('.answer .own').length") > 0
    assert tab.run("Number(document.getElementById('tau').textContent)") > 1
    assert tab.run("Number(document.getElementById('rate').textContent)") > 0
    tab.click("#clear")
    assert tab.run(f"{ANSWER}.length") == 0
    tab.click("#speculate")
    assert say(tab, "abc abc abc") == first, "speculation changes nothing"
    assert tab.run("document.querySelectorAll('.answer .drafted').length") == 0
    assert tab.run("document.getElementById('tau').textContent") == "1.00"
    assert {url.split("/")[2] for url in tab.requests if url[:4] == "http"} == {served.url[7:]}
    assert tab.errors == []


@needs_browser
@pytest.mark.parametrize("is_dark", [False, True])
def test_a_phone_shows_it_without_scrolling_sideways(
    tab: object, served: Running, is_dark: bool
) -> None:
    tab.size(360, 640, is_dark=is_dark)
    open_page(tab, served)
    say(tab, "x" * 90)
    assert tab.run("document.documentElement.scrollWidth") <= 360
    box = "document.getElementById('send').getBoundingClientRect()"
    assert tab.run(f"{box}.bottom") <= 640 and tab.run(f"{box}.height") >= 40
    assert tab.errors == []


@needs_browser
def test_a_new_chat_amid_an_answer_starts_empty(tab: object) -> None:
    """What the old chat's answer had said is no part of the new one."""
    with running(tiny_engine(seconds=0.05), num_rows=2) as served:
        tab.size(1000, 800)
        open_page(tab, served)
        tab.run("document.getElementById('prompt').value = 'abc abc abc'")
        tab.click("#send")
        tab.wait(f"{ANSWER}.length === 1 && {ANSWER}[0].length > 2")
        tab.click("#clear")
        tab.wait("!document.getElementById('send').disabled")
        assert tab.run("messages.length") == 0 and tab.run(f"{ANSWER}.length") == 0
        first = say(tab, "abc abc abc")
        chat = [{"role": "user", "content": "abc abc abc"}]
        twin = plain_twin(served.server.engine)
        assert first == twin.generate(chat, max_new_tokens=256).text
        assert tab.run("messages.map(each => each.role).join()") == "user,assistant"
        assert tab.errors == []


@needs_browser
def test_a_refusal_is_shown(tab: object, served: Running) -> None:
    tab.size(1000, 800)
    open_page(tab, served)
    tab.run("document.getElementById('temperature').value = '-1'")
    tab.run("document.getElementById('temperature').removeAttribute('min')")
    say(tab, "ab")
    assert "temperature" in tab.run("document.querySelector('.error').textContent")
