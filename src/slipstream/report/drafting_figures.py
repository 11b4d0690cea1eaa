"""The figures about drafting: what tune results and traced steps tell of costs and of a drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.bench import calibration
from slipstream.bench.calibration import Bin, Place, Reliability
from slipstream.report.bars import Bar, bar_chart
from slipstream.report.calibration import reliability_chart, scatter
from slipstream.report.charts import line_chart
from slipstream.report.figures import Figure, Result
from slipstream.types import Step

MOST_DEPTHS = 4  # curves of one picture
MOST_PLACES = 7  # as many as there are colours
CALIBRATION = (
    "Acceptance by the drafter's own probability: for a depth, nodes whose parent was accepted; "
    "for whole paths, all. On the diagonal it is right as often as it says; ECE is the mean "
    "distance from it."
)


def of_tune(result: Result) -> list[Figure]:
    """Every figure that a tune result has the numbers for."""
    made = [*_cost_curve(result), *_draft_costs(result), *_judged(result)]
    for method, found in (result.get("acceptance") or {}).items():
        read = _read(found.get("joint"), found.get("calibration") or {})
        if read:
            svg = reliability_chart(read, title=f"Does {method} know when it is right?")
            made.append(Figure(f"calibration-{method}", svg, CALIBRATION))
    return made


def _cost_curve(result: Result) -> list[Figure]:
    """Milliseconds of a pass by its width, the best width marked."""
    points = [(entry["n"], 1000 * entry["seconds"]) for entry in result.get("cost_curve") or ()]
    if not points:
        return []
    budget = (result.get("best") or {}).get("budget")
    marks = {} if budget is None else {f"best n: {budget + 1}": float(budget + 1)}
    svg = line_chart(
        {"one pass of the model": points},
        title="Cost of a pass by its width",
        x_label="tokens in the pass, root included",
        y_label="milliseconds",
        marks=marks,
    )
    caption = (
        "Where the curve is flat, checking more drafted tokens is nearly free; where it rises in "
        "proportion, the machine is at its limit and more drafting cannot pay."
    )
    return [Figure("cost", svg, caption)]


def _draft_costs(result: Result) -> list[Figure]:
    """Milliseconds of drafting by depth."""
    curves = {
        name: [(float(depth), 1000 * seconds) for depth, seconds in costs.items()]
        for name, costs in (result.get("draft_costs") or {}).items()
    }
    if not any(curves.values()):
        return []
    svg = line_chart(
        curves,
        title="Cost of drafting by depth",
        x_label="depth of the deepest drafted node",
        y_label="milliseconds",
    )
    return [Figure("draft", svg, "What a tree this deep costs before the model has seen it.")]


def _judged(result: Result) -> list[Figure]:
    """Speed-ups predicted on one half of the prompts and measured on the other."""
    groups = {}
    for row in result.get("judged") or ():
        ends = row.get("measured_speedup_ci")
        if row["measured_speedup"] is not None:
            groups[row["name"]] = [
                Bar("predicted", row["predicted_speedup"]),
                Bar("measured", row["measured_speedup"], tuple(ends) if ends else None),
            ]
    if not groups:
        return []
    title = "Speed-up predicted and measured, on other prompts"
    svg = bar_chart(groups, title=title, unit="×", decimals=2, baseline=1.0)
    caption = (
        "Predicted from costs and recorded drafts on one half of the prompts, measured by decoding "
        "the other half; whiskers are 95% intervals over prompts."
    )
    return [Figure("judged", svg, caption)]


def _read(joint: Mapping[str, Any] | None, by_depth: Mapping[str, Any]) -> dict[str, Reliability]:
    """The curves of a result that hold a node: of whole paths, and of the first depths."""
    depths = {f"depth {depth}": one for depth, one in list(by_depth.items())[:MOST_DEPTHS]}
    named = {"whole path": joint, **depths}
    return {name: _reliability(one) for name, one in named.items() if one and one["bins"]}


def _reliability(value: Mapping[str, Any]) -> Reliability:
    """A reliability as a result holds it."""
    return Reliability(tuple(Bin(**one) for one in value["bins"]), value["ece"])


def of_confidence(found: Mapping[str, Any], name: str) -> list[Figure]:
    """What `benchmarks/confidence.py` found of a method: calibration, and acceptance by place.

    Args:
        found: the method's part of the result.
        name: the method, for titles.
    """
    read = _read(found["joint"], found["by_depth"])
    places = {tuple(one["place"]): one["accepted"] for one in found["places"]}
    return [_calibration(read, name), _places(places, name)]


def of_steps(contexts: Mapping[str, Sequence[Step]], name: str) -> list[Figure]:
    """What traced steps tell about a drafter: calibration, and acceptance by rank and place.

    Args:
        contexts: what was decoded to its steps, of one method at one temperature.
        name: the method, for titles.

    Returns:
        Nothing for what cannot be said: no nodes, or a drafter without probabilities.
    """
    trees = {title: calibration.judged(steps) for title, steps in contexts.items()}
    nodes = calibration.nodes(tree for group in trees.values() for tree in group)
    made = []
    depths = dict(list(calibration.by_depth(nodes).items())[:MOST_DEPTHS])
    if depths:
        whole = {"whole path": calibration.joint(nodes)}
        made.append(_calibration(whole | {f"depth {d}": one for d, one in depths.items()}, name))
    by_rank = {
        f"depth {depth}": [(r + 1, share) for r, share in enumerate(row) if share is not None]
        for depth, row in enumerate(calibration.by_depth_and_rank(nodes).rates(), start=1)
        if depth <= MOST_DEPTHS
    }
    if any(len(points) > 1 for points in by_rank.values()):
        svg = line_chart(
            by_rank,
            title=f"{name}: acceptance by rank",
            x_label="which child of its parent, the first drafted being 1",
            y_label="share of tried nodes accepted",
        )
        caption = (
            "How often each child is the one that is kept, when its parent was. What later "
            "children add is what a tree has over a chain."
        )
        made.append(Figure("rank", svg, caption))
    if len(trees) > 1 and nodes:
        made.append(_places(calibration.by_place(trees, max_places=MOST_PLACES), name))
    return made


def _calibration(named: Mapping[str, Reliability], name: str) -> Figure:
    """Confidence against acceptance, whole paths and depths."""
    count = sum(b.count for b in named["whole path"].bins) if "whole path" in named else 0
    svg = reliability_chart(named, title=f"Does {name} know when it is right?")
    return Figure("calibration", svg, f"{CALIBRATION} {count} traced nodes.")


def _places(places: Mapping[Place, Mapping[str, float]], name: str) -> Figure:
    """Acceptance by place, a dot per context."""
    svg = scatter(places, title=f"{name}: acceptance by place in the tree")
    caption = (
        "One dot per place and decoding. Where the dots of a place spread, acceptance depends "
        "on the text and not on the place alone, and a tree that adapts has something to gain."
    )
    return Figure("place", svg, caption)
