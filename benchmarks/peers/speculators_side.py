"""The side of `speculators` in `training_throughput.py`: its EAGLE-3 model, loss and optimizer.

Its trainer asks for an accelerator (it takes the device "cuda" where there is none), so its parts
are stepped here as the trainer steps them. Its fused losses are Triton kernels, so the eager ones
run; a variant is the attention that it is told to use. Its default, flex attention, stops with
"FlexAttention does not support backward on CPU".
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from talk import Answer, serve
from torch import Tensor
from training_step import stepper


def make(job: dict[str, Any]) -> Answer:
    """The network, ready to step."""
    torch.set_num_threads(job["threads"])
    config = Eagle3SpeculatorConfig.from_pretrained(job["speculators"])
    config.transformer_layer_config._attn_implementation = job["variant"]
    model = Eagle3DraftModel.from_pretrained(job["speculators"], config=config).float().train()
    settings = SimpleNamespace(optimizer="adamw", lr=job["learning_rate"], weight_decay=0.0)
    optimizers = build_optimizers(model, settings)
    given = torch.load(job["data"])
    dtype = getattr(torch, job["precision"])
    pairs = zip(given["batches"], given["before_norm"], strict=True)
    batches = [packed(*pair, dtype) for pair in pairs]
    losses = resolve_loss_config("kl_div", "eager")

    def loss_of(number: int) -> tuple[Tensor, float]:
        _, loss, metrics = model(
            **batches[number], ttt_steps=job["unrolled"], ttt_step_loss_decay=0.8,
            loss_config=losses,
        )  # fmt: skip
        return loss, float(metrics["full_acc_0_sum"] / metrics["full_acc_0_total"])

    return stepper(model, optimizers, loss_of, precision=job["precision"])


def packed(
    tensors: dict[str, Tensor], before_norm: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A packed row as its own collation makes it of the texts in the row.

    Args:
        tensors: of our batch.
        before_norm: [1, T, D] what its norm turns into the input of the target's head.
        dtype: of hidden states.
    """
    documents = tensors["documents"][0]
    texts = []
    for document in range(int(documents.max()) + 1):
        here = documents == document
        texts.append(
            {
                "input_ids": tensors["tokens"][0, here],
                "hidden_states": tensors["features"][0, here],
                "verifier_last_hidden_states": before_norm[0, here],
                "loss_mask": tensors["loss_mask"][0, here],
                "lengths": here.sum()[None],
                "position_ids": torch.arange(int(here.sum())),
            }
        )
    hidden_size = before_norm.shape[-1]
    collate = CollateFn(len(documents), hidden_size, dtype=dtype, preprocess=shift_batch)
    kept = collate(texts)
    return {name: value for name, value in kept.items() if isinstance(value, Tensor)}


if __name__ == "__main__":
    serve(make, "speculators", "torch", "transformers")
