"""A network in parts, one a process: weights, gradients and optimizer are held once by them all.

Uses PyTorch's FSDP2 (`fully_shard`) with network and objective as one unit: parts are gathered
when the unit's forward begins and split again after its backward, so that an objective may call
any method of the network. A whole copy beside it is what evaluations and files see; it is brought
up to date when they ask, and states are written whole, as unsharded runs write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from slipstream.train.config import TrainConfig
from slipstream.train.objectives.protocol import Loss
from slipstream.train.optimize import make_optimizers


@dataclass(frozen=True, slots=True)
class Gathered:
    """A sharded optimizer's state, whole; written as an optimizer's is."""

    state: dict[int, dict[str, Any]]

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Optimizer` gives it, groups left out."""
        return {"state": self.state}


class Shards:
    """A network split over the processes; every method is called by all of them at once.

    Args:
        together: the module whose forward is one training pass; split in place. Its `model` has
            the weights and names of `whole`.
        whole: the network, up to date after `gather`.
        optimizers: of the whole network; those of the parts go on from their states.
        config: of the run.
        device: of this process.
    """

    def __init__(
        self,
        together: nn.Module,
        whole: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        config: TrainConfig,
        device: torch.device,
    ) -> None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.together, self.whole = fully_shard(together, mesh=mesh), whole
        self.optimizers = make_optimizers(self.together.model, config)
        for ours, theirs in zip(self.optimizers, optimizers, strict=True):
            _take_over(ours, theirs)
        self._autocast = torch.autocast(
            device.type, torch.bfloat16, enabled=config.precision == "bf16"
        )

    def __call__(self, batch: Any) -> Loss:
        """The batch's loss."""
        with self._autocast:
            return self.together(batch)[1]

    def synchronised(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Gradients travel between processes with the last batch of a step only."""
        self.together.set_requires_gradient_sync(is_last)
        return nullcontext()

    def clip(self, most: float) -> Tensor:
        """Make the whole gradient's norm at most this; what it was."""
        return full(nn.utils.clip_grad_norm_(self.together.parameters(), most))

    @torch.no_grad()
    def gather(self) -> None:
        """Bring the whole network up to date."""
        whole = dict(self.whole.named_parameters())
        for name, part in self.together.model.named_parameters():
            if part.requires_grad:
                whole[name].copy_(full(part))

    def states(self, *, is_kept: bool) -> list[Gathered]:
        """States of the optimizers, gathered tensor by tensor; empty where nobody keeps them."""
        gathered = []
        for optimizer in self.optimizers:
            state: dict[int, dict[str, Any]] = {}
            for index, values in optimizer.state_dict()["state"].items():
                for name, value in values.items():
                    found = full(value).cpu() if isinstance(value, Tensor) else value
                    if is_kept:
                        state.setdefault(index, {})[name] = found
            gathered.append(Gathered(state))
        return gathered


def full(value: Tensor) -> Tensor:
    """A tensor of which this process may hold a part only, whole."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _take_over(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Let an optimizer of parts go on from the state of one of the whole network."""
    parameters = [p for group in ours.param_groups for p in group["params"]]
    state = {
        index: {name: _split(value, parameters[index]) for name, value in values.items()}
        for index, values in theirs.state_dict()["state"].items()
    }
    ours.load_state_dict({"state": state, "param_groups": ours.state_dict()["param_groups"]})


def _split(value: Any, like: Tensor) -> Any:
    """This process's part of what belongs to each element of a parameter; numbers stay."""
    if not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    assert isinstance(like, DTensor)
    value = value.detach().to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
