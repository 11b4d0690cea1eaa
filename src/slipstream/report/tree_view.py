"""A decoding step as a picture: what was drafted, what was accepted, what the target said.

The accepted path runs straight along the top and ends in the target's own token; the drafts that
were not taken hang below it. A line is as thick as the drafter was sure (q), a label gives q and
the target's p. The picture is one SVG element, for a page or, with `standalone`, for a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from slipstream.types import Step

COLUMN, ROW = 134, 52  # px from depth to depth, from leaf to leaf
BOX_WIDTH, BOX_HEIGHT = 102, 40  # px
MARGIN = 14  # px
LONGEST = 12  # characters of a token that fit a box

STYLE = """
.tv{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;color:#3b4558}
.tv rect{fill:#fff;stroke:#c5cbd6}.tv text{fill:currentColor}.tv .pr{font-size:10.5px;opacity:.8}
.tv .ws{opacity:.42}.tv .edge{fill:none;stroke:#c9cfda;stroke-linecap:round}
.tv .no{color:#8a93a3}.tv .no rect{stroke-dasharray:3 3}
.tv .ok{color:#0b6b47}.tv .ok rect{fill:#e2f6ec;stroke:#16a06d;stroke-width:1.6}
.tv .edge.ok{stroke:#16a06d}
.tv .nx{color:#8a4b00}.tv .nx rect{fill:#fff1d9;stroke:#e08a00;stroke-width:1.6}
.tv .edge.nx{stroke:#e08a00;stroke-dasharray:5 5}
.tv .rt{color:#fff}.tv .rt rect{fill:#2b3446;stroke:#2b3446}
"""
STYLE_DARK = """
.tv{color:#c8d0de}.tv rect{fill:#1b2130;stroke:#465066}.tv .edge{stroke:#3d475b}
.tv .no{color:#79839a}.tv .ok{color:#7ee2b5}.tv .ok rect{fill:#10352a;stroke:#27b37e}
.tv .edge.ok{stroke:#27b37e}.tv .nx{color:#ffc870}.tv .nx rect{fill:#3c2a0c;stroke:#e79a22}
.tv .edge.nx{stroke:#e79a22}.tv .rt{color:#10151f}.tv .rt rect{fill:#dfe5ef;stroke:#dfe5ef}
"""


@dataclass(slots=True)
class Box:
    """One node as it is drawn.

    Args:
        token: target vocabulary id.
        depth: column.
        kind: "rt" the root, "ok" accepted, "no" not taken, "nx" the target's own token.
        q: the drafter's probability given the parent, or None.
        p: the target's, or None.
        says: the target's most likely continuations (token, probability), or empty.
        children: boxes below, in the order drawn.
        row: line, set by the layout.
        is_bonus: the target's own token after a path that was accepted to its end.
    """

    token: int
    depth: int
    kind: str
    q: float | None
    p: float | None
    says: tuple[tuple[int, float], ...]
    children: list[Box]
    row: int = 0
    is_bonus: bool = False


def tree_svg(
    step: Step,
    piece: Callable[[int], str],
    *,
    max_nodes: int = 40,
    standalone: bool = False,
    title: str = "A draft tree",
) -> str:
    """Draw one step.

    Args:
        step: with a trace, target probabilities are shown; without, only the drafter's.
        piece: text of one token id.
        max_nodes: drafted nodes to draw; accepted ones first, then the most probable.
        standalone: carry the style along, for a file of its own.
        title: for screen readers.

    Returns:
        An `<svg>` element; the page that holds it needs `STYLE` unless it stands alone.
    """
    root = boxes(step, max_nodes=max_nodes)
    num_rows = _layout(root, 0)
    deepest = max(box.depth for box in _walk(root))
    width = 2 * MARGIN + deepest * COLUMN + BOX_WIDTH
    height = 2 * MARGIN + (num_rows - 1) * ROW + BOX_HEIGHT
    drawn = [_edge(box, child) for box in _walk(root) for child in box.children]
    drawn += [_box(box, piece) for box in _walk(root)]
    style = ""
    if standalone:
        style = f"<style>{STYLE}@media(prefers-color-scheme:dark){{{STYLE_DARK}}}</style>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tv" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"{style}{''.join(drawn)}</svg>"
    )


def boxes(step: Step, *, max_nodes: int = 40) -> Box:
    """The root's box, with every drawn node below it, accepted ones and best ones first."""
    tree, path = step.tree, step.verdict.path
    kept = set(_most_probable(step, max_nodes))
    made: dict[int, Box] = {}
    for node in sorted(kept):
        kind = "rt" if node == 0 else "ok" if node in path else "no"
        made[node] = Box(
            token=int(tree.tokens[node]),
            depth=int(tree.depths[node]),
            kind=kind,
            q=_probability(tree.log_probs, node),
            p=_probability(step.target_log_probs, node),
            says=step.top_tokens[node] if step.top_tokens else (),
            children=[],
        )
        if node:
            made[int(tree.parents[node])].children.append(made[node])
    for box in made.values():
        box.children.sort(key=lambda child: (child.kind != "ok", -(child.q or 0.0)))
    last = made[path[-1]]
    said = dict(last.says).get(step.verdict.next_token)
    own = Box(step.verdict.next_token, last.depth + 1, "nx", None, said, (), [])
    own.is_bonus = step.verdict.is_bonus
    last.children.insert(0, own)
    return made[0]


def token_label(text: str) -> str:
    r"""A token's text with its white space made visible, cut to fit a box.

    Example:
        >>> token_label(" fox\n")
        '␣fox⏎'
    """
    shown = text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
    shown = "".join(c if c.isprintable() else "�" for c in shown) or "∅"
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def _most_probable(step: Step, max_nodes: int) -> list[int]:
    """The root, the accepted path, then nodes by joint probability, parents always kept.

    A node of unknown probability stands where its parent does.
    """
    tree = step.tree
    parents = tree.parents.tolist()
    logs = [0.0] * len(parents) if tree.log_probs is None else tree.log_probs.nan_to_num(0).tolist()
    joint = [0.0] * len(parents)
    for node in range(1, len(parents)):
        joint[node] = joint[parents[node]] + min(0.0, logs[node])
    kept = set(step.verdict.path)
    for node in sorted(range(1, len(parents)), key=lambda n: (-joint[n], n)):
        if len(kept) > max_nodes:
            break
        if parents[node] in kept:
            kept.add(node)
    return sorted(kept)


def _probability(log_probs: object, node: int) -> float | None:
    """The exponential of an entry of a [N] nats tensor; None for the root and where unknown."""
    if log_probs is None or node == 0:
        return None
    value = float(log_probs[node])  # type: ignore[index]
    return None if math.isnan(value) else math.exp(min(0.0, value))


def _layout(box: Box, row: int) -> int:
    """Give the first child its parent's row and each later child a new one; return rows used."""
    box.row = row
    used = 0
    for child in box.children:
        used += _layout(child, row + used)
    return max(1, used)


def _walk(box: Box) -> list[Box]:
    return [box, *(below for child in box.children for below in _walk(child))]


def _edge(parent: Box, child: Box) -> str:
    """A curve from a box to its child, as thick as the drafter was sure."""
    x0, y0 = MARGIN + parent.depth * COLUMN + BOX_WIDTH, _middle(parent)
    x1, y1 = MARGIN + child.depth * COLUMN, _middle(child)
    bend = (x1 - x0) / 2
    thick = 2.0 if child.q is None else 1.0 + 5.0 * child.q
    kind = child.kind if child.kind in ("ok", "nx") else "no"
    return (
        f'<path class="edge {kind}" stroke-width="{thick:.1f}" '
        f'd="M{x0} {y0}C{x0 + bend:.0f} {y0} {x1 - bend:.0f} {y1} {x1} {y1}"/>'
    )


def _box(box: Box, piece: Callable[[int], str]) -> str:
    x, y = MARGIN + box.depth * COLUMN, MARGIN + box.row * ROW
    middle = x + BOX_WIDTH / 2
    label = token_label(piece(box.token))
    note = escape(_note(box))
    return (
        f'<g class="{box.kind}"><title>{escape(_hover(box, piece))}</title>'
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="7"/>'
        f'<text x="{middle:.0f}" y="{y + 17}" text-anchor="middle">{_dim_spaces(label)}</text>'
        f'<text x="{middle:.0f}" y="{y + 32}" text-anchor="middle" class="pr">{note}</text></g>'
    )


def _middle(box: Box) -> int:
    return MARGIN + box.row * ROW + BOX_HEIGHT // 2


def _dim_spaces(label: str) -> str:
    """White-space marks are drawn fainter than the text."""
    parts = []
    for mark in label:
        text = escape(mark)
        parts.append(f'<tspan class="ws">{text}</tspan>' if mark in "␣⏎⇥␍" else text)
    return "".join(parts)


def _note(box: Box) -> str:
    """The small line under a token."""
    if box.kind == "rt":
        return "root"
    parts = []
    if box.kind == "nx":
        parts.append("bonus" if box.is_bonus else "target")
    if box.q is not None:
        parts.append(f"q {short(box.q)}")
    if box.p is not None:
        parts.append(f"p {short(box.p)}")
    return " · ".join(parts)


def short(probability: float) -> str:
    """A probability in three or four characters.

    Example:
        >>> short(0.834), short(0.0004), short(1.0)
        ('.83', '<.01', '1.0')
    """
    if probability > 0.995:
        return "1.0"
    return f"{probability:.2f}"[1:] if probability >= 0.005 else "<.01"


def _hover(box: Box, piece: Callable[[int], str]) -> str:
    """What the mouse shows: token, id, role, probabilities, what the target says next."""
    role = {
        "rt": "the root: the last token already emitted",
        "ok": "drafted and accepted",
        "no": "drafted, not taken",
        "nx": "the target's own token, which ends the step",
    }[box.kind]
    if box.is_bonus:
        role += ": a bonus, for the whole path was accepted"
    lines = [f"{piece(box.token)!r} (id {box.token}): {role}"]
    if box.q is not None:
        lines.append(f"drafter q = {box.q:.4f}")
    if box.p is not None:
        lines.append(f"target p = {box.p:.4f}")
    if box.says:
        said = ", ".join(f"{piece(token)!r} {share:.0%}" for token, share in box.says)
        lines.append(f"the target continues with {said}")
    return "\n".join(lines)
