"""What may be wrong with a drafter, as variants of it: the same weights, read in another way.

A variant that predicts the target clearly better than the drafter as its files describe it names
the fault: the weights were trained so, and are served otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import CheckpointError
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.parity.decoding import taps_of

ROPE_BASES = (1e4, 1e5, 5e5, 1e6)
SWITCHES = {
    "norm_before_residual": "the residual of states {} their norm",
    "norm_output": "states handed on {} the final norm",
}
"""Flags of a network that change nothing but how its norms are used: (on: after, off: before)."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A drafter read in another way.

    Args:
        check: which check it belongs to.
        what: the reading, as the verdict names it.
        checkpoint: network and vocabulary.
        taps: hidden states that make its features.
    """

    check: str
    what: str
    checkpoint: Any
    taps: tuple[int, ...]


def variants(checkpoint: Any, *, num_layers: int, target_base: float | None) -> Iterator[Variant]:
    """Every other reading that applies to a drafter.

    Args:
        checkpoint: as read from its folder.
        num_layers: L of the target.
        target_base: the target's RoPE base, where it has one.
    """
    taps = taps_of(checkpoint)
    for what, other in _other_taps(taps, num_layers):
        yield Variant("layer ids", what, checkpoint, other)
    for what, model in _other_norms(checkpoint.model):
        yield Variant("norms", what, replace(checkpoint, model=model), taps)
    for what, model in _other_bases(checkpoint.model, target_base):
        yield Variant("RoPE base", what, replace(checkpoint, model=model), taps)
    for what, vocabulary in _other_maps(getattr(checkpoint, "vocabulary", None)):
        yield Variant("vocabulary map", what, replace(checkpoint, vocabulary=vocabulary), taps)


def _other_taps(taps: tuple[int, ...], num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if not taps:
        return
    named = ", ".join(map(str, taps))
    for shift in (-1, 1):
        moved = tuple(tap + shift for tap in taps)
        if min(moved) >= 0 and max(moved) <= num_layers:
            yield f"taps {', '.join(map(str, moved))} in place of {named}", moved
    if len(taps) > 1:
        yield f"taps {named} in the opposite order", taps[::-1]


def _other_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    state = model.state_dict()
    norms = [name for name in state if name.endswith("norm.weight")]
    pairs = [
        (name, name.replace("hidden_norm", "input_layernorm"))
        for name in norms
        if "hidden_norm" in name and name.replace("hidden_norm", "input_layernorm") in state
    ]
    if pairs:
        swapped = {a: state[b] for a, b in pairs} | {b: state[a] for a, b in pairs}
        yield "the norms of state and embedding exchanged", _with_state(model, state | swapped)
    if norms:
        raised = {name: state[name] + 1 for name in norms}
        yield "norm weights stored less one", _with_state(model, state | raised)
    for flag, what in SWITCHES.items():
        is_on = getattr(getattr(model, "config", None), flag, None)
        if is_on is not None:
            said = what.format("before" if is_on else "after")
            yield said, _with_state(model, state, **{flag: not is_on})


def _other_bases(model: nn.Module, target_base: float | None) -> Iterator[tuple[str, nn.Module]]:
    config = getattr(model, "config", None)
    base = getattr(config, "rope_theta", None)
    if base is None:
        return
    for other in sorted({*ROPE_BASES, target_base or base} - {base}):
        yield (
            f"RoPE base {other:g} in place of {base:g}",
            _with_state(model, model.state_dict(), rope_theta=other),
        )
    if getattr(config, "rope_scaling", None):
        yield (
            "RoPE without scaling",
            _with_state(model, model.state_dict(), rope_scaling=None),
        )


def _other_maps(vocabulary: DraftVocabulary | None) -> Iterator[tuple[str, DraftVocabulary]]:
    if vocabulary is None or vocabulary.is_full:
        return
    ids, size = vocabulary.target_ids, vocabulary.target_size
    places = torch.arange(len(ids))
    for what, other in (
        ("d2t read as absolute ids", ids - places),
        ("d2t read as offsets", ids + places),
    ):
        try:
            yield what, DraftVocabulary(other, size)
        except CheckpointError:
            continue


def _with_state(model: nn.Module, state: dict[str, Tensor], **changes: Any) -> nn.Module:
    """A network of the same kind with other weights or sizes."""
    made = type(model)(replace(model.config, **changes))
    made.load_state_dict(state)
    return made.train(model.training)
