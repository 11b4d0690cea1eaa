"""The report page in headless Chromium: keys, mouse, phone, dark, and figures as files."""

from __future__ import annotations

import struct
import time
import xml.etree.ElementTree as ET

import pytest

from browser import PROGRAM, browser_page
from report_samples import PLAIN, ROW, bench, make_trace
from slipstream.report import results_page

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")
OUTPUT = "document.querySelector('.viewer.on output').textContent"
FRAME = "[...document.querySelectorAll('.viewer.on .frame.on')].map(f => f.dataset.step).join()"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    sources = results_page.Sources(
        benches=[("b.json", bench([PLAIN, ROW, ROW | {"task": "rag", "speedup": 0.9}]))],
        traces=[make_trace("first"), make_trace("second")],
    )
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(results_page.render(sources), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tab():
    with browser_page() as page:
        yield page


@pytest.fixture
def page(tab, file):
    tab.size(1100, 900)
    tab.open(file)
    tab.requests.clear()
    tab.wait("document.documentElement.classList.contains('js')")
    yield tab
    assert tab.errors == []
    assert [address for address in tab.requests if not address.startswith("data:")] == []


def test_keys_step_through_a_decoding(page):
    page.run("document.querySelector('.viewer').focus()")
    assert page.run(OUTPUT) == "step 1 of 2" and page.run(FRAME) == "0"
    for key, step in (("ArrowRight", 1), ("ArrowRight", 1), ("ArrowLeft", 0), ("End", 1),
                      ("Home", 0)):  # fmt: skip
        page.press(key)
        assert page.run(FRAME) == str(step)
    assert page.run("document.querySelectorAll('.viewer.on .turn.now').length") == 2


def test_the_slider_moves_one_step_per_key(page):
    page.run("document.querySelector('.viewer.on input').focus()")
    page.press("ArrowRight")
    assert page.run(FRAME) == "1"
    page.press("ArrowLeft")
    assert page.run(FRAME) == "0"


def test_the_mouse_steps_jumps_and_asks(page):
    page.click(".viewer.on [data-go=last]")
    assert page.run(FRAME) == "1"
    page.click('.viewer.on .turn[data-step="0"]')
    assert page.run(FRAME) == "0"
    page.click(".viewer.on .frame.on .tv g.ok")
    told = page.run("document.querySelector('.viewer.on .node').textContent")
    assert "drafted and accepted" in told and "drafter q = 0.6065" in told
    page.click(".viewer.on [data-go=on]")
    assert page.run("document.querySelector('.viewer.on .node').textContent") == ""


def test_another_decoding_can_be_chosen(page):
    page.run("""(() => { const box = document.getElementById('choose'); box.value = '1';
                 box.dispatchEvent(new Event('change')); })()""")
    assert page.run("document.querySelector('.viewer.on .prompt').textContent") == "second"
    assert page.run("document.querySelectorAll('.viewer.on').length") == 1


@pytest.mark.parametrize("is_dark", [False, True])
def test_a_phone_can_read_it(page, is_dark, tmp_path):
    page.size(360, 740, is_dark=is_dark)
    assert (
        page.run("document.documentElement.scrollWidth") <= 360
    )  # wide parts scroll by themselves
    light = page.run(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(c => c > 128)"
    )
    assert light is not is_dark
    small = page.run("Math.min(...[...document.querySelectorAll('.viewer.on button')]"
                     ".map(b => b.getBoundingClientRect().height))")  # fmt: skip
    assert small >= 30  # px, a finger
    page.screenshot(tmp_path / "phone.png")
    assert struct.unpack(">II", (tmp_path / "phone.png").read_bytes()[16:24]) == (360, 740)


def saved(folder, name):
    end = time.monotonic() + 20
    while not (folder / name).exists() or not (folder / name).stat().st_size:
        assert time.monotonic() < end, f"{name} was not saved: {list(folder.iterdir())}"
        time.sleep(0.05)
    return folder / name


@pytest.mark.parametrize(
    ("place", "name"),
    [("#bench-1-speedup", "bench-1-speedup"), (".viewer.on", "trace-1-step-1")],
)
def test_figures_are_saved_as_svg_and_png(page, tmp_path, place, name):
    page.downloads_to(tmp_path)
    page.click(f"{place} [data-save=svg]")
    root = ET.fromstring(saved(tmp_path, f"{name}.svg").read_text(encoding="utf-8"))
    assert root.tag.endswith("svg") and root.find("{http://www.w3.org/2000/svg}style") is not None
    page.click(f"{place} [data-save=png]")
    data = saved(tmp_path, f"{name}.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width == 2 * float(root.get("width")) and height == 2 * float(root.get("height"))
    assert len(set(data)) > 50  # something is drawn
