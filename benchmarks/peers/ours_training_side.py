"""Our side of `training_throughput.py`: the objective and optimizer of `slipstream train`."""

from __future__ import annotations

from typing import Any

import torch
from talk import Answer, serve
from torch import Tensor
from training_step import stepper

from slipstream.data.batches import Batch
from slipstream.formats.layouts import EAGLE3
from slipstream.models.readout import Readout
from slipstream.train.config import TrainConfig
from slipstream.train.objectives.ttt import TrainingTimeTest
from slipstream.train.optimize import make_optimizers


def make(job: dict[str, Any]) -> Answer:
    """The network, ready to step."""
    torch.set_num_threads(job["threads"])
    given = torch.load(job["data"])
    batches = [Batch(**tensors) for tensors in given["batches"]]
    readout = Readout(given["embedding"], given["head"])
    checkpoint = EAGLE3.read(job["drafter"])
    model = checkpoint.model.float().train()
    objective = TrainingTimeTest(checkpoint.vocabulary, num_unrolled=job["unrolled"])
    optimizers = make_optimizers(model, TrainConfig(learning_rate=job["learning_rate"]))

    def loss_of(number: int) -> tuple[Tensor, float]:
        found = objective(model, batches[number], readout)
        return found.total, float(found.prefix_hits[0] / found.prefix_count)

    return stepper(model, optimizers, loss_of, precision=job["precision"])


if __name__ == "__main__":
    serve(make, "slipstream", "torch")
