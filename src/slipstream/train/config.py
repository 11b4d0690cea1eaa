"""The settings of a training run, validated."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TrainConfig(BaseModel):
    """What a run does, whatever the method; stored beside its checkpoints, compared on resume.

    Lengths are in tokens, steps are optimizer steps. Unknown keys are errors; what only one
    method can be told is in its recipe's settings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = "eagle3"
    steps: int = Field(1000, ge=1)
    rows: int = Field(1, ge=1, description="packed rows of a batch")
    max_length: int = Field(1024, ge=8, description="tokens of a packed row")
    accumulate: int = Field(1, ge=1, description="batches of a step, all processes together")
    learning_rate: float = Field(1e-3, gt=0, allow_inf_nan=False)
    warmup: float = Field(0.04, ge=0, lt=1, description="share of the steps")
    final_rate: float = Field(0.02, ge=0, le=1, description="last learning rate over the highest")
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, gt=0, description="largest gradient norm")
    optimizer: Literal["adamw", "muon"] = "adamw"
    precision: Literal["no", "bf16"] = Field("no", description="of the forward pass: autocast")
    shard: bool = Field(False, description="network and optimizer, over the processes")
    recompute: bool = Field(False, description="MLP activations, in the backward pass")
    lora_rank: int | None = Field(None, ge=1, description="adapters on a given drafter, else all")
    seed: int = Field(0, ge=0, lt=2**63)
    save_every: int = Field(200, ge=1)
    evaluate_every: int = Field(200, ge=1)
    milestone_every: int | None = Field(None, ge=1, description="steps between kept drafters")
    tracker: Literal["tensorboard", "wandb"] | None = None
    held_out: int = Field(64, ge=0, description="last texts of the store, kept for evaluation")
