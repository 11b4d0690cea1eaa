"""RoPE scaling as GGUF files say it, which transformers' reader leaves out.

llama.cpp keeps linear and YaRN scaling in metadata (`ARCH.rope.scaling.*`) and Llama 3's as one
divisor per frequency in a tensor (`rope_freqs.weight`), without the four numbers that made it. They
are found again here; what cannot be said in transformers' words is refused, because a model read
without its scaling is another one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import UnsupportedTargetError

DIVISORS = "rope_freqs.weight"
LONG = ("rope_factors_long.weight", "rope_factors_short.weight")
IDLE = {  # what may be there besides, and the value that changes nothing; None: any
    "finetuned": None,
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_log_multiplier": 0.0,
}
CLOSE = 1e-5  # relative difference of divisors: they are float32


def add_scaling(config: Any, reader: Any, name: str) -> None:
    """Put the file's scaling into a configuration that was read without it.

    Args:
        config: the language model's, of transformers.
        reader: a GGUFReader of the file.
        name: of the file, for messages.

    Raises:
        UnsupportedTargetError: the scaling is of another kind.
    """
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return
    # Where kinds of layers differ, llama.cpp scales those that see the whole text.
    place = rope.get("full_attention", rope)
    if place.get("rope_type", "default") != "default":
        return  # transformers has read it
    scaling = read_scaling(reader, float(place["rope_theta"]), name)
    if scaling is None:
        return
    if place is not rope and scaling["rope_type"] != "linear":
        raise _unknown(name, f"{scaling['rope_type']} for some layers")
    place.update(scaling)
    if scaling["rope_type"] == "yarn":
        place.setdefault("original_max_position_embeddings", config.max_position_embeddings)


def read_scaling(reader: Any, base: float, name: str) -> dict[str, Any] | None:
    """The scaling in transformers' words, None for none.

    Args:
        reader: a GGUFReader.
        base: of the model's RoPE.
        name: of the file, for messages.

    Raises:
        UnsupportedTargetError: the scaling is of another kind.
    """
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if any(one in tensors for one in LONG):
        raise _unknown(name, "LongRoPE, by " + " and ".join(n for n in LONG if n in tensors))
    said = _metadata(reader)
    scaling = _of_metadata(said, name)
    if DIVISORS not in tensors:
        return scaling
    if scaling is not None:
        raise _unknown(name, f"{scaling['rope_type']} and {DIVISORS} at once")
    divisors = torch.from_numpy(tensors[DIVISORS].data.copy()).double().flatten()
    if bool((divisors == 1).all()):
        return None
    found = _of_divisors(divisors, base)
    if found is None:
        raise _unknown(name, f"{DIVISORS} that are not Llama 3's")
    return found


def divisors_of(scaling: dict[str, Any], base: float, count: int) -> Tensor:
    """[count] double: what Llama 3's scaling divides frequencies by, as llama.cpp stores it."""
    turns = scaling["original_max_position_embeddings"] * _per_token(base, count)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _of_metadata(said: dict[str, Any], name: str) -> dict[str, Any] | None:
    kind, factor = said.pop("type", "linear"), float(said.pop("factor", 0.0))
    length = said.pop("original_context_length", None)
    betas = {key: said.pop(f"yarn_{key}", None) for key in ("beta_fast", "beta_slow")}
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    odd = [f"{k} {value}" for k, value in said.items() if IDLE.get(k) not in (None, value)]
    odd += [key for key in said if key not in IDLE]
    if kind not in ("linear", "yarn") or odd or factor <= 0:
        raise _unknown(name, " with ".join([f"{kind} by {factor:g}", *odd]))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    return {key: value for key, value in (found | betas).items() if value is not None}


def _of_divisors(divisors: Tensor, base: float) -> dict[str, Any] | None:
    """The four numbers behind Llama 3's divisors, None if there are none.

    Between the ends 1 and 1/factor the inverse divisor is linear in the turns that a frequency
    makes in one token; two points of the line give its ends. Only ratios of the three lengths
    matter, so the low one is taken for 1, as in every published Llama.
    """
    factor = float(divisors.max())
    inner = ((divisors > 1 + CLOSE) & (divisors < factor * (1 - CLOSE))).nonzero().flatten()
    if factor <= 1 or len(inner) < 2:
        return None
    first, last = int(inner[0]), int(inner[-1])
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    turns = _per_token(base, len(divisors))
    slope = float((smooth[first] - smooth[last]) / (turns[first] - turns[last]))
    start = float(slope * turns[first] - smooth[first])  # low / (high - low)
    if slope <= 0 or start <= 0:
        return None
    scaling = {
        "rope_type": "llama3",
        "factor": round(factor, 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": round(1 + 1 / start, 3),
        "original_max_position_embeddings": round(slope / start),
    }
    again = divisors_of(scaling, base, len(divisors))
    return scaling if bool(((again - divisors).abs() <= CLOSE * divisors).all()) else None


def _per_token(base: float, count: int) -> Tensor:
    """[count] double: turns of each frequency in one token."""
    return base ** -(torch.arange(count, dtype=torch.float64) / count) / (2 * math.pi)


def _metadata(reader: Any) -> dict[str, Any]:
    """What follows `ARCH.rope.scaling.`, and the older `rope.scale_linear` as a factor."""
    arch = reader.fields["general.architecture"].contents()
    prefix = f"{arch}.rope.scaling."
    found = {
        key.removeprefix(prefix): field.contents()
        for key, field in reader.fields.items()
        if key.startswith(prefix)
    }
    older = reader.fields.get(f"{arch}.rope.scale_linear")
    return found if older is None else {"factor": older.contents(), **found}


def _unknown(name: str, what: str) -> UnsupportedTargetError:
    return UnsupportedTargetError(
        f"{name} scales RoPE in a way that is not read from GGUF files: {what}",
        hint="give the model's own folder or Hugging Face id instead",
    )
