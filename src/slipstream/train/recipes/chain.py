"""The recipe of a small draft language model, distilled from its target.

Its layers start as layers of the target, its head as the target's rows of the draft vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from slipstream.formats import language
from slipstream.formats.language import LanguageCheckpoint
from slipstream.models.language import Language, LanguageConfig
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.distil import Distil
from slipstream.train.recipes.recipe import Material, Recipe, Settings


class ChainSettings(Settings):
    """What `chain` can be told beside `TrainConfig`."""

    num_layers: int = Field(2, ge=1, le=64, description="decoder layers")
    draft_vocab_size: int = Field(12288, ge=1)
    intermediate_size: int | None = Field(None, ge=1, description="None: the target's")
    initial: Literal["target", "random"] = "target"


def make(material: Material, settings: ChainSettings) -> LanguageCheckpoint:
    """A network over the data's most frequent ids, initialised from the target where shapes fit.

    Raises:
        SettingError: a draft vocabulary too small for the ids it must hold.
    """
    chosen = DraftVocabulary.from_counts(
        material.counts,
        min(settings.draft_vocab_size, len(material.counts)),
        always=material.always,
    )
    rows = material.readout.embedding.shape[0]
    vocabulary = DraftVocabulary(chosen.target_ids, rows)
    shape = dict(material.shape)
    del shape["target_hidden_size"]
    if settings.intermediate_size is not None:
        shape["intermediate_size"] = settings.intermediate_size
    model = Language(
        LanguageConfig(
            **shape,
            num_layers=settings.num_layers,
            draft_vocab_size=len(vocabulary),
            max_length=material.max_length,
        )
    )
    initialise(model, vocabulary, material, warm=settings.initial == "target")
    return LanguageCheckpoint(model, vocabulary)


@torch.no_grad()
def initialise(
    model: Language, vocabulary: DraftVocabulary, material: Material, *, warm: bool
) -> None:
    """Fill a fresh network in place; `warm` takes the target's layers and final norm."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 0.02, generator=material.generator)
    if material.readout.head.shape[1] == model.config.hidden_size:
        model.lm_head.weight.copy_(material.readout.head[vocabulary.target_ids])
    if not warm:
        return
    for layer, index in zip(
        model.layers, source_layers(len(model.layers), material.num_layers), strict=True
    ):
        theirs = material.layer_weights(index)
        for name, ours in layer.named_parameters():
            if name in theirs and theirs[name].shape == ours.shape:
                ours.copy_(theirs[name])
    if material.final_norm is not None and material.final_norm.shape == model.norm.weight.shape:
        model.norm.weight.copy_(material.final_norm)


def source_layers(num_layers: int, num_target_layers: int) -> list[int]:
    """Which layers of the target a smaller model starts from: evenly spread, both ends in.

    Example:
        >>> source_layers(3, 30)
        [0, 14, 29]
    """
    last = num_target_layers - 1
    if num_layers == 1:
        return [last]
    return [place * last // (num_layers - 1) for place in range(num_layers)]


def objective(checkpoint: LanguageCheckpoint, settings: ChainSettings) -> Distil:
    """Distillation over the checkpoint's vocabulary."""
    return Distil(checkpoint.vocabulary)


CHAIN = Recipe(
    settings=ChainSettings,
    network_settings=("num_layers", "draft_vocab_size", "intermediate_size", "initial"),
    taps=lambda settings, num_layers: (),
    make=make,
    objective=objective,
    layout=language,
)
