"""Who holds how much of the cache: a ledger of blocks, so that more rows fit than have full length.

A row of the cache has room for the longest request, most requests are short. Counted in blocks, a
row holds what its tokens need and grows as it goes; how many blocks there are decides how many rows
run, and who has to give way when they run out, see `scheduler`.

Paper: Kwon et al. 2023, PagedAttention, arXiv:2309.06180.
Differs: blocks are counted, not placed; a row's slots lie side by side in the cache, so that
attention reads views.
"""

from __future__ import annotations

BLOCK = 64  # slots


class Blocks:
    """The ledger.

    Args:
        total: blocks that all rows may hold together.
        size: slots of a block.

    Example:
        >>> blocks = Blocks(4)
        >>> blocks.hold(0, 150), blocks.hold(1, 100), blocks.hold(1, 60), blocks.num_free
        (True, False, True, 0)
    """

    def __init__(self, total: int, size: int = BLOCK) -> None:
        self.total, self.size = total, size
        self._held: dict[int, int] = {}  # by row of the cache

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self.total - sum(tuple(self._held.values()))  # other threads ask too

    @property
    def usage(self) -> float:
        """Share of the blocks that are held."""
        return 1 - self.num_free / self.total

    def count(self, num_slots: int) -> int:
        """Blocks that hold so many slots."""
        return -(-num_slots // self.size)

    def held(self, slot: int) -> int:
        """Blocks of a row."""
        return self._held.get(slot, 0)

    def room(self, slot: int) -> int:
        """Slots that a row's blocks hold."""
        return self.size * self.held(slot)

    def hold(self, slot: int, num_slots: int) -> bool:
        """Let a row hold exactly what so many slots need; False if too few blocks are free.

        Then the row keeps what it held.
        """
        wanted = self.count(num_slots)
        if wanted - self.held(slot) > self.num_free:
            return False
        self._held[slot] = wanted
        return True

    def release(self, slot: int) -> None:
        """Take a row's blocks back."""
        self._held.pop(slot, None)
