"""Sides that take turns: all start, each is asked the same, and one that fails drops out."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from catalogue import Peer, interpreter, script
from talk import Side, SideError

PATIENCE = 600.0  # seconds a side may take to load or to reply

Who = tuple[str, str]
"""Names of a side and of its variant."""


def start(
    wanted: Mapping[Who, Peer],
    job: Mapping[str, Any],
    errors: dict[Who, str],
    *,
    environments: Path,
    threads: int,
) -> dict[Who, Side]:
    """The sides that get ready; why the others do not is noted in `errors`.

    Args:
        wanted: what each side runs in.
        job: what all of them are told, beside their variant.
        errors: is filled.
        environments: folder of the environments.
        threads: a side may compute with.
    """
    sides = {}
    for (name, variant), peer in wanted.items():
        try:
            python = interpreter(name, peer, environments)
            told = {**job, "variant": variant}
            sides[name, variant] = Side(
                python, script(name), told, threads=threads, patience=PATIENCE
            )
        except SideError as error:
            errors[name, variant] = str(error)
        except subprocess.CalledProcessError as error:
            errors[name, variant] = f"cannot be installed: {error.stderr.decode()[-300:].strip()}"
    return sides


def take_turns(
    sides: Mapping[Who, Side], rounds: Sequence[Sequence[Any]], errors: dict[Who, str]
) -> dict[Who, list[dict[str, Any]]]:
    """Replies of every side that gave all of them; who begins rotates.

    Args:
        sides: ready.
        rounds: what is asked in each.
        errors: is filled.
    """
    replies: dict[Who, list[dict[str, Any]]] = {who: [] for who in sides}
    for number, asked in enumerate(rounds):
        names = list(replies)
        shift = number % len(names) if names else 0
        for who in names[shift:] + names[:shift]:
            try:
                replies[who].append(sides[who].ask(*asked))
            except SideError as error:
                errors[who] = str(error)
                del replies[who]
    return replies
