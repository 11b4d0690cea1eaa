"""Pictures of calibration: confidence against acceptance, and acceptance by place in the tree."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.bench.calibration import Place, Reliability
from slipstream.report.charts import line_chart, scatter_chart


def reliability_chart(found: Mapping[str, Reliability], *, title: str) -> str:
    """Confidence against acceptance; the diagonal is perfect calibration.

    Args:
        found: a name (a depth) to its reliability.
        title: above the chart.

    Returns:
        A complete `<svg>` element.
    """
    curves = {
        f"{name}, ECE {one.ece:.3f}": [(b.confidence, b.acceptance) for b in one.bins]
        for name, one in found.items()
        if one.bins
    }
    return line_chart(
        curves | {"perfect": [(0.0, 0.0), (1.0, 1.0)]},
        title=title,
        x_label="confidence of the drafter",
        y_label="share accepted",
    )


def scatter(places: Mapping[Place, Mapping[str, float]], *, title: str) -> str:
    """One dot per place and context: how far acceptance depends on the context.

    Args:
        places: place to context to share kept, as `bench.calibration.by_place` gives them.
        title: above the chart.

    Returns:
        A complete `<svg>` element.
    """
    groups = {
        ".".join(map(str, place)): [(float(index), share) for share in shares.values()]
        for index, (place, shares) in enumerate(places.items(), start=1)
    }
    return scatter_chart(
        groups,
        title=title,
        x_label="place in the tree: ranks from the root down",
        y_label="share accepted, a dot per context",
    )
