"""What the scripts of `benchmarks/` share: lists as typed, and engines on one target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slipstream.errors import SettingError

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine


def split(name: str, text: str) -> list[str]:
    """The names of a list separated by commas.

    Args:
        name: of the option, for the error.
        text: as typed.

    Raises:
        SettingError: there is none.

    Example:
        >>> split("tasks", "qa, rag")
        ['qa', 'rag']
    """
    found = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not found:
        raise SettingError(name, f"'{text}'", "names separated by commas")
    return found


def split_counts(name: str, text: str) -> list[int]:
    """The numbers of a list separated by commas, each 1 or more.

    Args:
        name: of the option, for the error.
        text: as typed.

    Raises:
        SettingError: something else is there.
    """
    pieces = split(name, text)
    if not all(piece.isdecimal() and int(piece) for piece in pieces):
        raise SettingError(name, f"'{text}'", "numbers of 1 or more, separated by commas")
    return [int(piece) for piece in pieces]


def on_one_target(
    model: str, wanted: Iterable[tuple[str, Mapping[str, Any]]], *, dtype: str
) -> Iterator[Engine]:
    """Engines one after the other, all on the target that the first one loads.

    Args:
        model: as `slipstream.load` takes it.
        wanted: methods with their settings.
        dtype: of the target.
    """
    import slipstream

    target: Any = model
    options = {"dtype": dtype}
    for method, settings in wanted:
        engine = slipstream.load(target, method, **settings, **options)
        target, options = engine.target, {}
        yield engine
