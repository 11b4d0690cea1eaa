"""Features computed as training goes: a store without shards.

Gives the samples that `extract_shards` would have written, each made when it is asked for: one
pass of the target a batch in place of disk. It costs a prefill of every text in every epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.data.extract import FeatureSource, Planned, features_of
from slipstream.data.store import Sample, StoreIndex
from slipstream.data.supervise import check_ids
from slipstream.models.readout import Readout


class OnlineStore:
    """The samples of a data file, made on demand; has the interface of `Store`.

    Args:
        target: gives features.
        readout: its embedding and head.
        planned: the texts of the data file.
        name: the target's name.
        taps: indices into its hidden states.

    Raises:
        DataError: a text holds ids that the target has not.
    """

    def __init__(
        self,
        target: FeatureSource,
        readout: Readout,
        planned: Planned,
        *,
        name: str,
        taps: tuple[int, ...],
    ) -> None:
        self._target, self._readout = target, readout
        self._texts = [text for text in planned.texts if text]
        for text in self._texts:
            check_ids(text.tokens, readout.embedding.shape[0])
        self.taps = taps
        vocab_size, hidden_size = readout.embedding.shape
        self.index = StoreIndex(
            name,
            list(taps),
            hidden_size,
            vocab_size,
            source_rows=len(planned.texts),
            source_hash=planned.digest,
            counts=dict(planned.counts),
            settings=planned.settings,
        )
        self.folder = Path(planned.path)

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [len(text.tokens) for text in self._texts]

    def __getitem__(self, item: int) -> Sample:
        return self.take([item])[0]

    def take(self, items: Sequence[int]) -> list[Sample]:
        """Several samples, in as few passes of the target as fit."""
        texts = [self._texts[item] for item in items]
        made = features_of(self._target, self._readout, texts, self.taps)
        return [
            Sample(
                sample.tokens,
                sample.loss_mask,
                sample.best,
                sample.features.to(torch.bfloat16),
                sample.last_hidden.to(torch.bfloat16),
            )
            for sample in made
        ]

    def readout(self, dtype: torch.dtype = torch.float32) -> Readout:
        """The target's frozen embedding and head, rounded as a store would."""
        embedding = self._readout.embedding.detach().to("cpu", torch.bfloat16).to(dtype)
        if self._readout.head.data_ptr() == self._readout.embedding.data_ptr():
            return Readout(embedding, embedding)
        return Readout(embedding, self._readout.head.detach().to("cpu", torch.bfloat16).to(dtype))

    def vocabulary_counts(self, held_out: Sequence[int]) -> Tensor:
        """[V] int64, how often each id is supervised, held-out texts left out."""
        return self.supervised_counts() - self.supervised_counts(held_out)

    def supervised_counts(self, items: Iterable[int] | None = None) -> Tensor:
        """[V] int64, how often each id is supervised."""
        counts = torch.zeros(self.index.vocab_size, dtype=torch.int64)
        for item in range(len(self)) if items is None else items:
            text = self._texts[item]
            ids = torch.tensor(text.tokens)[torch.tensor(text.mask)]
            counts += torch.bincount(ids, minlength=counts.numel())
        return counts
