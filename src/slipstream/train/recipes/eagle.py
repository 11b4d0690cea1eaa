"""The recipes of EAGLE-1 and HASS: one network, one layout, two objectives.

Paper: Li et al. 2024, EAGLE, arXiv:2401.15077; Zhang et al. 2024, HASS, arXiv:2408.15766.
Differs: the layer starts as the target's last; HASS trains in one stage, also from scratch.

The target's last layer reads and writes its residual stream, this one features, which are that
stream after the final norm. With w the final norm's weight, a feature f is (stream / rms) * w, so
the start folds the norms into the matrices: what reads f is divided by w, what writes is
multiplied by it, and the rest passes a share of the feature through until it learns better.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from slipstream.formats import layouts
from slipstream.formats.checkpoint import EagleCheckpoint
from slipstream.models.eagle import Eagle, EagleConfig
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.feature import FeatureRegression
from slipstream.train.objectives.hass import HarmonisedAlignment
from slipstream.train.recipes.recipe import Material, Recipe, Settings

PASS = 0.6
"""How much of a feature the layer passes on at the start: neighbours are only partly alike."""

QUIET = 0.02
"""Scale of what the layer writes at the start; 1 / rms of the default model's stream is 0.04.
After 30 steps of 768 tokens at learning rate 1e-3 the held-out loss was 1.56 with these two, 1.71
with 0.3 and 0.04."""


class EagleSettings(Settings):
    """What `eagle` can be told beside `TrainConfig`."""

    token_weight: float = Field(0.1, ge=0, description="of the soft cross-entropy")
    noise: float = Field(0.1, ge=0, description="on the features of a text of 512 tokens")
    num_measured: int = Field(4, ge=1, le=16, description="tokens of the prefix accuracy")
    draft_vocab_size: int = Field(12288, ge=1, description="rows of the target's head that count")
    intermediate_size: int | None = Field(None, ge=1, description="None: the target's")
    initial: Literal["target", "random"] = "target"


class HassSettings(EagleSettings):
    """What `hass` can be told beside `TrainConfig`."""

    num_aligned: int = Field(3, ge=1, le=8, description="steps of context alignment")
    topk: int = Field(10, ge=1, description="likeliest tokens that are distilled")
    topk_weight: float = Field(1.0, ge=0, description="of their cross-entropy")


def make(material: Material, settings: EagleSettings) -> EagleCheckpoint:
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
    model = Eagle(
        EagleConfig(**shape, draft_vocab_size=len(vocabulary), max_length=material.max_length)
    )
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0, 0.02, generator=material.generator)
    torch.nn.init.zeros_(model.fc.bias)
    if settings.initial == "target":
        initialise(model, material.layer_weights(-1), material.final_norm)
    return EagleCheckpoint(model, vocabulary)


@torch.no_grad()
def initialise(model: Eagle, theirs: Mapping[str, Tensor], final_norm: Tensor | None) -> None:
    """Start as the target's last layer, in place; see the module's text.

    Args:
        model: a fresh network.
        theirs: state of the target's last layer, Hugging Face names; what does not fit is left.
        final_norm: [D], the weight between stream and features, or None.
    """
    hidden, layer = model.config.hidden_size, model.layers[0]
    model.fc.weight[:, hidden:] += PASS * torch.eye(hidden)
    ones = torch.ones(hidden)
    out = ones if final_norm is None else final_norm.cpu()
    theirs = {name: weight.cpu() for name, weight in theirs.items()}  # a fresh network lies there
    into = torch.where(out.abs() > 0.1, out, ones)  # what divides must not be tiny
    before = theirs.get("input_layernorm.weight", ones)
    for name, ours in layer.named_parameters():
        weight = theirs.get(name)
        if weight is None or weight.shape != ours.shape:
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weight = weight * (before / into)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight = weight * out[:, None] * QUIET
        elif name == "post_attention_layernorm.weight":
            weight = weight / into * into.square().mean().sqrt()
        ours.copy_(weight)


def eagle_objective(checkpoint: EagleCheckpoint, settings: EagleSettings) -> FeatureRegression:
    """Feature regression over the checkpoint's vocabulary."""
    return FeatureRegression(
        checkpoint.vocabulary,
        token_weight=settings.token_weight,
        noise=settings.noise,
        num_measured=settings.num_measured,
    )


def hass_objective(checkpoint: EagleCheckpoint, settings: HassSettings) -> HarmonisedAlignment:
    """Context alignment and top-K distillation over the checkpoint's vocabulary."""
    return HarmonisedAlignment(
        checkpoint.vocabulary,
        num_aligned=settings.num_aligned,
        topk=settings.topk,
        topk_weight=settings.topk_weight,
        token_weight=settings.token_weight,
        noise=settings.noise,
        num_measured=settings.num_measured,
    )


EAGLE = Recipe(
    settings=EagleSettings,
    network_settings=("draft_vocab_size", "intermediate_size", "initial"),
    taps=lambda settings, num_layers: (),  # features are the last hidden state, always stored
    make=make,
    objective=eagle_objective,
    layout=layouts.EAGLE,
)

HASS = Recipe(
    settings=HassSettings,
    network_settings=EAGLE.network_settings,
    taps=EAGLE.taps,
    make=make,
    objective=hass_objective,
    layout=layouts.EAGLE,
)
