"""Small SVG line charts without dependencies: curves over one x axis, with intervals and marks.

They know numbers and names, nothing of benches; `report.figures` says what goes into them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from slipstream.report.svg import (
    COLOURS,
    WIDTH,
    Point,
    document,
    legend,
    legend_height,
    line,
    nice_ticks,
    number,
    text,
)

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart.

    Args:
        points: (x, y); points that are not finite are left out.
        intervals: (low, high) of y per point, or None where there is none; empty for no band.
    """

    points: Sequence[Point]
    intervals: Sequence[Interval | None] = field(default_factory=tuple)


def line_chart(
    series: Mapping[str, Sequence[Point] | Curve],
    *,
    title: str,
    x_label: str = "",
    y_label: str = "",
    y_from_zero: bool = True,
    marks: Mapping[str, float] | None = None,
) -> str:
    """One line per named series of (x, y) points.

    Args:
        series: name to points, or to a curve with intervals.
        title: above the chart.
        x_label: name and unit of x.
        y_label: name and unit of y.
        y_from_zero: let the y axis start at 0, or at the smallest value.
        marks: label to the x at which a dashed line stands.

    Returns:
        A complete `<svg>` element.
    """
    curves = {name: _finite(curve) for name, curve in series.items()}
    marks = marks or {}
    xs = [x for curve in curves.values() for x, _ in curve.points] + list(marks.values())
    ys = [y for curve in curves.values() for _, y in curve.points]
    ys += [end for curve in curves.values() for pair in curve.intervals if pair for end in pair]
    xs, ys = xs or [0.0, 1.0], ys or [0.0, 1.0]
    top = 56 + legend_height(list(curves))
    plane = _Plane(
        nice_ticks(min(xs), max(xs)),
        nice_ticks(min(0.0, *ys) if y_from_zero else min(ys), max(ys)),
        top,
    )
    parts = [text(24, 28, title, "title"), *legend(list(curves)), *plane.axes(x_label, y_label)]
    for i, (name, curve) in enumerate(curves.items()):
        parts += _curve(name, curve, plane, COLOURS[i % len(COLOURS)])
    for label, at in marks.items():
        x, y = plane.place((at, plane.y_ticks[-1]))
        parts.append(line((x, y), (x, plane.bottom), "axis", dashes="5 4"))
        side = "end" if x > WIDTH / 2 else "start"
        parts.append(text(x + (-6 if side == "end" else 6), y + 12, label, anchor=side))
    return document(parts, plane.bottom + 56, title)


def scatter_chart(
    groups: Mapping[str, Sequence[Point]], *, title: str, x_label: str = "", y_label: str = ""
) -> str:
    """Dots in named groups, which have their own colours.

    Args:
        groups: name to (x, y) points.
        title: above the chart.
        x_label: name and unit of x.
        y_label: name and unit of y.

    Returns:
        A complete `<svg>` element.
    """
    points = [point for group in groups.values() for point in group] or [(0.0, 0.0), (1.0, 1.0)]
    plane = _Plane(
        nice_ticks(min(x for x, _ in points), max(x for x, _ in points)),
        nice_ticks(min(0.0, *(y for _, y in points)), max(y for _, y in points)),
        56 + legend_height(list(groups)),
    )
    parts = [text(24, 28, title, "title"), *legend(list(groups)), *plane.axes(x_label, y_label)]
    for i, (name, group) in enumerate(groups.items()):
        for point in group:
            x, y = plane.place(point)
            colour = COLOURS[i % len(COLOURS)]
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" opacity=".6">'
                f"<title>{escape(name)}: {number(point[1])}</title></circle>"
            )
    return document(parts, plane.bottom + 56, title)


@dataclass(frozen=True, slots=True)
class _Plane:
    """The two axes of a line chart."""

    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    top: float
    left: float = 64.0
    right: float = WIDTH - 24.0

    @property
    def bottom(self) -> float:
        """Px of the horizontal axis."""
        return self.top + 264

    def place(self, point: Point) -> Point:
        """Px of a point."""
        across = (point[0] - self.x_ticks[0]) / ((self.x_ticks[-1] - self.x_ticks[0]) or 1)
        up = (point[1] - self.y_ticks[0]) / ((self.y_ticks[-1] - self.y_ticks[0]) or 1)
        return (
            self.left + across * (self.right - self.left),
            self.bottom - up * (self.bottom - self.top),
        )

    def axes(self, x_label: str, y_label: str) -> list[str]:
        """Rules, numbers and names."""
        parts = []
        for tick in self.y_ticks:
            _, y = self.place((self.x_ticks[0], tick))
            parts.append(line((self.left, y), (self.right, y), "rule"))
            parts.append(text(self.left - 8, y + 4, number(tick), "muted", anchor="end"))
        for tick in self.x_ticks:
            x, _ = self.place((tick, self.y_ticks[0]))
            parts.append(line((x, self.bottom), (x, self.bottom + 5), "axis"))
            parts.append(text(x, self.bottom + 20, number(tick), "muted", anchor="middle"))
        middle = (self.left + self.right) / 2
        parts.append(text(middle, self.bottom + 42, x_label, "muted", anchor="middle"))
        parts.append(text(24, self.top - 10, y_label, "muted"))
        return parts


def _finite(series: Sequence[Point] | Curve) -> Curve:
    """The curve without points that are not finite."""
    curve = series if isinstance(series, Curve) else Curve(series)
    intervals = curve.intervals or [None] * len(curve.points)
    kept = [
        ((float(x), float(y)), interval)
        for (x, y), interval in zip(curve.points, intervals, strict=True)
        if math.isfinite(x) and math.isfinite(y)
    ]
    return Curve([point for point, _ in kept], [interval for _, interval in kept])


def _curve(name: str, curve: Curve, plane: _Plane, colour: str) -> list[str]:
    """A polyline with its name on hover and its band; a lone point becomes a dot."""
    parts, tip = [], f"<title>{escape(name)}</title>"
    banded = [(p[0], i) for p, i in zip(curve.points, curve.intervals, strict=True) if i]
    if len(banded) > 1:
        around = [plane.place((x, low)) for x, (low, _) in banded]
        around += [plane.place((x, high)) for x, (_, high) in reversed(banded)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in around)
        parts.append(f'<polygon points="{path}" fill="{colour}" opacity=".16"/>')
    points = [plane.place(point) for point in curve.points]
    if len(points) == 1:
        x, y = points[0]
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{tip}</circle>')
    else:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2" '
            f'stroke-linejoin="round">{tip}</polyline>'
        )
    return parts
