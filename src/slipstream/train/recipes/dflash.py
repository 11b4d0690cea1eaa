"""DFlash's recipe: layers that start as the target's last ones, trained on masked blocks.

And DSpark's: a path head on such a network.

Paper: Chen et al. 2026, DFlash, arXiv:2602.06036, section 4; DSpark, arXiv:2607.05147, section 3.
Differs: warm first weights, three layers, the shifted read-out, a head over the data's most
frequent ids, labels from the target's distributions and some batches of narrower blocks, because
the training budget here is a thousandth of the paper's. On the default model a network of two
layers had, after 51,000 tokens, a loss of 5.72 shifted and 5.88 not, though over one slot more.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from slipstream.errors import CheckpointError
from slipstream.formats import layouts
from slipstream.formats.checkpoint import DFlashCheckpoint
from slipstream.models.dflash import DFlash, DFlashConfig, choose_mask_token, default_taps
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.dflash import BlockDiffusion
from slipstream.train.recipes.recipe import Material, Recipe, Settings


class DFlashSettings(Settings):
    """What `dflash` can be told beside `TrainConfig`."""

    width: int = Field(8, ge=2, le=64, description="slots of a block, anchor included")
    num_layers: int = Field(3, ge=1, le=16, description="decoder layers")
    is_shifted: bool = Field(True, description="slot j says the token after its own (DSpark)")
    draft_vocab_size: int = Field(12_288, ge=1, description="target ids it can say")
    intermediate_size: int | None = Field(None, ge=1, description="None: the target's")
    initial: Literal["target", "random"] = "target"
    taps: tuple[int, ...] | None = Field(None, description="None: the paper's five")
    mask_token: int | None = Field(None, ge=0, description="None: a spare id of the tokenizer")
    density: float = Field(1.0, gt=0, le=16, description="block slots per token of the texts")
    gamma: float = Field(2.0, gt=0, description="slot j weighs exp(-(j-1)/gamma)")
    weighting: Literal["decay", "pace"] = "decay"
    hard: float = Field(0.0, ge=0, le=1, description="share of the target's choice in the labels")
    rounds: int = Field(1, ge=1, le=8, description="simulated rounds of drafting")
    narrow: float = Field(0.5, ge=0, le=1, description="share of batches with narrower blocks")
    anchor_seed: int = Field(0, ge=0, lt=2**32, description="of where blocks begin")


class DSparkSettings(DFlashSettings):
    """What `dspark` can be told: all that `dflash` can, and its path head."""

    path_rank: int = Field(128, ge=1, le=1024, description="rank of the path head")
    only_path: bool = Field(False, description="the block network stays as it is")


def choose_taps(settings: DFlashSettings, num_layers: int) -> tuple[int, ...]:
    """The paper's taps unless told otherwise."""
    return default_taps(num_layers) if settings.taps is None else settings.taps


def make(material: Material, settings: DFlashSettings) -> DFlashCheckpoint:
    """A network over the data's most frequent ids, whose layers start as the target's last.

    Raises:
        SettingError: the target has no id for the mask token, or the draft vocabulary is too
            small for the ids it must hold.
    """
    rows, vocab_size = material.readout.embedding.shape[0], len(material.counts)
    mask_token = settings.mask_token
    if mask_token is None:
        mask_token = choose_mask_token(
            material.spare, vocab_size=vocab_size, num_rows=rows, name=material.name
        )
    vocabulary = DraftVocabulary.from_counts(
        material.counts, min(settings.draft_vocab_size, vocab_size), always=material.always
    )
    vocabulary = DraftVocabulary(vocabulary.target_ids, rows)
    shape = dict(material.shape)
    if settings.intermediate_size is not None:
        shape["intermediate_size"] = settings.intermediate_size
    config = DFlashConfig(
        **shape,
        num_layers=settings.num_layers,
        draft_vocab_size=len(vocabulary),
        taps=material.taps,
        width=settings.width,
        mask_token=mask_token,
        is_shifted=settings.is_shifted,
        max_length=material.max_length,
    )
    model = DFlash(config)
    initialise(model, material, is_warm=settings.initial == "target")
    return DFlashCheckpoint(model, vocabulary)


@torch.no_grad()
def initialise(model: DFlash, material: Material, *, is_warm: bool) -> None:
    """Fill a fresh network in place: from the target's last layers where shapes allow.

    The highest tap passes through the fusion, so that keys and values begin as the target's own.
    """
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 0.02, generator=material.generator)
    if not is_warm:
        return
    count = min(len(model.layers), material.num_layers)
    for index, layer in enumerate(model.layers):
        theirs = material.layer_weights(max(0, index - len(model.layers) + count) - count)
        for name, ours in layer.named_parameters():
            given = theirs.get(name)
            if given is not None and given.shape == ours.shape:
                ours.copy_(given)
    if material.final_norm is not None and material.final_norm.shape == model.norm.weight.shape:
        model.norm.weight.copy_(material.final_norm)
    hidden = model.config.hidden_size
    if model.config.target_hidden_size == hidden:
        last = (len(model.config.taps) - 1) * hidden
        model.fc.weight.mul_(0.25)
        model.fc.weight[:, last:] += torch.eye(hidden)


def make_with_path(material: Material, settings: DSparkSettings) -> DFlashCheckpoint:
    """A fresh network with a path head; see `make`."""
    checkpoint = make(material, settings)
    checkpoint.model.add_path(settings.path_rank)
    return checkpoint


def path_objective(checkpoint: DFlashCheckpoint, settings: DSparkSettings) -> BlockDiffusion:
    """Masked blocks with a path head, which a drafter to start from may not have yet."""
    if checkpoint.model.config.has_path_table:
        raise CheckpointError(
            "the drafter's path head is a table over the vocabulary, which drafts here and is "
            "neither trained nor examined",
            "train from a drafter without a path head, or from one trained here; to draft with "
            "this one: slipstream generate --method dspark --drafter FOLDER",
        )
    if checkpoint.model.path is None:
        checkpoint.model.add_path(settings.path_rank)
    if settings.only_path:  # said to the optimizer and to other processes, which wait for gradients
        checkpoint.model.requires_grad_(False)
        checkpoint.model.path.requires_grad_(True)
    return objective(checkpoint, settings)


def objective(checkpoint: DFlashCheckpoint, settings: DFlashSettings) -> BlockDiffusion:
    """Masked blocks over the checkpoint's vocabulary."""
    return BlockDiffusion(
        checkpoint.vocabulary,
        density=settings.density,
        gamma=settings.gamma,
        weighting=settings.weighting,
        hard=settings.hard,
        rounds=settings.rounds,
        narrow=settings.narrow,
        only_path=isinstance(settings, DSparkSettings) and settings.only_path,
        seed=settings.anchor_seed,
    )


_NETWORK = (
    "width", "num_layers", "is_shifted", "draft_vocab_size", "intermediate_size", "initial",
    "taps", "mask_token",
)  # fmt: skip

DFLASH = Recipe(
    settings=DFlashSettings,
    network_settings=_NETWORK,
    taps=choose_taps,
    make=make,
    objective=objective,
    layout=layouts.DFLASH,
)

DSPARK = Recipe(
    settings=DSparkSettings,
    network_settings=_NETWORK,
    taps=choose_taps,
    make=make_with_path,
    objective=path_objective,
    layout=layouts.DFLASH,
)
"""On a drafter to start from (`--drafter FOLDER`), whose path head it adds and trains."""
