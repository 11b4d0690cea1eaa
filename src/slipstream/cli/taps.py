"""Which hidden states `slipstream data extract` stores."""

from __future__ import annotations

from collections.abc import Callable

from slipstream import methods
from slipstream.errors import SettingError


def wanted_taps(method: str, taps: str | None) -> Callable[[int], tuple[int, ...]]:
    """Which hidden states to store, by number of layers: those named, or a method's.

    Raises:
        UnknownNameError: no such method.
        SettingError: the method has no draft network, or a tap is no number.
    """
    record = methods.get(method)
    if taps is not None:
        numbers = _parsed_taps(taps)
        return lambda num_layers: _within(numbers, num_layers)
    if not record.is_trainable:
        names = ", ".join(m.name for m in methods.all() if m.is_trainable)
        raise SettingError("method", method, f"one that is trained: {names}", "or give --taps")
    from slipstream.train import recipes

    recipe = recipes.get(method)
    return lambda num_layers: recipe.taps(recipe.settings(), num_layers)


def _parsed_taps(taps: str) -> tuple[int, ...]:
    """The numbers of "2,15,27"."""
    try:
        numbers = tuple(int(part) for part in taps.split(","))
    except ValueError:
        numbers = ()
    if not numbers or list(numbers) != sorted(set(numbers)):
        raise SettingError(
            "taps", taps, "ascending numbers, separated by commas", "for example --taps 2,15,27"
        )
    return numbers


def _within(taps: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The taps, if the target has them."""
    if taps[0] < 0 or taps[-1] > num_layers:
        raise SettingError(
            "taps", ",".join(map(str, taps)), f"within 0..{num_layers}, the target's hidden states"
        )
    return taps
