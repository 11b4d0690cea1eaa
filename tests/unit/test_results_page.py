"""The report page without a browser: it parses, loads nothing, shows everything, escapes all."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from report_samples import PLAIN, ROW, bench, make_trace
from slipstream.errors import DataError
from slipstream.report import MARK, drafting_figures, figures, results_page, trace, tree_view
from slipstream.types import DraftTree, Step, Verdict

HOSTILE = "</script></style><img src=x onerror=alert(1)>\"'&"
EMPTY = {"meta", "input", "br", "hr", "img", "link"}  # HTML elements without an end


class Strict(HTMLParser):
    """Collects elements and complains about tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag, f"</{tag}> at {self.getpos()}"

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.found if name == tag]


def write(folder, name, value) -> object:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


@pytest.fixture
def page(tmp_path) -> str:
    bins = [{"low": 0.5, "high": 0.6, "count": 9, "confidence": 0.55, "acceptance": 0.5}]
    tune = {
        "kind": "slipstream tune",
        "draft_costs": {"eagle3:dynamic": {"1": 0.01, "4": 0.03}, "ngram:chain": {}},
        "judged": [
            {
                "name": "eagle3:chain,depth=4",
                "predicted_speedup": 1.61,
                "measured_speedup": 1.57,
                "measured_speedup_ci": [1.5, 1.6],
            },
            {"name": "ngram", "predicted_speedup": 1.0, "measured_speedup": None},
        ],
        "acceptance": {
            "eagle3": {
                "joint": {"bins": bins, "ece": 0.05},
                "calibration": {"1": {"bins": bins, "ece": 0.05}},
            },
            "ngram": {"joint": {"bins": [], "ece": 0.0}, "calibration": {}},
        },
        "cost_curve": [{"n": 1, "seconds": 0.01}, {"n": 8, "seconds": 0.02}],
        "best": {"method": "eagle3", "budget": 7},
        "predicted_speedup": 1.61,
        "measured_speedup": 1.57,
        "advice": HOSTILE,
    }
    value = bench(notes=[HOSTILE])
    value["rows"][1]["task"] = HOSTILE
    paths = [
        write(tmp_path, "b.json", value),
        write(tmp_path, "t.json", tune),
        write(tmp_path, "x.json", trace.dumps([make_trace(HOSTILE), make_trace()], {})),
    ]
    return results_page.render(results_page.read_sources(paths), title=HOSTILE)


def test_it_is_well_formed_and_ours(page):
    parsed = Strict(page)
    assert MARK in page[:2000]
    assert len(parsed.all("main")) == 1
    assert {"width=device-width, initial-scale=1"} <= {m.get("content") for m in parsed.all("meta")}


def test_it_loads_nothing_from_anywhere(page):
    parsed = Strict(page)
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'<]*", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    for _, attributes in parsed.found:
        assert not {"src", "href", "srcset", "poster", "onerror", "onload"} & set(attributes)
    assert not parsed.all("link") and "@import" not in page and "url(" not in page


def test_hostile_text_stays_text(page):
    parsed = Strict(page)
    assert not parsed.all("img")
    assert len(parsed.all("script")) == 1 and len(parsed.all("title")) > 1
    assert "&lt;/script&gt;" in page


def test_every_figure_is_there_with_its_save_buttons(page):
    parsed = Strict(page)
    names = [attrs["id"] for attrs in parsed.all("figure")]
    wanted = ("speedup", "tau", "time", "reach", "alpha", "latency")
    tunes = [f"tune-1-{name}" for name in ("cost", "draft", "judged", "calibration-eagle3")]
    steps = [f"steps-{name}-{number}" for number in (1, 2) for name in ("calibration", "rank")]
    assert names == [*(f"bench-1-{name}" for name in wanted), *tunes, *steps]
    places = [a["data-name"] for a in parsed.all("span") if a.get("class") == "save"]
    assert places == [*names, "trace-1", "trace-2"]
    saves = [a["data-save"] for a in parsed.all("button") if "data-save" in a]
    assert saves == ["svg", "png"] * len(places)


def test_the_viewer_has_every_step_and_every_piece(page):
    parsed = Strict(page)
    viewers = [a for a in parsed.all("section") if "viewer" in (a.get("class") or "")]
    frames = [a["data-step"] for a in parsed.all("div") if a.get("class") == "frame"]
    turns = [a for a in parsed.all("span") if "turn" in (a.get("class") or "").split()]
    assert len(viewers) == 2 and frames == ["0", "1"] * 2
    assert [turn["data-step"] for turn in turns] == ["-1", "0", "0", "1"] * 2
    assert page.count("q .61") >= 2 and page.count("p .78") >= 2 and page.count("bonus") >= 2
    assert len(parsed.all("option")) == 2


def test_numbers_of_the_table(page):
    for text in ("1.50 (1.40–1.60)", "2.00 (1.80–2.20)", "10 / 80 / 10", "4 / 0 / 0"):
        assert f"<td>{text}</td>" in page
    for text in ("100.0", "300.0", "50.0", "70.0"):  # latency in ms
        assert f"<td>{text}</td>" in page
    assert "<b>1.57×</b>" in page and "best n: 8" in page


def test_a_trace_survives_its_file():
    made = make_trace("a⏎水")
    (read,) = trace.loads(json.loads(trace.dumps([made], {"model": "m"})), "x.json")
    assert replace(read, steps=()) == replace(made, steps=())
    for one, other in zip(read.steps, made.steps, strict=True):
        assert one.verdict == other.verdict and one.emitted == other.emitted
        assert one.top_tokens == other.top_tokens and one.draft_seconds == other.draft_seconds
        for name in ("tokens", "parents", "log_probs", "is_drawn"):
            mine, theirs = getattr(one.tree, name), getattr(other.tree, name)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    assert torch.equal(read.steps[0].target_log_probs, made.steps[0].target_log_probs)


def test_unknown_is_not_impossible_in_a_traces_file():
    made = make_trace()
    tree = replace(made.steps[0].tree, log_probs=torch.tensor([0.0, float("nan"), -float("inf")]))
    steps = (replace(made.steps[0], tree=tree),)
    (read,) = trace.loads(json.loads(trace.dumps([replace(made, steps=steps)], {})), "x.json")
    assert read.steps[0].tree.log_probs.isnan().tolist() == [False, True, False]
    assert read.steps[0].tree.log_probs[2] == -float("inf")
    root = tree_view.boxes(read.steps[0])
    assert {box.token: box.q for box in root.children} == {2: None, 3: 0.0}


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: value["traces"][0].pop("steps"),
        lambda value: value["traces"][0]["steps"][0].update(path=[0, 9]),
        lambda value: value["traces"][0]["steps"][0].update(parents=[0, 0, 0]),
        lambda value: value.update(schema=99),
        lambda value: value["traces"][0].update(temperature="warm"),
    ],
)
def test_damaged_traces_are_refused(tmp_path, damage):
    value = json.loads(trace.dumps([make_trace()], {}))
    damage(value)
    with pytest.raises(DataError, match=r"x\.json"):
        results_page.read_sources([write(tmp_path, "x.json", value)])


@pytest.mark.parametrize("text", ["{", "[1, 2]", '{"kind": "shopping list"}', "3"])
def test_other_files_are_refused(tmp_path, text):
    with pytest.raises(DataError, match=r"o\.json"):
        results_page.read_sources([write(tmp_path, "o.json", text)])


def test_lossy_rows_and_rows_that_promise_no_tokens_say_so():
    rows = [PLAIN, ROW | {"lossless": False, "identical": None, "ties": None, "different": None}]
    sources = results_page.Sources(benches=[("b.json", bench(rows))])
    page = results_page.render(sources)
    assert "eagle3 (lossy)" in page and "<td>in law only</td>" in page
    assert "token for token</span>" not in page


def test_the_headline_counts_methods_that_are_wrong_everywhere():
    wrong = {"identical": 0, "ties": 0, "different": 4, "speedup": None, "speedup_ci": None}
    rows = [PLAIN, ROW, ROW | {"method": "broken"} | wrong]
    page = results_page.render(results_page.Sources(benches=[("b.json", bench(rows))]))
    assert "<b>4/8</b>" in page and "<b>1.50×</b>" in page
    page = results_page.render(results_page.Sources(benches=[("b.json", bench([PLAIN, rows[2]]))]))
    assert "<b>0/4</b>" in page and "best speed-up" not in page


def test_results_of_older_versions_have_no_latency_figure():
    rows = [{k: v for k, v in row.items() if "latency" not in k} for row in (PLAIN, ROW)]
    names = [figure.name for figure in figures.of_bench(bench(rows))]
    assert names == ["speedup", "tau", "time", "reach", "alpha"]
    only_plain = [figure.name for figure in figures.of_bench(bench([PLAIN]))]
    assert only_plain == ["time", "latency"]


def test_the_part_of_a_tune_that_was_asked_for_is_enough():
    assert drafting_figures.of_tune({"kind": "slipstream tune"}) == []
    (only,) = drafting_figures.of_tune({"draft_costs": {"ngram": {"2": 0.001}}})
    assert only.name == "draft"


def test_acceptance_by_depth_is_pooled_by_passes():
    other = ROW | {"task": "rag", "tau": 1.0, "num_tokens": 104, "reach": [], "alpha": []}
    drawn = {f.name: f.svg for f in figures.of_bench(bench([PLAIN, ROW, other]))}
    alone = {f.name: f.svg for f in figures.of_bench(bench([PLAIN, ROW]))}
    assert drawn["reach"].count("<polyline") == alone["reach"].count("<polyline") == 1
    assert drawn["reach"] != alone["reach"]  # 200 passes reach .6, another 100 reach 0: .4
    halved = {f.name: f.svg for f in figures.of_bench(bench([PLAIN, ROW | {"reach": [0.4, 0.2]}]))}
    line = re.compile(r'<polyline points="([^"]+)"')
    assert line.search(drawn["reach"])[1] == line.search(halved["reach"])[1]


def test_calibration_pools_the_traces_of_a_method_and_says_the_error():
    steps = make_trace().steps
    drawn = drafting_figures.of_steps({"one": steps, "two": steps}, "eagle3")
    assert [figure.name for figure in drawn] == ["calibration", "rank", "place"]
    gap = (abs(1 - 0.6065) + 0) / 2  # one node sure at .61 and kept, one impossible and refused
    assert f"whole path, ECE {gap:.3f}" in drawn[0].svg
    assert f"depth 1, ECE {gap:.3f}" in drawn[0].svg and "4 traced nodes" in drawn[0].caption
    assert drawn[2].svg.count("<circle") == 4  # two places in two decodings


def test_steps_that_tell_nothing_draw_nothing():
    nothing = Step(DraftTree.chain([1]), Verdict((0,), 2), (2,))
    unsure = Step(DraftTree.chain([1, 2]), Verdict((0,), 3), (3,))
    assert drafting_figures.of_steps({"a": [nothing], "b": [nothing]}, "none") == []
    assert drafting_figures.of_steps({"a": [unsure]}, "ngram") == []


def test_the_interval_of_a_share_holds_it_and_narrows():
    narrow, wide = (figures.share_interval(0.3, count) for count in (1000, 10))
    assert wide[0] < narrow[0] < 0.3 < narrow[1] < wide[1]
    assert figures.share_interval(0.0, 10)[0] == 0.0
