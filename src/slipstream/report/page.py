"""One HTML file that opens offline: what a run measured, and its decoding as trees.

The page loads nothing: style and pictures are inside it. It reads `types.Step` and plain
numbers, never the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from slipstream.report import MARK, bars, tree_view
from slipstream.types import Step


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One method's line in the table.

    Args:
        method: its name.
        tau: tokens/pass.
        tokens_per_second: after prefill.
        speedup: over plain decoding.
        identical: True when every token is plain decoding's.
        note: anything to add, such as why they differ.
    """

    method: str
    tau: float
    tokens_per_second: float
    speedup: float
    identical: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """One step, drawn.

    Args:
        title: above the tree.
        caption: below it.
        svg: the tree.
        said: per accepted node, its token and what the target said next: (token, probability).
    """

    title: str
    caption: str
    svg: str
    said: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """A run of answer text from one step.

    Args:
        text: as decoded.
        is_drafted: True for accepted drafts, False for the target's own token.
        step: index of the step that gave it; -1 for the token that prefill gives.
    """

    text: str
    is_drafted: bool
    step: int = -1


@dataclass(frozen=True, slots=True)
class DemoPage:
    """What the demo's page shows.

    Args:
        prompt: the question.
        spans: the answer, by who proposed it.
        rows: the speed table.
        pictures: steps of that answer.
        pair: two steps side by side, a narrow tree and a wide one; possibly empty.
        method: the method whose steps are drawn.
        facts: name and value lines for the foot: model, number type, versions.
        missing: methods that could not run, with the reason.
    """

    prompt: str
    spans: Sequence[Span]
    rows: Sequence[SpeedRow]
    pictures: Sequence[Picture]
    pair: Sequence[Picture]
    method: str
    facts: Sequence[tuple[str, str]]
    missing: Sequence[str] = field(default_factory=tuple)


def render(page: DemoPage) -> str:
    """The page as one HTML document."""
    from markupsafe import Markup

    chart = bars.bar_chart(
        {"": [bars.Bar(row.method, row.tokens_per_second) for row in page.rows]},
        title="Tokens per second after prefill",
        unit="tokens/s",
    )
    return fill("page.html.j2", page=page, chart=Markup(chart))


def fill(name: str, **values: object) -> str:
    """A template of this package with its values: text is escaped, pictures are `svg(...)`."""
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(asset(name)).render(
        mark=Markup(MARK),
        style=Markup(asset("style.css")),
        tree_style=Markup(tree_view.STYLE),
        tree_style_dark=Markup(tree_view.STYLE_DARK),
        svg=Markup,
        label=tree_view.token_label,
        short=tree_view.short,
        **values,
    )


def asset(name: str) -> str:
    """Text of a file beside this one."""
    return files("slipstream.report").joinpath(name).read_text(encoding="utf-8")


def picture(step: Step, piece: Callable[[int], str], *, title: str, max_nodes: int = 40) -> Picture:
    """Draw a step, count it in words and list what the target said along the path."""
    cut = f" The {max_nodes} most probable are drawn." if step.tree.budget > max_nodes else ""
    return Picture(
        title=title,
        caption=caption(step) + cut,
        svg=tree_view.tree_svg(step, piece, max_nodes=max_nodes, title=title),
        said=_said(step, piece),
    )


def caption(step: Step) -> str:
    """The shape of a step's tree and what came of it, in one sentence.

    Example:
        >>> from slipstream.types import DraftTree, Verdict
        >>> caption(Step(DraftTree.chain([5, 6, 7]), Verdict((0, 1), 9), (6, 9)))
        '2 drafted nodes, 2 deep, 1 wide; 1 accepted, 2 tokens from one pass.'
    """
    tree, verdict = step.tree, step.verdict
    if tree.budget == 0:
        return "Nothing drafted; 1 token from one pass."
    widest = int(tree.depths[1:].bincount().max())
    nodes = "node" if tree.budget == 1 else "nodes"
    tokens = "token" if verdict.num_emitted == 1 else "tokens"
    return (
        f"{tree.budget} drafted {nodes}, {tree.num_drafted} deep, {widest} wide; "
        f"{verdict.num_accepted} accepted, {verdict.num_emitted} {tokens} from one pass."
    )


def spans(
    first: Sequence[int], steps: Sequence[Step], decode: Callable[[list[int]], str]
) -> list[Span]:
    """The answer cut by who proposed each piece: the target's own token, or accepted drafts.

    Args:
        first: the token that prefill gives.
        steps: the answer's steps.
        decode: text of token ids; a character cut in half (U+FFFD) waits for its other half.
    """
    turns = [(list(first), False, -1)]
    for index, step in enumerate(steps):
        num_accepted = step.verdict.num_accepted
        turns.append((list(step.emitted[:num_accepted]), True, index))
        turns.append((list(step.emitted[num_accepted:]), False, index))
    tokens: list[int] = []
    shown, out = "", []
    for ids, is_drafted, index in turns:
        tokens += ids
        text = decode(tokens).rstrip("\ufffd")
        if len(text) > len(shown):
            out.append(Span(text[len(shown) :], is_drafted, index))
            shown = text
    return out


def write_page(path: Path, html: str) -> None:
    """Write the whole page or nothing: a temporary neighbour, then a rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(html, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _said(
    step: Step, piece: Callable[[int], str]
) -> tuple[tuple[str, tuple[tuple[str, float], ...]], ...]:
    if not step.top_tokens:
        return ()
    return tuple(
        (
            piece(int(step.tree.tokens[node])),
            tuple((piece(token), share) for token, share in step.top_tokens[node]),
        )
        for node in step.verdict.path
    )
