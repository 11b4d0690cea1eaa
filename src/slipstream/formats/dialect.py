"""What a dialect is: a claim, a way in, a way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.formats.checkpoint import Files, TargetFacts


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one project writes one method's checkpoints.

    Args:
        name: as `convert --to` takes it.
        method: whose network it holds: eagle, eagle3, peagle, medusa, dflash, dspark or chain.
        readers: who writes and reads it, for people.
        claim: how a folder shows that it is of this dialect, as a sentence; None when it is not.
        load: (files, facts of the target or None) to a checkpoint, every tensor accounted for.
        dump: (checkpoint, facts of the target, number type) to files; None where the dialect is
            only read.
        is_model: it is a model of its own, which engines load with a tokenizer beside it.
    """

    name: str
    method: str
    readers: str
    claim: Callable[[Files], str | None]
    load: Callable[[Files, TargetFacts | None], Any]
    dump: Callable[[Any, TargetFacts, torch.dtype], Files] | None
    is_model: bool = False
