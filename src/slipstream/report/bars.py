"""Small SVG bar charts without dependencies: bars with intervals in groups, and stacked bars.

They know numbers and names, nothing of benches; `report.figures` says what goes into them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from slipstream.report.svg import (
    CHARACTER,
    COLOURS,
    WIDTH,
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
    decimals: int | None = None,
    baseline: float | None = None,
) -> str:
    """Horizontal bars with intervals, in groups under a heading each.

    Args:
        groups: heading to bars, in order; an empty heading takes no line.
        title: above the chart; say the conditions here.
        unit: after each value.
        decimals: of each value; None for three digits.
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
            parts += _bar(bar, y, axis, _shown(bar.value, unit, decimals), colour)
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


def _shown(value: float, unit: str, decimals: int | None) -> str:
    """A bar's value in words."""
    if not math.isfinite(value):
        return "no value"
    digits = number(value) if decimals is None else f"{value:.{decimals}f}"
    return f"{digits} {unit}".strip()


def _bar(bar: Bar, y: float, axis: _Axis, shown: str, colour: str) -> list[str]:
    """Label, bar, interval and value of one line."""
    parts, end = [text(axis.left - 10, y + 5, bar.label, anchor="end")], axis.left
    if math.isfinite(bar.value):
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
