"""The recipe of a small draft language model, distilled from its target.

Its layers start as the target's first ones, which already know what to do with embeddings, its
head as the target's rows of the draft vocabulary. After 160 steps of 512 tokens on the default
model (learning rate 1e-3, 1,024 draft ids) a chain on held-out text came to tau 1.298 from the
first two layers, 1.225 from the first and the last, 1.174 from random ones.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from slipstream.formats import layouts
from slipstream.formats.checkpoint import LanguageCheckpoint
from slipstream.models.language import Language, LanguageConfig
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.distil import Distil
from slipstream.train.recipes.recipe import Material, Recipe, Settings


class ChainSettings(Settings):
    """What `chain` can be told beside `TrainConfig`."""

    num_layers: int = Field(2, ge=1, le=64, description="decoder layers")
    draft_vocab_size: int = Field(12288, ge=1, description="target ids it can say")
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
    """Fill a fresh network in place; `warm` takes the target's first layers and final norm."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 0.02, generator=material.generator)
    if material.readout.head.shape[1] == model.config.hidden_size:
        model.lm_head.weight.copy_(material.readout.head[vocabulary.target_ids])
    if not warm:
        return
    for index, layer in enumerate(model.layers[: material.num_layers]):
        theirs = material.layer_weights(index)
        for name, ours in layer.named_parameters():
            if name in theirs and theirs[name].shape == ours.shape:
                ours.copy_(theirs[name])
    if material.final_norm is not None and material.final_norm.shape == model.norm.weight.shape:
        model.norm.weight.copy_(material.final_norm)


def objective(checkpoint: LanguageCheckpoint, settings: ChainSettings) -> Distil:
    """Distillation over the checkpoint's vocabulary."""
    return Distil(checkpoint.vocabulary)


CHAIN = Recipe(
    settings=ChainSettings,
    network_settings=("num_layers", "draft_vocab_size", "intermediate_size", "initial"),
    taps=lambda settings, num_layers: (),
    make=make,
    objective=objective,
    layout=layouts.LANGUAGE,
)
