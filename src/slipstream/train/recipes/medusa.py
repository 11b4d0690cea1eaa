"""Medusa's recipe: residual blocks under the target's own frozen head, or heads of their own.

Paper: Cai et al. 2024, Medusa, arXiv:2401.10774.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from slipstream.formats import layouts
from slipstream.formats.checkpoint import MedusaCheckpoint
from slipstream.models.medusa import Medusa, MedusaConfig
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.medusa import MedusaHeads
from slipstream.train.recipes.recipe import Material, Recipe, Settings


class MedusaSettings(Settings):
    """What `medusa` can be told beside `TrainConfig`."""

    num_heads: int = Field(4, ge=1, le=16, description="heads, one per drafted depth")
    num_blocks: int = Field(2, ge=1, le=16, description="residual blocks of a head")
    draft_vocab_size: int = Field(12288, ge=1, description="target ids it can say")
    head: Literal["borrowed", "own"] = Field("borrowed", description="own: a projection per head")
    decay: float = Field(0.8, gt=0, le=1, description="weight of each later head")
    labels: Literal["hard", "soft"] = Field("hard", description="soft: the whole distribution")


@torch.no_grad()
def make(material: Material, settings: MedusaSettings) -> MedusaCheckpoint:
    """Heads over the data's most frequent ids; each starts as a copy of the target's own head.

    Raises:
        SettingError: a draft vocabulary too small for the ids it must hold.
    """
    chosen = DraftVocabulary.from_counts(
        material.counts,
        min(settings.draft_vocab_size, len(material.counts)),
        always=material.always,
    )
    head = material.readout.head
    vocabulary = DraftVocabulary(chosen.target_ids, head.shape[0])
    model = Medusa(
        MedusaConfig(
            hidden_size=head.shape[1],
            num_heads=settings.num_heads,
            num_blocks=settings.num_blocks,
            vocab_size=head.shape[0],
            draft_vocab_size=len(vocabulary),
            borrows_head=settings.head == "borrowed",
        )
    )
    if not model.config.borrows_head:
        for own in model.heads:
            own[-1].weight.copy_(head[vocabulary.target_ids])
    return MedusaCheckpoint(model, vocabulary)


def objective(checkpoint: MedusaCheckpoint, settings: MedusaSettings) -> MedusaHeads:
    """Medusa-1 over the checkpoint's vocabulary."""
    soft = settings.labels == "soft"
    return MedusaHeads(checkpoint.vocabulary, decay=settings.decay, soft=soft)


MEDUSA = Recipe(
    settings=MedusaSettings,
    network_settings=("num_heads", "num_blocks", "draft_vocab_size", "head"),
    taps=lambda settings, num_layers: (),
    make=make,
    objective=objective,
    layout=layouts.MEDUSA,
)
