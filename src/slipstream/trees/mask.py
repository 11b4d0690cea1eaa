"""Who sees whom: ancestors, positions and the attention mask of a batch of trees.

A node sees its row's committed slots, its ancestors and itself. A sliding window is one more
term: a node sees what lies fewer than `window` positions before it, where a node's position is
the committed length plus its depth (its place in the cache is arbitrary).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.types import DraftTree


def ancestors(parents: Tensor) -> Tensor:
    """Ancestor-or-self relation of a tree.

    Args:
        parents: [N] int64, parents[0] == -1 and parents[i] < i.

    Returns:
        [N, N] bool on the CPU; entry (i, j) is True when j is i or lies on the path from the root
        to i.

    Example:
        >>> ancestors(torch.tensor([-1, 0, 0, 1]))[3].tolist()
        [True, True, False, True]
    """
    seen = np.eye(parents.shape[0], dtype=bool)
    jump = np.maximum(parents.cpu().numpy(), 0)
    while True:  # what is found doubles: after k rounds, ancestors up to 2**k levels up
        seen |= seen[jump]
        if not jump.any():  # everything has jumped to the root
            return torch.from_numpy(seen)
        jump = jump[jump]


@dataclass(frozen=True, slots=True)
class Layout:
    """A batch of trees, padded to the widest. A padded node repeats the row's root.

    Args:
        tokens: [B, N] int64.
        positions: [B, N] int64, committed length plus depth.
        visible: [B, N, N] bool, ancestor-or-self.
        lengths: committed slots of each row.
    """

    tokens: Tensor
    positions: Tensor
    visible: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, trees: Sequence[DraftTree], lengths: Sequence[int]) -> Layout:
        """Lay out one tree per row."""
        if len(trees) == 1:
            tree = trees[0]
            return cls(
                tree.tokens[None],
                (tree.depths + lengths[0])[None],
                ancestors(tree.parents)[None],
                tuple(lengths),
            )
        n = max(len(tree) for tree in trees)
        tokens = torch.empty(len(trees), n, dtype=torch.int64)
        positions = torch.empty(len(trees), n, dtype=torch.int64)
        visible = torch.zeros(len(trees), n, n, dtype=torch.bool)
        visible[:, :, 0] = True  # the root, which padding repeats
        for row, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
            width = len(tree)
            tokens[row], positions[row] = tree.tokens[0], length
            tokens[row, :width] = tree.tokens
            positions[row, :width] = tree.depths + length
            visible[row, :width, :width] = ancestors(tree.parents)
        return cls(tokens, positions, visible, tuple(lengths))

    def widened(self, width: int) -> Layout:
        """The same rows padded to `width` nodes, at least as many as there are."""
        batch, n = self.tokens.shape
        if n == width:
            return self
        tokens = self.tokens[:, :1].repeat(1, width)
        positions = torch.tensor(self.lengths)[:, None].repeat(1, width)
        visible = torch.zeros(batch, width, width, dtype=torch.bool)
        visible[:, :, 0] = True
        tokens[:, :n], positions[:, :n], visible[:, :n, :n] = (
            self.tokens, self.positions, self.visible,
        )  # fmt: skip
        return Layout(tokens, positions, visible, self.lengths)

    def is_plain(self, window: int | None = None) -> bool:
        """True when no mask is needed.

        That is one node over rows of equal length (all visible), or equally long chains from
        empty rows (causal), within the window.
        """
        n = self.tokens.shape[1]
        if window is not None and max(self.lengths) + n > window:
            return False
        if n == 1:
            return len(set(self.lengths)) == 1
        return not any(self.lengths) and bool((self.positions[:, -1] == n - 1).all())

    def mask(self, used: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The additive attention mask: 0 where a node sees a slot, the lowest number elsewhere.

        Args:
            used: slots that attention reads, at least every row's length plus its nodes.
            dtype: floating.
            window: positions a node looks back, itself included; None for all.

        Returns:
            [B, N, used] on the CPU. A finite lowest number, so that a row masked in a whole
            block of keys gives no NaN.
        """
        batch, n = self.tokens.shape
        lowest = torch.finfo(dtype).min
        mask = torch.full((batch, n, used), lowest, dtype=dtype)
        allowed = self.visible
        if window is not None:
            distance = self.positions[:, :, None] - self.positions[:, None, :]
            allowed = allowed & (distance < window)
        tree = torch.zeros(batch, n, n, dtype=dtype).masked_fill_(~allowed, lowest)
        for row, length in enumerate(self.lengths):
            end = min(length + n, used)
            mask[row, :, :length] = 0
            mask[row, :, length:end] = tree[row, :, : end - length]
            if window is not None and length:
                far = self.positions[row, :, None] - torch.arange(length) >= window
                mask[row, :, :length].masked_fill_(far, lowest)
        return mask
