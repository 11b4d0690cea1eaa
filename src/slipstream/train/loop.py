"""The training loop. Start reading here.

Batches come from a store of features, so the loop needs neither the target nor the engine; real
decoding during training is an `evaluate` callable that the caller builds. On several devices
(`accelerate launch`) the batches of a step are dealt out to the processes and gradients are
averaged, so that a run has the same loss curve on one process as on many; `sharding.py` splits
the network itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn

from slipstream.data.batches import Batch
from slipstream.errors import SettingError
from slipstream.models.readout import Readout
from slipstream.train.checkpoint import load_state, save_state, states
from slipstream.train.config import TrainConfig
from slipstream.train.feed import Batches
from slipstream.train.metrics import Metrics, scalars
from slipstream.train.objectives.protocol import Loss, Objective
from slipstream.train.optimize import make_optimizers, set_rate
from slipstream.train.recompute import recompute_mlps

if TYPE_CHECKING:
    from slipstream.train.sharding import Shards

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Training:
    """What a run did.

    Args:
        steps: optimizer steps done, resumed ones included.
        tokens: packed tokens seen.
        seconds: of all sessions together.
        last: the last evaluation's measures.
        is_main: this process writes the files; the others of a run on many devices do not.
    """

    steps: int
    tokens: int
    seconds: float
    last: dict[str, object]
    is_main: bool = True


def train(
    model: nn.Module,
    objective: Objective,
    readout: Readout,
    batches: Batches,
    config: TrainConfig,
    folder: Path,
    *,
    held_out: Sequence[Batch] = (),
    evaluate: Callable[[], dict[str, object]] | None = None,
    on_step: Callable[[dict[str, object]], None] | None = None,
    on_save: Callable[[str, int], None] | None = None,
    device: torch.device = CPU,
    provenance: dict[str, object] | None = None,
) -> Training:
    """Train a draft network in place; resumes from the newest state in `folder`.

    Args:
        model: float32 master weights.
        objective: (model, batch, readout) to Loss.
        readout: the target's frozen embedding and head.
        batches: the run's data.
        config: settings.
        folder: states and `metrics.jsonl` go here.
        held_out: batches whose loss and prefix accuracy are measured at evaluations.
        evaluate: decodes with the current drafter, returns tau, alpha and reach.
        on_step: gets every metrics record.
        on_save: writes the drafter: ("last", step) when a state was saved, ("best", step) when an
            evaluation was the best so far, ("milestone", step) every `milestone_every` steps.
        device: to train on; of several processes each takes the GPU of its own number.
        provenance: stored in every state.

    Raises:
        SettingError: the batches of a step do not divide into the processes, the launcher wants
            the network sharded, or there is one process to shard it over.
        CheckpointError: the newest state cannot be read or is of another network.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # what "cuda" means to accelerate from here on
    accelerator = Accelerator(
        mixed_precision=config.precision,
        cpu=device.type == "cpu",
        log_with=config.tracker,
        project_dir=str(folder),
    )
    _check_parallel(accelerator, config)
    num_micro = share_of(config, accelerator.num_processes)
    is_main = accelerator.is_main_process
    model.to(CPU if config.shard and not is_main else accelerator.device)
    readout = readout.to(accelerator.device)
    held_out = [batch.to(accelerator.device) for batch in held_out]
    optimizers, progress = make_optimizers(model, config), _Progress()
    if states(folder):
        progress.restore(load_state(states(folder)[-1], model, optimizers))
    metrics = Metrics(folder / "metrics.jsonl", progress.step) if is_main else None
    learner = _learner(model, objective, readout, optimizers, config, accelerator)
    del optimizers  # whole states of a resumed run, which parts of them replace when sharded
    if config.tracker:
        accelerator.init_trackers("slipstream", config.model_dump())
    started, last = time.perf_counter() - progress.seconds, {}
    if is_main and progress.step >= config.steps:
        _tell(on_save, "last", progress.step)  # a kill may have come between state and drafter
    for step in range(progress.step + 1, config.steps + 1):
        set_rate(learner.optimizers, config, step)
        if hasattr(objective, "advance"):
            objective.advance((step - 1) / config.steps)
        sums = torch.zeros(3, device=accelerator.device)  # loss, prefix positions, tokens
        hits = torch.zeros(1, device=accelerator.device)
        for micro in range(num_micro):
            with learner.synchronised(is_last=micro == num_micro - 1):
                number = (step - 1) * config.accumulate + micro * accelerator.num_processes
                batch = batches(number + accelerator.process_index).to(accelerator.device)
                loss = learner(batch)
                accelerator.backward(loss.total / num_micro)
            sums += torch.stack(
                [
                    loss.total.detach().float() / config.accumulate,
                    loss.prefix_count.float(),
                    torch.tensor(float(batch.num_tokens), device=sums.device),
                ]
            )
            hits = hits + loss.prefix_hits
        norm = learner.clip(config.clip)
        for optimizer in learner.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        sums, hits = (accelerator.reduce(x, reduction="sum") for x in (sums, hits))
        progress.step, progress.tokens = step, progress.tokens + int(sums[2])
        is_end = step == config.steps
        evaluates = is_end or step % config.evaluate_every == 0
        saves = is_end or step % config.save_every == 0
        keeps = config.milestone_every is not None and step % config.milestone_every == 0
        if evaluates or saves or keeps:
            learner.gather()
        optimizer_states = learner.states(is_kept=is_main) if saves else []
        if not is_main:
            continue
        record: dict[str, object] = {
            "step": step,
            "tokens": progress.tokens,
            "loss": float(sums[0]),
            "prefix_accuracy": _shares(hits, sums[1]),
            "gradient_norm": float(norm),
            "learning_rate": learner.optimizers[0].param_groups[0]["lr"],
            "seconds": round(time.perf_counter() - started, 2),
        }
        if evaluates:
            last = measure(model, objective, readout, held_out)
            if evaluate:
                last |= evaluate()
            record |= last
            if progress.is_best(last):
                _tell(on_save, "best", step)
        metrics.append(record)
        if config.tracker:
            accelerator.log(scalars(record), step=step)
        if on_step:
            on_step(record)
        if keeps:
            _tell(on_save, "milestone", step)
        if saves:
            progress.seconds = time.perf_counter() - started
            extra = progress.extra() | {"provenance": provenance or {}}
            save_state(folder, step, model, optimizer_states, extra)
            _tell(on_save, "last", step)
    accelerator.wait_for_everyone()
    if config.tracker:
        accelerator.end_training()
    seconds = time.perf_counter() - started
    return Training(max(progress.step, config.steps), progress.tokens, seconds, last, is_main)


@torch.no_grad()
def measure(
    model: nn.Module, objective: Objective, readout: Readout, held_out: Sequence[Batch]
) -> dict[str, object]:
    """Loss and joint prefix accuracy on held-out batches; empty without any.

    `chain_tau` is 1 plus the sum of the prefix accuracies: the mean accepted length of a chain as
    deep as the unrolled steps, started at every position.
    """
    if not held_out:
        return {}
    model.eval()
    losses, hits, count = 0.0, 0.0, 0.0
    for batch in held_out:
        loss = objective(model, batch, readout)
        losses += float(loss.total.detach())
        hits = hits + loss.prefix_hits
        count += float(loss.prefix_count)
    model.train()
    accuracy = (hits / max(count, 1.0)).tolist()
    return {
        "held_out_loss": losses / len(held_out),
        "held_out_prefix_accuracy": [round(value, 5) for value in accuracy],
        "chain_tau": round(1 + sum(accuracy), 5),
    }


class _Together(nn.Module):
    """Network and objective as one module.

    Data parallelism, sharding and autocast hook `forward`; objectives call a network's other
    methods.
    """

    def __init__(self, model: nn.Module, objective: Objective, readout: Readout) -> None:
        super().__init__()
        self.model, self.objective, self.readout = model, objective, readout
        for name, value in vars(objective).items():  # an objective's own tensors follow the data
            if isinstance(value, Tensor):
                setattr(objective, name, value.to(readout.embedding.device))

    def forward(self, batch: Batch) -> tuple[Tensor, Loss]:
        """The batch's loss: what is differentiated on its own, where sharding looks for it."""
        loss = self.objective(self.model, batch, self.readout)
        return loss.total, loss


class _Copies:
    """The whole network in every process, gradients averaged: what `Shards` is the twin of."""

    def __init__(
        self, together: nn.Module, optimizers: list[torch.optim.Optimizer], accelerator: Accelerator
    ) -> None:
        self.together, self.optimizers = accelerator.prepare(together), optimizers
        self._accelerator = accelerator

    def __call__(self, batch: Batch) -> Loss:
        """The batch's loss."""
        return self.together(batch)[1]

    def synchronised(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Gradients travel between processes with the last batch of a step only."""
        return nullcontext() if is_last else self._accelerator.no_sync(self.together)

    def clip(self, most: float) -> Tensor:
        """Make the gradient's norm at most this; what it was."""
        return self._accelerator.clip_grad_norm_(self.together.parameters(), most)

    def gather(self) -> None:
        """Nothing: the network is whole."""

    def states(self, *, is_kept: bool) -> list[torch.optim.Optimizer]:
        """The optimizers, which are whole."""
        return self.optimizers if is_kept else []


def _learner(
    model: nn.Module,
    objective: Objective,
    readout: Readout,
    optimizers: list[torch.optim.Optimizer],
    config: TrainConfig,
    accelerator: Accelerator,
) -> _Copies | Shards:
    """What takes the steps: the network itself, or this process's part of it."""
    if not config.shard:
        if config.recompute:
            recompute_mlps(model)
        return _Copies(_Together(model, objective, readout), optimizers, accelerator)
    from slipstream.train.sharding import Shards  # takes a second

    twin = deepcopy(model).to(accelerator.device)  # the network stays whole for evaluations
    if config.recompute:
        recompute_mlps(twin)
    return Shards(
        _Together(twin, objective, readout), model, optimizers, config, accelerator.device
    )


@dataclass(slots=True)
class _Progress:
    """Where a run is; stored in every state."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float | None = None

    def restore(self, state: dict[str, object]) -> None:
        """Go on from a state."""
        self.step, extra = state["step"], state["extra"]
        self.tokens, self.seconds = extra["tokens"], extra["seconds"]
        self.best = extra.get("best")

    def extra(self) -> dict[str, object]:
        """What a state keeps beside weights and optimizers."""
        return {"tokens": self.tokens, "seconds": self.seconds, "best": self.best}

    def is_best(self, measures: dict[str, object]) -> bool:
        """Whether held-out text says that this drafter is the best so far; ties go to the new.

        Judged by `chain_tau`, which sees every held-out position; `tau` by decoding sees a few
        hundred steps and is the judge only where there is no held-out text.
        """
        found = measures.get("chain_tau", measures.get("tau"))
        if found is None or (self.best is not None and found < self.best):
            return False
        self.best = found
        return True


def _check_parallel(accelerator: Accelerator, config: TrainConfig) -> None:
    """Refuse launchers that shard in their own way, and parts of a network in one process."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise SettingError(
            "distributed type",
            kind.value,
            "plain data parallel, on which --shard splits the network by itself",
            "run `accelerate config` without sharding, or use torchrun, and give --shard",
        )
    if config.shard and accelerator.num_processes == 1:
        raise SettingError(
            "shard", "on", "off in a single process", "leave it out, or use torchrun"
        )


def share_of(config: TrainConfig, num_processes: int) -> int:
    """Batches of a step that one process computes.

    Raises:
        SettingError: they do not divide.
    """
    if config.accumulate % num_processes:
        raise SettingError(
            "accumulate",
            config.accumulate,
            f"a multiple of the {num_processes} processes, which share the batches of a step",
            f"use --accumulate {num_processes}",
        )
    return config.accumulate // num_processes


def _shares(hits: Tensor, count: Tensor) -> list[float]:
    """Joint prefix accuracy; empty where no position counted, because zeros would be a claim."""
    return [round(share, 5) for share in (hits / count).tolist()] if count else []


def _tell(on_save: Callable[[str, int], None] | None, kind: str, step: int) -> None:
    if on_save:
        on_save(kind, step)
