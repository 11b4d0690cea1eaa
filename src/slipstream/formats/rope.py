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
KNOWN = ("default", "linear", "llama3")


def read_rope(config: Mapping[str, Any], place: str) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling.

    Args:
        config: of the draft layer.
        place: where it was read, for messages.

    Raises:
        CheckpointError: the two spellings disagree, or the scaling is one we do not have.

    Example:
        >>> read_rope({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "x")
        (500000.0, None)
        >>> read_rope({}, "x")
        (10000.0, None)
    """
    nested = dict(config.get("rope_parameters") or {})
    inner, outer = nested.pop("rope_theta", None), config.get("rope_theta")
    if inner is not None and outer is not None and float(inner) != float(outer):
        raise CheckpointError(
            f"{place}: rope_theta says RoPE base {outer:g}, rope_parameters says {inner:g}",
            "keep the one that the drafter was trained with",
        )
    scaling = config.get("rope_scaling") or nested or None
    if scaling is not None:
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in KNOWN:
            raise CheckpointError(
                f"{place} scales RoPE by '{kind}', expected one of {', '.join(KNOWN)}"
            )
        scaling = None if kind == "default" else dict(scaling)
    base = inner if outer is None else outer
    return float(BASE if base is None else base), scaling


def write_rope(base: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The older spelling, which engines read."""
    return {"rope_theta": base, "rope_scaling": None if scaling is None else dict(scaling)}
