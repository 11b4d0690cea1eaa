"""Which batch is which: a run's batches as a function of their number."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.data.batches import Batch, collate, plan
from slipstream.data.store import Store
from slipstream.train.config import TrainConfig


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
        found = iter(self.store.take([self.items[i] for row in rows for i in row]))
        samples = [[next(found) for _ in row] for row in rows]
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
