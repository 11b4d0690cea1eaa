"""What the loop may ask of a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.cache import SlotCache
from slipstream.types import DraftTree, TargetOutput


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Facts about a target that drafters, training and errors need.

    Args:
        name: how the user named it.
        vocab_size: V: ids that can be emitted (rows of the head that only pad it are left out).
        hidden_size: D.
        num_layers: L; valid taps are 0..L.
        max_length: context, tokens.
        eos_ids: ids that end an answer, possibly empty.
        dtype: of the weights that run.
        device: where they run.
        architecture: the Hugging Face class name.
        decoder: what runs it: `stock`, `fused` or `compiled`.
        weights: how the weights are stored; `dtype` names what they are multiplied as.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_length: int
    eos_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    architecture: str
    decoder: str = "stock"
    weights: str = ""


class Target(Protocol):
    """A causal language model that can score a batch of trees over a slot cache."""

    spec: TargetSpec

    def new_cache(self, num_rows: int, max_length: int) -> SlotCache:
        """An empty cache for rows of up to `max_length` slots (tree nodes included)."""

    def forward(
        self,
        trees: Sequence[DraftTree],
        cache: SlotCache,
        slots: Sequence[int],
        *,
        taps: tuple[int, ...] = (),
        last_only: bool = False,
    ) -> TargetOutput:
        """Score every node of one tree per cache row in one pass.

        The keys of the nodes are written past each row's committed length; commit or roll back
        before the next pass over the same rows.

        Args:
            trees: one per row; a prompt chunk is a chain tree (all of its tokens are nodes).
            cache: where the rows' committed keys are.
            slots: cache row of each tree.
            taps: indices into the hidden states whose features to return, concatenated.
            last_only: logits of each tree's last node only (prefill).

        Returns:
            Logits [B, N, V] float32 (or [B, 1, V]), features [B, N, K*D]; N is the widest tree.

        Raises:
            CacheFullError: a row has no room for its tree.
            NumericError: a logit is NaN.
        """

    def embedding(self) -> Tensor:
        """[V', D] the input embedding's weight, V' >= V."""

    def head(self) -> Tensor:
        """[V', D] the head's weight (the embedding's when tied)."""
