"""Features of verified positions that a drafter has not read yet.

A drafter reads them when it drafts. A row that drafts nothing for a while (under load, or by its
own request) so costs nothing beside plain decoding: its features are put aside, uncopied.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Pending:
    """Unread features by row, oldest first.

    Example:
        >>> pending = Pending()
        >>> pending.add(7, torch.zeros(2, 3))
        >>> pending.add(7, torch.ones(1, 3))
        >>> pending.count(7), pending.take(7).shape, pending.count(7)
        (3, torch.Size([3, 3]), 0)
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[Tensor]] = {}

    def __len__(self) -> int:
        """Rows that are known."""
        return len(self._parts)

    def add(self, key: int, features: Tensor) -> None:
        """Put [P, K*D] behind what is there."""
        parts = self._parts.setdefault(key, [])
        if parts and not len(parts[-1]):
            parts.clear()
        parts.append(features)

    def count(self, key: int) -> int:
        """Positions of a row that are unread."""
        return sum(map(len, self._parts.get(key, ())))

    def take(self, key: int) -> Tensor:
        """[P, K*D] all of a row's, possibly none; they count as read."""
        parts = self._parts[key]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._parts[key] = [found[:0]]
        return found

    def close(self, key: int) -> None:
        """Forget a row; also one that has nothing."""
        self._parts.pop(key, None)
