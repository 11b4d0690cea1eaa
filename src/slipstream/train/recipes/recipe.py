"""What training needs to know about a method, as one record.

The loop, the data and the evaluations are the same for every method; a `Recipe` holds the rest:

    settings   a pydantic class of what the method alone can be told; its names are refused for
               every other method (`--set NAME=VALUE`, or an option of the same name)
    taps       which hidden states of the target its batches carry
    make       a fresh, initialised network for a target
    objective  what it is trained with
    layout     how it is read and written; a drafter is made of what was written, by the catalogue's
               own `Drafter.from_checkpoint`, so that evaluations while training decode with exactly
               the file that is served

A checkpoint is whatever `make` and `layout.read` return: an object with the network as `model`
(its `config.taps` are the taps it reads, where it reads any) and possibly a `vocabulary`.
The network is trained in place.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from slipstream.formats.layouts import Layout
from slipstream.models.readout import Readout
from slipstream.train.objectives.protocol import Objective


class Settings(BaseModel):
    """Base of a method's own settings: all have defaults, unknown names are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Material:
    """What a fresh network can be made from; plain data, so that training needs no target.

    Args:
        name: of the target.
        num_layers: L of the target.
        max_length: the target's context, tokens.
        shape: sizes of a draft layer of the target's own kind, by `Eagle3Config`'s names.
        taps: the hidden states that the batches' features hold.
        readout: the target's frozen embedding and head, float32.
        counts: [V] int64, how often each id is supervised in the training data.
        always: ids that a reduced vocabulary must hold (special and byte tokens, ends of turn).
        spare: ids of special tokens that no chat and no end of an answer uses, ascending.
        layer_weights: state of a decoder layer of the target by index, Hugging Face names.
        final_norm: [D], the target's final norm, or None.
        generator: of everything random in the first weights.
    """

    name: str
    num_layers: int
    max_length: int
    shape: Mapping[str, Any]
    taps: tuple[int, ...]
    readout: Readout
    counts: Tensor
    always: tuple[int, ...]
    spare: tuple[int, ...]
    layer_weights: Callable[[int], Mapping[str, Tensor]]
    final_norm: Tensor | None
    generator: torch.Generator


class Checkpoint(Protocol):
    """A network and what belongs to it."""

    model: nn.Module


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a method is trained; see the module's text.

    Args:
        settings: the class of the method's own settings.
        network_settings: names among them that shape a fresh network; refused beside a drafter to
            start from, which has decided them.
        taps: (settings, number of layers of the target) to the taps of the batches.
        make: (material, settings) to a fresh checkpoint.
        objective: (checkpoint, settings) to the objective.
        layout: reads and writes checkpoints.
    """

    settings: type[Settings]
    network_settings: tuple[str, ...]
    taps: Callable[[Any, int], tuple[int, ...]]
    make: Callable[[Material, Any], Any]
    objective: Callable[[Any, Any], Objective]
    layout: Layout[Any]


def load(reference: str) -> object:
    """Import what "module:NAME" points to."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
