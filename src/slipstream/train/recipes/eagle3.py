"""EAGLE-3's recipe: one layer that starts as the target's last, trained by unrolling it.

Paper: Li et al. 2025, EAGLE-3, arXiv:2503.01840.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipstream.formats import layouts
from slipstream.formats.checkpoint import Eagle3Checkpoint
from slipstream.models.eagle3 import Eagle3, Eagle3Config, default_taps
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.initial import initialise
from slipstream.train.objectives.ttt import TrainingTimeTest
from slipstream.train.recipes.recipe import Material, Recipe, Settings


class Eagle3Settings(Settings):
    """What `eagle3` can be told beside `TrainConfig`."""

    num_unrolled: int = Field(4, ge=1, le=16, description="steps of the training-time test")
    decay: float = Field(0.8, gt=0, le=1, description="weight of each later unrolled step")
    unroll_after: float = Field(
        0.5, ge=0, lt=1, description="share of the steps that take the first unrolled step alone"
    )
    draft_vocab_size: int = Field(8192, ge=1, description="target ids it can say")
    intermediate_size: int | None = Field(None, ge=1, description="None: the target's")
    initial: Literal["target", "random"] = "target"
    taps: tuple[int, ...] | None = Field(None, description="None: the paper's three")


def choose_taps(settings: Eagle3Settings, num_layers: int) -> tuple[int, ...]:
    """The paper's taps unless told otherwise."""
    return default_taps(num_layers) if settings.taps is None else settings.taps


def make(material: Material, settings: Eagle3Settings) -> Eagle3Checkpoint:
    """A network whose layer and head start as the target's, over the data's most frequent ids.

    Raises:
        SettingError: a draft vocabulary too small for the ids it must hold.
    """
    vocabulary = DraftVocabulary.from_counts(
        material.counts,
        min(settings.draft_vocab_size, len(material.counts)),
        always=material.always,
    )
    rows = material.readout.embedding.shape[0]
    vocabulary = DraftVocabulary(vocabulary.target_ids, rows)
    shape = dict(material.shape)
    if settings.intermediate_size is not None:
        shape["intermediate_size"] = settings.intermediate_size
    model = Eagle3(
        Eagle3Config(
            **shape,
            draft_vocab_size=len(vocabulary),
            taps=material.taps,
            max_length=material.max_length,
        )
    )
    is_warm = settings.initial == "target"
    initialise(
        model,
        vocabulary,
        material.readout,
        layer=material.layer_weights(-1) if is_warm else None,
        final_norm=material.final_norm if is_warm else None,
        generator=material.generator,
    )
    return Eagle3Checkpoint(model, vocabulary)


def objective(checkpoint: Eagle3Checkpoint, settings: Eagle3Settings) -> TrainingTimeTest:
    """The training-time test over the checkpoint's vocabulary."""
    return TrainingTimeTest(
        checkpoint.vocabulary,
        num_unrolled=settings.num_unrolled,
        decay=settings.decay,
        unroll_after=settings.unroll_after,
    )


EAGLE3 = Recipe(
    settings=Eagle3Settings,
    network_settings=("draft_vocab_size", "intermediate_size", "initial", "taps"),
    taps=choose_taps,
    make=make,
    objective=objective,
    layout=layouts.EAGLE3,
)
