"""`slipstream methods`: the catalogue."""

from __future__ import annotations

from typing import Any

from slipstream import methods as catalogue
from slipstream.cli import options as o
from slipstream.cli.output import json_output


def methods(json: o.JsonOption = False) -> None:
    """List the methods: paper, drafter, trees, verifiers, training."""
    entries = [entry(method) for method in catalogue.all()]
    with json_output(json) as writer:
        if json:
            writer.write(entries)
        else:
            _table(entries)


def entry(method: Any) -> dict[str, Any]:
    """A method's record in the keys that `--json` prints."""
    return {
        "name": method.name,
        "title": method.title,
        "paper": method.paper,
        "drafter": method.drafter,
        "model": method.model,
        "trees": list(method.trees),
        "verifiers": list(method.verifiers),
        "objective": method.objective,
        "formats": list(method.formats),
        "trainable": method.is_trainable,
        "lossless": list(method.lossless),
        "note": method.note,
    }


def _table(entries: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("method", "paper", "trees", "verifiers", "trained", "note"):
        is_prose = heading in ("paper", "note")
        table.add_column(heading, overflow="fold", ratio=3 if is_prose else None)
    for row in entries:
        table.add_row(
            row["name"],
            row["paper"] or "-",
            ", ".join(row["trees"]),
            ", ".join(catalogue.marked(row["verifiers"])),
            "yes" if row["trainable"] else "no",
            row["note"],
        )
    Console(highlight=False).print(table)
