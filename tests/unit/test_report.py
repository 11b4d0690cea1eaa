"""Charts and trees as SVG: well-formed, escaped, and true to the step."""

import math
import xml.etree.ElementTree as ET

import pytest
import torch

from slipstream.report import bars, charts, svg
from slipstream.report.page import caption, spans
from slipstream.report.tree_view import boxes, short, token_label, tree_svg
from slipstream.types import DraftTree, Step, Verdict

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def step():
    """Root 9; children 1 and 2; under 1: 3 and 4; 1 and 4 are accepted, 7 ends it."""
    tree = DraftTree(
        torch.tensor([9, 1, 2, 3, 4]),
        torch.tensor([-1, 0, 0, 1, 1]),
        log_probs=torch.tensor([0.0, 0.5, 0.4, 0.3, 0.2]).log().nan_to_num(neginf=0.0),
    )
    top = tuple(((7, 0.6), (8, 0.3), (1, 0.1)) for _ in range(5))
    return Step(
        tree,
        Verdict((0, 1, 4), 7, is_bonus=True),
        (1, 4, 7),
        target_log_probs=torch.tensor([1.0, 0.9, 0.05, 0.1, 0.7]).log(),
        top_tokens=top,
    )


def test_the_tree_shows_every_node_and_who_was_kept(step):
    root = ET.fromstring(tree_svg(step, lambda token: f"<{token}>&", standalone=True))
    groups = root.findall(f"{SVG}g")
    kinds = sorted(group.get("class") for group in groups)
    assert kinds == ["no", "no", "nx", "ok", "ok", "rt"]
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert "<1>&" in texts and "q .50 · p .90" in texts and "bonus · p .60" in texts
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert any("drafter q = 0.2000" in title and "target p = 0.7000" in title for title in titles)


def test_small_probabilities_are_escaped():
    log_probs = torch.tensor([0.0, -9.0])
    step = Step(DraftTree.chain([1, 2], log_probs), Verdict((0,), 3), (3,))
    root = ET.fromstring(tree_svg(step, str))
    assert "q <.01" in ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def test_the_accepted_path_is_one_straight_line(step):
    box, tokens, rows = boxes(step), [], []
    while True:
        tokens.append(box.token)
        rows.append(box.row)
        if not box.children:
            break
        box = box.children[0]
    assert tokens == [9, 1, 4, 7]
    assert rows == [0, 0, 0, 0]


def test_a_wide_tree_is_cut_but_keeps_the_path(step):
    count = 100
    tree = DraftTree(
        torch.arange(count + 1),
        torch.tensor([-1] + [0] * count),
        log_probs=torch.linspace(-1, -9, count + 1),
    )
    root = boxes(Step(tree, Verdict((0, count), 3), (count, 3)), max_nodes=10)
    drawn = [child.token for child in root.children]
    assert drawn[0] == count and len(drawn) == 10
    assert set(drawn[1:]) == set(range(1, 10))


def test_no_probabilities_no_labels():
    step = Step(DraftTree.chain([1, 2]), Verdict((0,), 3), (3,))
    root = ET.fromstring(tree_svg(step, str))
    assert not [text for text in root.iter(f"{SVG}text") if "q " in "".join(text.itertext())]


@pytest.mark.parametrize(
    ("text", "label"),
    [(" a", "␣a"), ("\n\n", "⏎⏎"), ("", "∅"), ("\x1b[31m", "�[31m"), ("a" * 30, "a" * 11 + "…")],
)
def test_labels_show_white_space(text, label):
    assert token_label(text) == label


def test_probabilities_never_read_as_more_than_one():
    assert [short(p) for p in (1.0, 0.996, 0.994, 0.5, 0.004)] == [
        "1.0",
        "1.0",
        ".99",
        ".50",
        "<.01",
    ]


def test_caption_counts(step):
    assert caption(step) == "4 drafted nodes, 2 deep, 2 wide; 2 accepted, 3 tokens from one pass."
    plain = Step(DraftTree.chain([1]), Verdict((0,), 2), (2,))
    assert caption(plain) == "Nothing drafted; 1 token from one pass."


def test_spans_join_to_the_text_and_never_split_a_character(step):
    raw = "ab水c".encode()  # bytes as tokens; the drafted part ends inside the character
    tree = DraftTree.chain(list(raw[:4]))
    first = Step(tree, Verdict((0, 1, 2, 3), raw[4]), tuple(raw[1:5]))
    last = Step(DraftTree.chain([raw[4]]), Verdict((0,), raw[5]), (raw[5],))
    found = spans([raw[0]], [first, last], lambda ids: bytes(ids).decode("utf-8", "replace"))
    assert "".join(span.text for span in found) == "ab水c"
    assert not any("\ufffd" in span.text for span in found)
    assert [span.is_drafted for span in found] == [False, True, False, False]


@pytest.mark.parametrize("value", [0.0, 1.87, 1234.5, math.nan])
def test_bar_chart_is_well_formed(value):
    shown = [bars.Bar("<none>", value), bars.Bar("b", 1.0, (0.9, 1.1))]
    chart = bars.bar_chart({"<x>": shown}, title="A & B", unit="x", baseline=1)
    root = ET.fromstring(chart)
    assert len(root.findall(f"{SVG}rect")) == (1 if math.isnan(value) else 2)
    assert [path.get("class") for path in root.findall(f"{SVG}path")] == ["error"]
    assert "<x>" in [text.text for text in root.findall(f"{SVG}text")]


def test_bars_are_as_long_as_their_values():
    shown = [bars.Bar("a", 1.0), bars.Bar("b", 3.0)]
    root = ET.fromstring(bars.bar_chart({"": shown}, title=""))
    one, three = (float(bar.get("width")) for bar in root.findall(f"{SVG}rect"))
    assert three == pytest.approx(3 * one, abs=0.2)


def test_bars_of_one_series_have_one_colour():
    groups = {task: [bars.Bar("a", 1.0), bars.Bar("b", 2.0)] for task in ("qa", "rag")}
    root = ET.fromstring(bars.bar_chart(groups, title=""))
    colours = [bar.get("fill") for bar in root.findall(f"{SVG}rect")]
    assert colours[:2] == colours[2:] and colours[0] != colours[1]


def test_stacked_bars_add_up():
    shown = {"x": {"draft": 0.001, "target": 0.003}, "y": {"draft": 0.0, "target": 0.002}}
    root = ET.fromstring(bars.stacked_chart(shown, title="t", unit="ms", scale=1000))
    rects = [rect for rect in root.findall(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    widths = [float(rect.get("width")) for rect in rects]
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.2) and widths[2] == 0
    ends = [float(rects[0].get("x")) + widths[0], float(rects[1].get("x"))]
    assert ends[0] == pytest.approx(ends[1], abs=0.2)
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert "4 ms" in texts and "draft" in texts


def test_curves_carry_their_intervals_and_marks():
    curve = charts.Curve([(1, 2.0), (2, math.nan), (3, 4.0)], [(1.5, 2.5), None, (3.5, 4.5)])
    root = ET.fromstring(charts.line_chart({"c": curve}, title="t", marks={"best: 3": 3.0}))
    (band,) = root.findall(f"{SVG}polygon")
    assert len(band.get("points").split()) == 4
    assert "best: 3" in [text.text for text in root.findall(f"{SVG}text")]


def test_a_long_legend_wraps():
    names = [f"a method with a long name {i}" for i in range(6)]
    assert svg.legend_height(names) == 3 * svg.LEGEND_ROW
    tall = ET.fromstring(charts.line_chart({name: [(0, 1), (1, 2)] for name in names}, title=""))
    short = ET.fromstring(charts.line_chart({"a": [(0, 1), (1, 2)]}, title=""))
    heights = [float(root.get("viewBox").split()[3]) for root in (tall, short)]
    assert heights[0] - heights[1] == 2 * svg.LEGEND_ROW


def test_line_chart_leaves_out_what_is_not_finite():
    series = {"a": [(0, 1), (1, math.nan), (2, 3)], "b": [(1, 2)], "empty": []}
    root = ET.fromstring(charts.line_chart(series, title="t", x_label="step", y_label="nats"))
    lines = root.findall(f"{SVG}polyline")
    assert len(lines[0].get("points").split()) == 2
    assert len(root.findall(f"{SVG}circle")) == 1


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 1e-6), (-3, 7), (5, 5.1), (0, 123456)])
def test_ticks_cover_the_range(low, high):
    ticks = svg.nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high
    assert 2 <= len(ticks) <= 12
