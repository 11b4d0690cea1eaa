"""`slipstream zoo`: the trained drafters that ship, with their cards."""

from __future__ import annotations

import json as json_lib
from pathlib import Path
from typing import Any

from slipstream.assemble import zoo_folder
from slipstream.cli import options as o
from slipstream.cli.output import json_output


def zoo(json: o.JsonOption = False) -> None:
    """List the trained drafters of this checkout."""
    with json_output(json) as writer:
        entries = read_zoo(zoo_folder())
        if json:
            writer.write(entries)
        else:
            _table(entries)


def read_zoo(folder: Path) -> list[dict[str, Any]]:
    """One entry per drafter folder that has weights, by name; keys as `--json` prints them."""
    entries = []
    for place in sorted(folder.iterdir()) if folder.is_dir() else []:
        weights = place / "model.safetensors"
        if weights.is_file():
            entries.append(_entry(place, weights))
    return entries


def _entry(place: Path, weights: Path) -> dict[str, Any]:
    card_path = place / "card.json"
    card = json_lib.loads(card_path.read_text(encoding="utf-8")) if card_path.is_file() else {}
    method, _, model = place.name.partition("-")
    return {
        "name": place.name,
        "model": card.get("model", model),
        "method": card.get("method", method),
        "size_bytes": weights.stat().st_size,
        "tau": card.get("tau"),
        "trained_on": card.get("trained_on"),
        "path": str(place),
        "card": card,
    }


def _table(entries: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    screen = Console(highlight=False)
    if not entries:
        screen.print("no drafters here: the zoo is part of a checkout, not of an installed wheel")
        return
    table = Table("name", "model", "method", "size", "τ", "trained on", box=None, pad_edge=False)
    for entry in entries:
        tau = "" if entry["tau"] is None else f"{entry['tau']:.2f}"
        table.add_row(
            entry["name"],
            entry["model"],
            entry["method"],
            f"{entry['size_bytes'] / 1e6:.1f} MB",
            tau,
            str(entry["trained_on"] or ""),
        )
    screen.print(table)
    screen.print(f"\nuse one with --drafter zoo:METHOD; cards are in {zoo_folder()}", style="dim")
