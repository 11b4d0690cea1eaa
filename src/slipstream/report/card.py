"""A drafter's card: what it was trained on, how it went, how to make it again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.bench.results import write_whole
from slipstream.report.charts import line_chart

CURVES = "curves.svg"
SMOOTHED = 25  # steps averaged in the training curves


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of `metrics.jsonl`, in order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def origin(folder: Path) -> dict[str, Any]:
    """What the card of a drafter that goes on with this one says of it.

    Returns:
        `drafter`, its folder's name, and, where it has a card, `steps`, `tokens` and `seconds` of
        its training, those of the drafters that it went on from included, and its `command`.
    """
    about: dict[str, Any] = {"drafter": folder.name}
    try:
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
        before = card.get("started_from", {})
        sums = {name: card[name] + before.get(name, 0) for name in ("steps", "tokens", "seconds")}
        return about | sums | {"command": card.get("command")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not a card of ours
        return about


def write_card(folder: Path, card: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    """Put `card.json`, `README.md` and the curves into a drafter's folder.

    Args:
        folder: holds the drafter.
        card: provenance and settings, as training wrote them.
        records: of `metrics.jsonl`; the last evaluation becomes the card's results.
    """
    last = next((r for r in reversed(records) if "held_out_loss" in r), {})
    data = card.get("data", {})
    whole = card | {
        "steps": records[-1]["step"],
        "tokens": records[-1]["tokens"],
        "seconds": records[-1]["seconds"],
        "tau": card.get("tau", last.get("tau")),
        "trained_on": card.get("trained_on")
        or f"{data.get('texts', 0):,} answers of the target, {data.get('tokens', 0):,} tokens",
        "held_out": {key: last[key] for key in _RESULTS if key in last},
    }
    write_whole(folder / CURVES, curves(records))
    write_whole(folder / "README.md", _readme(folder.name, whole))
    write_whole(folder / "card.json", json.dumps(whole, indent=2) + "\n")


_RESULTS = {
    "held_out_loss": "loss on held-out answers, nats",
    "held_out_prefix_accuracy": "joint prefix accuracy by depth",
    "chain_tau": "tau of a chain on the text, every position a start, tokens/pass",
    "tau": "tau by decoding held-out prompts with the default tree, tokens/pass",
    "reach": "reach by depth, same decoding",
    "alpha": "acceptance by depth, same decoding",
}


def curves(records: Sequence[dict[str, Any]]) -> str:
    """Prefix accuracy of the first depths over training tokens, as an SVG line chart."""
    series: dict[str, list[tuple[float, float]]] = {}
    for depth in range(max(len(r["prefix_accuracy"]) for r in records)):
        deep = [r for r in records if len(r["prefix_accuracy"]) > depth]  # some batches draft less
        points = []
        for start in range(0, len(deep), SMOOTHED):
            part = deep[start : start + SMOOTHED]
            mean = sum(r["prefix_accuracy"][depth] for r in part) / len(part)
            points.append((part[-1]["tokens"] / 1e6, mean))
        series[f"depth {depth + 1}, training"] = points
    held = [r for r in records if "held_out_prefix_accuracy" in r]
    for depth in range(len(held[0]["held_out_prefix_accuracy"]) if held else 0):
        series[f"depth {depth + 1}, held out"] = [
            (r["tokens"] / 1e6, r["held_out_prefix_accuracy"][depth]) for r in held
        ]
    return line_chart(
        series,
        title="Joint prefix accuracy while training",
        x_label="million tokens seen",
        y_label="share of positions",
    )


def _readme(name: str, card: dict[str, Any]) -> str:
    config, data = card.get("config", {}), card.get("data", {})
    results = "\n".join(
        f"| {_RESULTS[key]} | {_shown(value)} |" for key, value in card["held_out"].items()
    )
    settings = ", ".join(f"{key} {value}" for key, value in config.items() if value is not None)
    counts = ", ".join(
        f"{n:,} {key.replace('_', ' ')}" for key, n in data.get("counts", {}).items()
    )
    command = " ".join(card.get("command", []))
    before = _before(card["started_from"]) if "started_from" in card else ""
    notes = "".join(f"\n{note}\n" for note in card.get("notes", []))
    return f"""# {name}

A `{card.get("method", "")}` drafter for `{card.get("model", "")}`.

* **Data**: {card["trained_on"]}; {data.get("held_out_texts", 0)} more texts held out. In the file:
  {counts or "nothing left out"}.
* **Training**: {card["steps"]:,} steps, {card["tokens"]:,} packed tokens, {card["seconds"]:,.0f} s
  after the features were taken. {settings}.{before}
* **Versions**: {", ".join(f"{key} {value}" for key, value in card.get("versions", {}).items())}.
{notes}
| held out | |
|---|---|
{results}

![curves]({CURVES})

```
{command}
```
"""


def _before(about: dict[str, Any]) -> str:
    line = f"\n* **Before**: it went on from `{about['drafter']}`"
    if "steps" in about:
        line += (
            f" ({about['steps']:,} steps, {about['tokens']:,} packed tokens, "
            f"{about['seconds']:,.0f} s)"
        )
    if about.get("command"):
        line += f", which `{' '.join(about['command'])}` had made"
    return line + "."


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(f"{item:.3f}" for item in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)
