"""One layout a draft network: any known dialect in, our own folder out, other targets refused.

A `Layout` has all that the networks' folders have in common; the constants say what each of them
holds. The folders themselves are written and understood in `dialects`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from slipstream.errors import DrafterMismatchError
from slipstream.formats import detect
from slipstream.formats import folder as files
from slipstream.formats.checkpoint import (
    Checkpoint,
    DFlashCheckpoint,
    Eagle3Checkpoint,
    EagleCheckpoint,
    LanguageCheckpoint,
    MedusaCheckpoint,
    PEagleCheckpoint,
    TargetFacts,
)
from slipstream.formats.dialect import Dialect
from slipstream.formats.dialects import slipstream
from slipstream.models.dflash import DFlashConfig
from slipstream.models.eagle import EagleConfig
from slipstream.models.eagle3 import Eagle3Config
from slipstream.models.language import LanguageConfig
from slipstream.models.medusa import MedusaConfig
from slipstream.target.protocol import Target

Stored = TypeVar("Stored", bound=Checkpoint)


@dataclass(frozen=True, slots=True)
class Layout(Generic[Stored]):
    """How folders of one draft network are read and written, and which targets it fits.

    Args:
        own: our dialect of it, which is written.
        methods: whose networks are read, as dialects name them.
        mismatches: (the network's config, a target) to what does not fit, as sentences.
        trained: the method that trains one for another target, for the hint; None for the first of
            `methods`.
    """

    own: Dialect
    methods: tuple[str, ...]
    mismatches: Callable[[Any, Target], Iterator[str]]
    trained: str | None = None

    def read(
        self,
        folder: Path | str,
        *,
        target_layers: int | None = None,
        target: TargetFacts | None = None,
    ) -> Stored:
        """Read a folder; every tensor must be known, present and of the size config.json says.

        Args:
            folder: holds config.json and the tensors, in any known dialect.
            target_layers: L of the target, where nothing else is known of it: for the default taps
                of files that name none, and to refuse taps that it does not have.
            target: more about the target, so that copies of its weights are compared.

        Raises:
            CheckpointError: missing or truncated files, unknown or missing tensors, sizes that
                disagree, or another method's network.
        """
        if target is None and target_layers is not None:
            target = TargetFacts("", target_layers)
        return detect.read(Path(folder), self.methods, target=target)

    def write(
        self,
        checkpoint: Stored,
        folder: Path,
        *,
        card: dict[str, Any] | None = None,
        overwrite: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Write config.json, model.safetensors and card.json; the folder appears whole or not.

        Args:
            checkpoint: the network and what its ids mean.
            folder: that appears.
            card: for card.json, or None.
            overwrite: replace a folder that is there.
            dtype: number type of the weights.

        Raises:
            CheckpointError: the checkpoint does not say what its ids mean.
            OutputError: the folder exists and `overwrite` is off, or cannot be written.
        """
        made = self.own.dump(checkpoint, TargetFacts("", 0), dtype)  # ours hold nothing of a target
        files.write(
            folder, made.tensors, made.config, weights=made.weights, card=card, overwrite=overwrite
        )

    def check_target(self, checkpoint: Stored, target: Target) -> None:
        """Refuse a drafter made for another target.

        Raises:
            DrafterMismatchError: its vocabulary, its hidden size or its number of layers does not
                fit the network.
        """
        found = next(self.mismatches(checkpoint.model.config, target), None)
        if found is not None:
            method, name = self.trained or self.methods[0], target.spec.name
            raise DrafterMismatchError(
                found, f"train one with `slipstream train --method {method} --model {name} ...`"
            )


def of(checkpoint: Checkpoint) -> Layout[Any]:
    """The layout of the network that a checkpoint holds."""
    method = detect.method_of(checkpoint)
    return next(layout for layout in ALL if method in layout.methods)


def _made_for(what: str, ours: int, target: Target, theirs: int) -> str:
    name = target.spec.name
    return f"the drafter was made for a target with {what} {ours}, {name} has {theirs}"


def _sizes(target: Target, *, vocab_size: int | None, hidden_size: int) -> Iterator[str]:
    """The sizes that every network shares with its target; None for an unknown vocabulary."""
    num_rows, width = target.embedding().shape[0], target.spec.hidden_size
    if vocab_size is not None and vocab_size != num_rows:
        yield _made_for("vocabulary", vocab_size, target, num_rows)
    if hidden_size != width:
        yield _made_for("hidden size", hidden_size, target, width)


def _of_one_width(
    config: EagleConfig | MedusaConfig | LanguageConfig, target: Target
) -> Iterator[str]:
    """A network as wide as its target, of any number of layers."""
    yield from _sizes(target, vocab_size=config.vocab_size, hidden_size=config.hidden_size)


def _of_fused_taps(config: Eagle3Config, target: Target) -> Iterator[str]:
    """A network that fuses taps; of a width of its own where it has its own embedding."""
    spec, deepest = target.spec, max(config.taps)
    yield from _sizes(target, vocab_size=config.vocab_size, hidden_size=config.target_hidden_size)
    if config.hidden_size != spec.hidden_size and not config.has_embedding:
        yield (
            f"the drafter's hidden size {config.hidden_size} differs from the width "
            f"{spec.hidden_size} of {spec.name}'s embedding, which it borrows: it stores none of "
            "its own"
        )
    if deepest > spec.num_layers:
        yield f"the drafter reads layer {deepest}, {spec.name} has {spec.num_layers}"


def _of_blocks(config: DFlashConfig, target: Target) -> Iterator[str]:
    """A network that fuses taps and always borrows the embedding."""
    spec, deepest = target.spec, max(config.taps)
    yield from _sizes(target, vocab_size=config.vocab_size, hidden_size=config.target_hidden_size)
    if config.hidden_size != spec.hidden_size:
        yield _made_for("embedding of width", config.hidden_size, target, spec.hidden_size)
    if deepest > spec.num_layers:
        yield _made_for("at least as many layers as", deepest, target, spec.num_layers)


EAGLE: Layout[EagleCheckpoint] = Layout(slipstream.EAGLE, ("eagle",), _of_one_width)
"""EAGLE-1, EAGLE-2 and HASS.

Paper: Li et al. 2024, EAGLE, arXiv:2401.15077. Our own layout is that of SafeAILab/EAGLE.
Differs: the target's embedding is read from the target, so our own files do not repeat it; files
with `d2t` and `t2d` read only some rows of the target's head, which makes drafting cheaper: q is
then the softmax over these ids, and every other id has q = 0.

One file serves all three methods, which differ in how the network was trained and which trees it
drafts, not in what it is.
"""

EAGLE3: Layout[Eagle3Checkpoint] = Layout(slipstream.EAGLE3, ("eagle3",), _of_fused_taps)
"""EAGLE-3.

Paper: Li et al. 2025, EAGLE-3, arXiv:2503.01840. Our own layout is that of SafeAILab/EAGLE and
also says which hidden states are read; see `dialects`.
"""

PEAGLE: Layout[PEagleCheckpoint] = Layout(
    slipstream.PEAGLE, ("peagle",), _of_fused_taps, trained="eagle3"
)
"""P-EAGLE.

Paper: Hui et al. 2026, P-EAGLE, arXiv:2602.01469. Our own layout is that of EAGLE-3's files with
`layers.1.*` and so on, `embed_tokens`, `mask_hidden` and the config's `mask_token_id`.
It is not trained here, so that the hint for another target names EAGLE-3.
"""

DFLASH: Layout[DFlashCheckpoint] = Layout(slipstream.DFLASH, ("dflash", "dspark"), _of_blocks)
"""DFlash, with or without a path head.

Paper: Chen et al. 2026, DFlash, arXiv:2602.06036. Our own layout is that of z-lab/dflash.
Differs: our files also carry `slipstream.taps`, `d2t` and `t2d` where the head is restricted to a
draft vocabulary, and `path.*` where there is a path head, which other engines do not know.
Embedding and head are the target's and never stored; copies of them in files are left out.
"""

MEDUSA: Layout[MedusaCheckpoint] = Layout(slipstream.MEDUSA, ("medusa",), _of_one_width)
"""Medusa heads: our folder, the authors' `medusa_lm_head.pt`, vLLM's.

Ours: config.json says `"model_type": "slipstream-medusa"`; model.safetensors holds
`heads.I.R.linear.*` (block R of head I), `heads.I.B.weight` where heads have their own projection
behind their B blocks, and the maps `d2t` and `t2d` of a reduced vocabulary.
"""

LANGUAGE: Layout[LanguageCheckpoint] = Layout(slipstream.CHAIN, ("chain",), _of_one_width)
"""A small draft language model: our folder, or a whole Llama for other engines.

Ours: config.json says `"model_type": "slipstream-language"`; model.safetensors holds `layers.*`,
`norm`, `lm_head` and the maps `d2t` and `t2d` of EAGLE-3 files. The embedding is the target's and
is not stored.
"""

ALL: tuple[Layout[Any], ...] = (EAGLE, EAGLE3, PEAGLE, DFLASH, MEDUSA, LANGUAGE)
