"""The training loop. Start reading here.

Batches come from a store of features, so the loop needs neither the target nor the engine; real
decoding during training is an `evaluate` callable that the caller builds.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from slipstream.data.batches import Batch, collate, plan
from slipstream.data.store import Store
from slipstream.models.readout import Readout
from slipstream.train.checkpoint import load_state, save_state, states
from slipstream.train.config import TrainConfig
from slipstream.train.objectives.protocol import Objective


@dataclass(frozen=True, slots=True)
class Training:
    """What a run did.

    Args:
        steps: optimizer steps done, resumed ones included.
        tokens: packed tokens seen.
        seconds: of all sessions together.
        last: the last evaluation's measures.
    """

    steps: int
    tokens: int
    seconds: float
    last: dict[str, object]


class Batches:
    """The run's batches as a function of their number, so that a resumed run continues exactly.

    Args:
        store: features.
        items: which of its samples to train on.
        config: lengths, rows and seed.
    """

    def __init__(self, store: Store, items: Sequence[int], config: TrainConfig) -> None:
        self.store, self.items, self.config = store, list(items), config
        lengths = store.lengths
        self.lengths = [lengths[item] for item in self.items]
        self._plans: dict[int, list[list[list[int]]]] = {}  # by epoch

    def __call__(self, number: int) -> Batch:
        """Batch `number` of the run, counting through the epochs."""
        epoch, left = 0, number
        while left >= len(self._planned(epoch)):
            left -= len(self._planned(epoch))
            epoch += 1
        rows = self._planned(epoch)[left]
        samples = [[self.store[self.items[i]] for i in row] for row in rows]
        return collate(
            samples, max_length=self.config.max_length, dtype=torch.float32, number=number
        )

    @property
    def per_epoch(self) -> int:
        """Batches of the first epoch."""
        return len(self._planned(0))

    def _planned(self, epoch: int) -> list[list[list[int]]]:
        if epoch not in self._plans:
            config = self.config
            self._plans[epoch] = plan(
                self.lengths,
                max_length=config.max_length,
                rows=config.rows,
                seed=config.seed,
                epoch=epoch,
            )
        return self._plans[epoch]


def train(
    model: nn.Module,
    objective: Objective,
    readout: Readout,
    batches: Batches,
    config: TrainConfig,
    folder: Path,
    *,
    held_out: Sequence[Batch] = (),
    evaluate: Callable[[nn.Module], dict[str, object]] | None = None,
    on_step: Callable[[dict[str, object]], None] | None = None,
    on_save: Callable[[nn.Module, int], None] | None = None,
) -> Training:
    """Train a draft network; resumes from the newest state in `folder`.

    Args:
        model: float32 master weights, trained in place.
        objective: (model, batch, readout) to Loss.
        readout: the target's frozen embedding and head.
        batches: the run's data.
        config: settings.
        folder: states and `metrics.jsonl` go here.
        held_out: batches whose loss and prefix accuracy are measured at evaluations.
        evaluate: decodes with the current drafter, returns tau, alpha and reach.
        on_step: gets every metrics record.
        on_save: writes the drafter when a state was saved.
    """
    accelerator = Accelerator(mixed_precision=config.precision)
    optimizers = make_optimizers(model, config)
    done, tokens, before = 0, 0, 0.0
    for path in reversed(states(folder)):
        restored = load_state(path, model, optimizers)
        done, tokens = restored["step"], restored["extra"]["tokens"]
        before = restored["extra"]["seconds"]
        break
    metrics = Metrics(folder / "metrics.jsonl", done)
    wrapped = accelerator.prepare(model)
    prepared = [accelerator.prepare(optimizer) for optimizer in optimizers]
    started, last = time.perf_counter(), {}

    def seconds() -> float:
        return before + time.perf_counter() - started

    def save(step: int) -> None:
        extra = {"tokens": tokens, "seconds": seconds()}
        save_state(folder, step, accelerator.unwrap_model(wrapped), optimizers, extra)
        if on_save:
            on_save(accelerator.unwrap_model(wrapped), step)

    for step in range(done + 1, config.steps + 1):
        set_rate(optimizers, config, step)
        record: dict[str, object] = {"step": step}
        for micro in range(config.accumulate):
            batch = batches((step - 1) * config.accumulate + micro)
            loss = objective(wrapped, batch, readout)
            accelerator.backward(loss.total / config.accumulate)
            tokens += batch.num_tokens
        norm = accelerator.clip_grad_norm_(wrapped.parameters(), config.clip)
        for optimizer in prepared:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        accuracy = (loss.prefix_hits / loss.prefix_count.clamp(min=1)).tolist()
        record |= {
            "tokens": tokens,
            "loss": float(loss.total.detach()),
            "prefix_accuracy": [round(value, 5) for value in accuracy],
            "gradient_norm": float(norm),
            "learning_rate": optimizers[0].param_groups[0]["lr"],
            "seconds": round(seconds(), 2),
        }
        if step % config.evaluate_every == 0 or step == config.steps:
            last = measure(accelerator.unwrap_model(wrapped), objective, readout, held_out)
            if evaluate:
                last |= evaluate(accelerator.unwrap_model(wrapped))
            record |= last
        metrics.append(record)
        if on_step:
            on_step(record)
        if step % config.save_every == 0 or step == config.steps:
            save(step)
    return Training(max(done, config.steps), tokens, seconds(), last)


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


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the layer's matrices and AdamW for head and norms."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_inner = parameter.dim() == 2 and not name.startswith("lm_head")
        (matrices if config.optimizer == "muon" and is_inner else others).append(parameter)
    settings = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, betas=(0.9, 0.95), **settings)
    ]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **settings))
    return optimizers


def set_rate(optimizers: Sequence[torch.optim.Optimizer], config: TrainConfig, step: int) -> None:
    """Linear warm-up, then cosine down to `final_rate` of the highest."""
    warmup = max(1, round(config.warmup * config.steps))
    if step <= warmup:
        factor = step / warmup
    else:
        progress = (step - warmup) / max(1, config.steps - warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        factor = config.final_rate + (1 - config.final_rate) * cosine
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * factor


class Metrics:
    """`metrics.jsonl`: one record a step; records after the resumed step are dropped."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        kept = [line for step, line in self._read() if step <= resumed_step]
        temporary = path.with_suffix(".partial")
        temporary.write_text("".join(kept))
        temporary.replace(path)

    def append(self, record: dict[str, object]) -> None:
        """Write one line, flushed."""
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _read(self) -> Iterator[tuple[int, str]]:
        if not self.path.is_file():
            return
        for line in self.path.read_text().splitlines(keepends=True):
            try:
                yield json.loads(line)["step"], line
            except (json.JSONDecodeError, KeyError):
                continue  # a line cut short by a kill
