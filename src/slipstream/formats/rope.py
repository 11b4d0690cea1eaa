"""RoPE as configs say it: two spellings, and a base that one dialect leaves out on purpose.

Older files have `rope_theta` and `rope_scaling` at the top, transformers 5 writes one
`rope_parameters`. An EAGLE-3 file without a base was trained with 10,000, whatever its target has:
SafeAILab/EAGLE trains with the default of its own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import CheckpointError

BASE = 10000.0
LENGTH = "original_max_position_embeddings"
NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", LENGTH),
    "yarn": ("factor", LENGTH),
}
"""Scalings we have, and the keys that each is nothing without."""


def read_rope(config: Mapping[str, Any], place: str) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling.

    Args:
        config: of the draft layer.
        place: where it was read, for messages.

    Raises:
        CheckpointError: the two spellings disagree, or the scaling is one we do not have or lacks
            a number.

    Example:
        >>> read_rope({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "x")
        (500000.0, None)
        >>> read_rope({}, "x")
        (10000.0, None)
    """
    nested = dict(config.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in nested.values()):
        raise CheckpointError(
            f"{place}: rope_parameters differ by kind of layer ({', '.join(nested)}), expected one "
            "RoPE for the whole drafter",
            "take a checkpoint with one RoPE",
        )
    inner, outer = nested.pop("rope_theta", None), config.get("rope_theta")
    if inner is not None and outer is not None and float(inner) != float(outer):
        raise CheckpointError(
            f"{place}: rope_theta says RoPE base {outer:g}, rope_parameters says {inner:g}",
            "keep the one that the drafter was trained with",
        )
    base = inner if outer is None else outer
    scaling = _scaling(config.get("rope_scaling") or nested, config, place)
    return float(BASE if base is None else base), scaling


def write_rope(base: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The older spelling, which engines read."""
    return {"rope_theta": base, "rope_scaling": None if scaling is None else dict(scaling)}


def _scaling(
    said: Mapping[str, Any], config: Mapping[str, Any], place: str
) -> dict[str, Any] | None:
    """A scaling with every number it needs, None for none."""
    scaling = dict(said)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in NEEDED:
        raise CheckpointError(
            f"{place} scales RoPE by '{kind}', expected one of {', '.join(NEEDED)}",
            "take a checkpoint with one of these",
        )
    if kind == "default":
        return None
    # Transformers takes the original length from the top, and the longest text for a missing one.
    length = config.get(LENGTH) or scaling.get(LENGTH) or config.get("max_position_embeddings")
    if LENGTH in NEEDED[kind] and length is not None:
        scaling[LENGTH] = length
    numbers = int | float
    lacking = [name for name in NEEDED[kind] if not isinstance(scaling.get(name), numbers)]
    if lacking:
        raise CheckpointError(
            f"{place} scales RoPE by '{kind}' and says no {' and no '.join(lacking)}",
            "take these numbers from the config that the drafter was trained with",
        )
    return scaling
