"""The generated parts of the docs are current, and their links lead somewhere."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from slipstream import methods

ROOT = Path(__file__).resolve().parents[2]


def load_generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", generate.pages(), ids=lambda page: page.name)
def test_generated_parts_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert generate.render(text) == text, "run `make docs`"


DRAWN = generate.pictures() | generate.shipped_studies()


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_figures_are_drawn_from_the_committed_results(path):
    assert path.read_text(encoding="utf-8") == DRAWN[path], "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_method_has_a_page():
    pages = {path.stem for path in (ROOT / "docs" / "methods").glob("*.md")}
    assert pages == {method.name for method in methods.all()}


def test_every_page_of_a_method_shows_its_record_and_what_was_measured() -> None:
    for method in methods.all():
        text = (ROOT / "docs" / "methods" / f"{method.name}.md").read_text(encoding="utf-8")
        assert f"<!-- generated: method-{method.name} -->" in text
        drafts = bool(method.budget)
        assert (f"<!-- generated: measured-{method.name} -->" in text) == drafts, method.name


def test_every_cited_paper_has_a_name():
    assert "|  [" not in generate.papers()


def test_an_unknown_part_is_an_error():
    with pytest.raises(KeyError):
        generate.render("<!-- generated: nonsense -->\n<!-- /generated -->")


def test_no_file_names_a_registry_host():
    """Whoever installs decides where from."""
    hosts = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|index-url https?:")
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no git")
    if listed.returncode:
        pytest.skip("no checkout")
    names = listed.stdout.split()
    assert "README.md" in names
    for name in names:
        path = ROOT / name
        if path.suffix in {".md", ".toml", ".py", ".yml", ".txt", ""} and path.is_file():
            found = hosts.search(path.read_text(encoding="utf-8", errors="ignore"))
            assert not found or path == Path(__file__).resolve(), f"{name}: {found[0]}"
