"""Small SVG charts without dependencies: bars with error bars, lines over a shared x axis.

Each chart is a complete SVG document in text, readable in light and dark, as a file of its own
or inside a page. Colours are Okabe and Ito's, which the colour-blind can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
WIDTH = 720  # px
STYLE = """<style>
.sc{font:13px system-ui,-apple-system,'Segoe UI',sans-serif;color:#1c2330}
.sc text{fill:currentColor}.sc .title{font-size:15px;font-weight:600}
.sc .muted{opacity:.65;font-size:12px}.sc .rule{stroke:currentColor;opacity:.14}
.sc .axis{stroke:currentColor;opacity:.4}.sc .error{stroke:currentColor;opacity:.75;fill:none}
@media(prefers-color-scheme:dark){.sc{color:#e6e9ef}}
</style>"""

Point = tuple[float, float]


def bar_chart(
    labels: Sequence[str],
    values: Sequence[float],
    errors: Sequence[tuple[float, float] | None] | None = None,
    *,
    title: str,
    unit: str = "",
    baseline: float | None = None,
) -> str:
    """Horizontal bars, one per label, in the order given.

    Args:
        labels: names at the left.
        values: lengths, 0 or more, in `unit`; a value that is not finite gets no bar.
        errors: (low, high) ends of each interval in `unit`, or None where there is none.
        title: above the chart; say the conditions here.
        unit: after each value.
        baseline: draws a dashed line at this value (1 for speed-ups).

    Returns:
        A complete `<svg>` element.

    Raises:
        ValueError: labels, values and errors differ in length.
    """
    intervals = [None] * len(values) if errors is None else list(errors)
    if not len(labels) == len(values) == len(intervals):
        raise ValueError(f"{len(labels)} labels, {len(values)} values, {len(intervals)} errors")
    left = 24 + 7.2 * max((len(label) for label in labels), default=0)
    left, right = min(left, WIDTH * 0.42), WIDTH - 96
    ends = [*values, *(high for interval in intervals if interval for high in interval[1:])]
    ticks = nice_ticks(0, max([e for e in ends if math.isfinite(e)] + [baseline or 0]))
    scale = (right - left) / (ticks[-1] or 1)
    height = 62 + 34 * len(labels) + 26
    parts = [_text(24, 28, title, "title")]
    for tick in ticks:
        x = left + tick * scale
        parts.append(_line((x, 44), (x, height - 26), "rule"))
        parts.append(_text(x, height - 8, _number(tick), "muted", anchor="middle"))
    for i, (label, value, interval) in enumerate(zip(labels, values, intervals, strict=True)):
        y = 62 + 34 * i
        parts.append(_text(left - 10, y + 5, label, anchor="end"))
        shown = f"{_number(value)} {unit}".strip() if math.isfinite(value) else "no value"
        end = left
        if math.isfinite(value):
            end = left + max(0.0, value) * scale
            colour = COLOURS[i % len(COLOURS)]
            parts.append(
                f'<rect x="{left:.1f}" y="{y - 10}" width="{end - left:.1f}" height="20" rx="3" '
                f'fill="{colour}"><title>{escape(label)}: {escape(shown)}</title></rect>'
            )
        if interval is not None:
            parts.append(_whisker(left + interval[0] * scale, left + interval[1] * scale, y))
            end = max(end, left + interval[1] * scale)
        parts.append(_text(end + 8, y + 5, shown))
    if baseline is not None:
        x = left + baseline * scale
        parts.append(_line((x, 44), (x, height - 26), "axis", dashes="5 4"))
    return _document(parts, height, title)


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x_label: str = "",
    y_label: str = "",
    y_from_zero: bool = True,
) -> str:
    """One line per named series of (x, y) points.

    Args:
        series: name to points; points that are not finite are left out.
        title: above the chart.
        x_label: name and unit of x.
        y_label: name and unit of y.
        y_from_zero: let the y axis start at 0, or at the smallest value.

    Returns:
        A complete `<svg>` element.
    """
    lines = {
        name: [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        for name, points in series.items()
    }
    xs = [x for points in lines.values() for x, _ in points] or [0.0, 1.0]
    ys = [y for points in lines.values() for _, y in points] or [0.0, 1.0]
    x_ticks = nice_ticks(min(xs), max(xs))
    y_ticks = nice_ticks(min(0.0, *ys) if y_from_zero else min(ys), max(ys))
    left, right, top, bottom = 64.0, WIDTH - 24.0, 76.0, 340.0

    def place(point: Point) -> Point:
        x, y = point
        across = (x - x_ticks[0]) / ((x_ticks[-1] - x_ticks[0]) or 1)
        up = (y - y_ticks[0]) / ((y_ticks[-1] - y_ticks[0]) or 1)
        return left + across * (right - left), bottom - up * (bottom - top)

    parts = [_text(24, 28, title, "title"), _legend(list(lines))]
    for tick in y_ticks:
        _, y = place((x_ticks[0], tick))
        parts.append(_line((left, y), (right, y), "rule"))
        parts.append(_text(left - 8, y + 4, _number(tick), "muted", anchor="end"))
    for tick in x_ticks:
        x, _ = place((tick, y_ticks[0]))
        parts.append(_line((x, bottom), (x, bottom + 5), "axis"))
        parts.append(_text(x, bottom + 20, _number(tick), "muted", anchor="middle"))
    for i, (name, points) in enumerate(lines.items()):
        parts.append(_curve(name, [place(p) for p in points], COLOURS[i % len(COLOURS)]))
    parts.append(_text((left + right) / 2, bottom + 42, x_label, "muted", anchor="middle"))
    parts.append(_text(24, 66, y_label, "muted"))
    return _document(parts, bottom + 56, title)


def nice_ticks(low: float, high: float, *, wanted: int = 5) -> list[float]:
    """Round numbers that cover low to high in about `wanted` steps of 1, 2, 2.5 or 5 x 10^k.

    Example:
        >>> nice_ticks(0, 2.7)
        [0.0, 1.0, 2.0, 3.0]
    """
    if not high > low:
        high = low + 1
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def _document(parts: Sequence[str], height: float, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sc" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'role="img" aria-label="{escape(title)}">{STYLE}{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, style: str = "", *, anchor: str = "start") -> str:
    name = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{name} text-anchor="{anchor}">{escape(text)}</text>'


def _line(start: Point, end: Point, style: str, *, dashes: str = "") -> str:
    pattern = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
        f'class="{style}"{pattern}/>'
    )


def _whisker(low: float, high: float, y: float) -> str:
    return (
        f'<path class="error" d="M{low:.1f} {y}H{high:.1f}'
        f'M{low:.1f} {y - 5}v10M{high:.1f} {y - 5}v10"/>'
    )


def _curve(name: str, points: Sequence[Point], colour: str) -> str:
    """A polyline with its name on hover; a lone point becomes a dot."""
    title = f"<title>{escape(name)}</title>"
    if len(points) == 1:
        x, y = points[0]
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{title}</circle>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2" '
        f'stroke-linejoin="round">{title}</polyline>'
    )


def _legend(names: Sequence[str]) -> str:
    """Coloured names in a row under the title."""
    widths = [28 + 7.2 * len(name) for name in names]
    starts = [24.0]
    for width in widths:
        starts.append(starts[-1] + width)
    parts = []
    for i, (name, (x, _)) in enumerate(zip(names, pairwise(starts), strict=True)):
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f'<rect x="{x:.1f}" y="39" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(_text(x + 17, 50, name))
    return "".join(parts)


def _number(value: float) -> str:
    """A number with as many digits as help."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}"
