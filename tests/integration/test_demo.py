"""The demo end to end on a tiny model: the table, and a page that opens with no network."""

import json
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from slipstream.report import MARK

VOID = {"meta", "br", "link", "img", "hr", "input", "rect", "path", "line", "circle", "polyline"}


class Page(HTMLParser):
    """Collects what a page would load, and checks that tags close in order."""

    def __init__(self):
        super().__init__()
        self.loads, self.open, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href"):
                self.loads.append((tag, name, value))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def parse(path):
    html = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    return html, page


@pytest.fixture
def demo(slipstream, model, drafter, tmp_path):
    def run(*arguments, output=tmp_path / "page.html"):
        code, out, err = slipstream(
            *("demo", "--model", model, "--drafter", drafter, "--dtype", "float32"),
            *("--max-new-tokens", "24", "--output", output, *arguments),
        )
        return code, out, err, output

    return run


def test_json_rows_and_page(demo):
    code, out, err, output = demo("--json")
    assert code == 0, err
    value = json.loads(out)
    assert value["page"] == str(output.resolve())
    assert [row["method"] for row in value["rows"]] == ["none", "ngram", "eagle3", "eagle3+lookup"]
    for row in value["rows"]:
        assert row["identical"] is True
        assert row["tau"] >= 1 and row["tokens_per_second"] > 0 and row["speedup"] > 0
    assert value["rows"][0]["speedup"] == 1.0


def test_the_page_is_self_contained(demo):
    code, _, err, output = demo("--prompt", "<script>alert('x')</script> & 水")
    assert code == 0, err
    html, page = parse(output)
    assert MARK in html[:4096]
    assert page.loads == []
    assert "@import" not in html and "url(" not in html
    tags = [tag for tag, _ in page.tags]
    assert "script" not in tags and "link" not in tags and "iframe" not in tags
    assert "&lt;script&gt;" in html
    trees = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("class") == "tv"]
    assert len(trees) == 5  # three steps, a narrow and a wide one


def test_people_see_the_answer_and_the_table(demo, slipstream, model):
    code, out, err, output = demo()
    assert code == 0, err
    arguments = ("--model", model, "--method", "none", "--dtype", "float32")
    from slipstream.cli.demo import PROMPT

    _, plain, _ = slipstream("generate", *arguments, "--prompt", PROMPT, "--max-new-tokens", "24")
    assert out.startswith(plain)
    assert "eagle3+lookup" in out
    assert str(output.name) in err.replace("\n", "")


def test_our_own_page_is_replaced_and_a_picture_written(demo, tmp_path):
    page, picture = tmp_path / "page.html", tmp_path / "tree.svg"
    page.write_text(f"<html><head>{MARK}</head>stale</html>")
    code, _, err, output = demo("--picture", picture)
    assert code == 0, err
    assert "stale" not in output.read_text()
    assert ElementTree.fromstring(picture.read_text()).get("class") == "tv"


def test_a_missing_zoo_drafter_is_told_and_the_rest_goes_on(slipstream, model, tmp_path):
    page = tmp_path / "page.html"
    code, out, err = slipstream(
        *("demo", "--model", model, "--dtype", "float32", "--max-new-tokens", "8", "--json"),
        *("--output", page),
    )
    assert code == 0, err
    value = json.loads(out)
    assert [row["method"] for row in value["rows"]] == ["none", "ngram"]
    assert any("eagle3" in line for line in value["missing"])
    parse(page)


def test_a_difference_is_told(demo, monkeypatch):
    """The verdict "identical" can fail: a drafter's tokens are forced into the output."""
    from slipstream import methods
    from slipstream.types import Verdict

    def gullible(tree, logits, sampler, root_position):
        return Verdict((0,), int(tree.tokens[-1]))

    real = methods.resolve

    def resolve(reference):
        return gullible if "verify.walk" in reference else real(reference)

    monkeypatch.setattr(methods, "resolve", resolve)
    code, out, _, _ = demo("--json")
    assert code == 1
    rows = {row["method"]: row for row in json.loads(out)["rows"]}
    assert rows["eagle3"]["identical"] is False
    assert "DIFFERENT" in rows["eagle3"]["note"]
