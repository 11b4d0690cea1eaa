"""The pieces of our SVG charts: document, text, lines, ticks, and a legend. Numbers in, text out.

Every chart is a complete SVG document, readable in light and dark, as a file of its own or inside
a page. Colours are Okabe and Ito's, which the colour-blind can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
WIDTH = 720  # px
LEGEND_ROW = 20  # px
CHARACTER = 7.2  # px, mean width of a character of a label
STYLE = """<style>
.sc{font:13px system-ui,-apple-system,'Segoe UI',sans-serif;color:#1c2330}
.sc text{fill:currentColor}.sc .title{font-size:15px;font-weight:600}
.sc .heading{font-weight:600}.sc .muted{opacity:.65;font-size:12px}
.sc .rule{stroke:currentColor;opacity:.14}
.sc .axis{stroke:currentColor;opacity:.4}.sc .error{stroke:currentColor;opacity:.75;fill:none}
@media(prefers-color-scheme:dark){.sc{color:#e6e9ef}}
</style>"""

Point = tuple[float, float]


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


def document(parts: Sequence[str], height: float, title: str) -> str:
    """A complete `<svg>` element from its parts."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sc" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'role="img" aria-label="{escape(title)}">{STYLE}{"".join(parts)}</svg>'
    )


def text(x: float, y: float, text: str, style: str = "", *, anchor: str = "start") -> str:
    """Escaped text at a baseline point; anchor is start, middle or end."""
    name = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{name} text-anchor="{anchor}">{escape(text)}</text>'


def line(start: Point, end: Point, style: str, *, dashes: str = "") -> str:
    """A straight line of a class of `STYLE`."""
    pattern = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
        f'class="{style}"{pattern}/>'
    )


def whisker(low: float, high: float, y: float) -> str:
    """A horizontal interval from x `low` to x `high`, with ends."""
    return (
        f'<path class="error" d="M{low:.1f} {y}H{high:.1f}'
        f'M{low:.1f} {y - 5}v10M{high:.1f} {y - 5}v10"/>'
    )


def legend(names: Sequence[str], y: float = 44) -> list[str]:
    """Coloured names in rows under the title; `legend_height` says how much room they take."""
    parts = []
    for name, (x, line_at) in zip(names, _places(names), strict=True):
        colour = COLOURS[names.index(name) % len(COLOURS)]
        top = y + LEGEND_ROW * line_at
        parts.append(
            f'<rect x="{x:.1f}" y="{top - 6:.1f}" width="12" height="12" rx="2" fill="{colour}"/>'
        )
        parts.append(text(x + 17, top + 5, name))
    return parts


def legend_height(names: Sequence[str]) -> float:
    """Px that the legend of these names takes."""
    return LEGEND_ROW * (1 + max((row for _, row in _places(names)), default=-1))


def _places(names: Sequence[str]) -> list[tuple[float, int]]:
    """Left end and row of each name of a legend."""
    places, x, row = [], 24.0, 0
    for name in names:
        width = 34 + CHARACTER * len(name)
        if x > 24 and x + width > WIDTH - 12:
            x, row = 24.0, row + 1
        places.append((x, row))
        x += width
    return places


def number(value: float) -> str:
    """A number with as many digits as help."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}"
