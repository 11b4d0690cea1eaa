"""Small SVG charts without dependencies: bars with intervals, stacked bars, curves with intervals.

They know numbers and names, nothing of benches; `report.figures` says what goes into them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from slipstream.report.svg import (
    CHARACTER,
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
    whisker,
)

Interval = tuple[float, float]
ROW, BAR = 34, 20  # px


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Args:
        label: at its left.
        value: its length, 0 or more; not finite means no bar.
        interval: (low, high) of the value, or None.
        series: names its colour; bars of one series have one colour in the whole chart.
    """

    label: str
    value: float
    interval: Interval | None = None
    series: str = ""


def bar_chart(
    groups: Mapping[str, Sequence[Bar]],
    *,
    title: str,
    unit: str = "",
    baseline: float | None = None,
) -> str:
    """Horizontal bars with intervals, in groups under a heading each.

    Args:
        groups: heading to bars, in order; an empty heading takes no line.
        title: above the chart; say the conditions here.
        unit: after each value.
        baseline: draws a dashed line at this value (1 for speed-ups).

    Returns:
        A complete `<svg>` element.
    """
    bars = [bar for group in groups.values() for bar in group]
    series = list(dict.fromkeys(bar.series or bar.label for bar in bars))
    ends = [bar.value for bar in bars] + [bar.interval[1] for bar in bars if bar.interval]
    axis = _Axis.of([bar.label for bar in bars], [*ends, baseline or 0.0])
    y, parts = 62.0, []
    for heading, group in groups.items():
        if heading:
            parts.append(text(24, y + 5, heading, "heading"))
            y += ROW - 8
        for bar in group:
            colour = COLOURS[series.index(bar.series or bar.label) % len(COLOURS)]
            parts += _bar(bar, y, axis, unit, colour)
            y += ROW
    height = y + 10
    if baseline is not None:
        x = axis.x(baseline)
        parts.append(line((x, 44), (x, height - 26), "axis", dashes="5 4"))
    return document([text(24, 28, title, "title"), *axis.grid(height), *parts], height, title)


def stacked_chart(
    bars: Mapping[str, Mapping[str, float]], *, title: str, unit: str = "", scale: float = 1.0
) -> str:
    """Horizontal bars made of parts, such as where the time of a pass goes.

    Args:
        bars: label to its parts, name to size; every bar has the same names.
        title: above the chart.
        unit: of the sum after each bar.
        scale: multiplies every size.

    Returns:
        A complete `<svg>` element.
    """
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    sums = {label: scale * sum(parts.values()) for label, parts in bars.items()}
    axis = _Axis.of(list(bars), list(sums.values()))
    top = 50 + legend_height(names)
    drawn = [text(24, 28, title, "title"), *legend(names)]
    height = top + 18 + ROW * len(bars) + 26
    drawn += axis.grid(height, top)
    for i, (label, parts) in enumerate(bars.items()):
        y, x = top + 18 + ROW * i, axis.left
        drawn.append(text(axis.left - 10, y + 5, label, anchor="end"))
        for name, size in parts.items():
            width = scale * size * axis.scale
            tip = f"{label}, {name}: {number(scale * size)} {unit}".strip()
            drawn.append(_rect(x, y, width, COLOURS[names.index(name) % len(COLOURS)], tip))
            x += width
        drawn.append(text(x + 8, y + 5, f"{number(sums[label])} {unit}".strip()))
    return document(drawn, height, title)


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
class _Axis:
    """The horizontal axis of a bar chart: where values lie."""

    left: float
    scale: float
    ticks: Sequence[float]

    @classmethod
    def of(cls, labels: Sequence[str], ends: Sequence[float]) -> _Axis:
        """The axis that has room for the labels and reaches every end."""
        wanted = 34 + CHARACTER * max((len(label) for label in labels), default=0)
        left, right = min(wanted, WIDTH * 0.42), WIDTH - 96
        ticks = nice_ticks(0, max([end for end in ends if math.isfinite(end)] or [0.0]))
        return cls(left, (right - left) / (ticks[-1] or 1), ticks)

    def x(self, value: float) -> float:
        """Px of a value."""
        return self.left + value * self.scale

    def grid(self, height: float, top: float = 44) -> list[str]:
        """Rules and their numbers."""
        parts = []
        for tick in self.ticks:
            x = self.x(tick)
            parts.append(line((x, top), (x, height - 26), "rule"))
            parts.append(text(x, height - 8, number(tick), "muted", anchor="middle"))
        return parts


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


def _bar(bar: Bar, y: float, axis: _Axis, unit: str, colour: str) -> list[str]:
    """Label, bar, interval and value of one line."""
    is_number = math.isfinite(bar.value)
    shown = f"{number(bar.value)} {unit}".strip() if is_number else "no value"
    parts, end = [text(axis.left - 10, y + 5, bar.label, anchor="end")], axis.left
    if is_number:
        end = axis.x(max(0.0, bar.value))
        tip = f"{bar.label}: {shown}"
        parts.append(_rect(axis.left, y, end - axis.left, colour, tip, radius=3))
    if bar.interval is not None:
        low, high = (axis.x(value) for value in bar.interval)
        parts.append(whisker(low, high, y))
        end = max(end, high)
    return [*parts, text(end + 8, y + 5, shown)]


def _rect(x: float, y: float, width: float, colour: str, tip: str, *, radius: int = 0) -> str:
    """A bar around its middle line, with what the mouse shows."""
    return (
        f'<rect x="{x:.1f}" y="{y - BAR / 2:.1f}" width="{width:.1f}" height="{BAR}" '
        f'rx="{radius}" fill="{colour}"><title>{escape(tip)}</title></rect>'
    )


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
