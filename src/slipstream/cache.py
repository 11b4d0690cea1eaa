"""Keys and values of every layer in slots that are written, committed and rolled back in place.

A row has a committed length. A pass writes the nodes of a tree past it; `commit` moves the
accepted path down next to the committed slots and forgets the rest. Nothing is ever reallocated,
so a view handed out for attention is a slice of the one tensor all layers share.

The object also answers to what transformers asks of a cache (`update`), but knows nothing of it.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.errors import CacheFullError, SettingError, ShapeError


class SlotCache:
    """Preallocated keys and values for a fixed number of rows of any length.

    Args:
        num_layers: L.
        num_rows: rows that can be held at once.
        num_heads: key/value heads.
        head_size: C.
        max_length: slots of a row, nodes of a tree included.
        dtype: of keys and values.
        device: where they live.

    Attributes:
        keys: [L, rows, H, slots, C].
        values: [L, rows, H, slots, C].
        lengths: committed slots of each row.

    Raises:
        SettingError: num_rows or max_length is below 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        num_heads: int,
        head_size: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_rows < 1:
            raise SettingError("num_rows", num_rows, "1 or more")
        if max_length < 1:
            raise SettingError("max_length", max_length, "1 or more")
        shape = (num_layers, num_rows, num_heads, max_length, head_size)
        with torch.inference_mode(False):  # so that later in-place writes are legal anywhere
            # Zeros, not empty: a masked slot has weight 0, and 0 times garbage may be NaN.
            self.keys = _zeros(shape, dtype, torch.device(device))
            self.values = _zeros(shape, dtype, torch.device(device))
        self.num_rows = num_rows
        self.max_length = max_length
        self.lengths = [0] * num_rows
        self._pending = [0] * num_rows  # nodes written past the committed length
        self._touched = [0] * num_rows  # slots that may hold something other than zero
        self._plan = _Plan((), (), (), 0)

    def room(self, slot: int) -> int:
        """Free slots of a row."""
        return self.max_length - self.lengths[slot]

    def begin(self, slots: Sequence[int], widths: Sequence[int]) -> int:
        """Plan a pass that writes `widths[i]` nodes to row `slots[i]`, replacing uncommitted ones.

        Returns:
            How many slots, counted from the first, attention has to read.

        Raises:
            CacheFullError: a row has fewer free slots than nodes.
            ShapeError: slots repeat or are out of range.
        """
        if len(slots) != len(widths) or len(set(slots)) != len(slots) or not slots:
            raise ShapeError(f"cache: slots {list(slots)} for widths {list(widths)}")
        for slot, width in zip(slots, widths, strict=True):
            if not 0 <= slot < self.num_rows:
                raise ShapeError(f"cache: slot {slot}, expected 0..{self.num_rows - 1}")
            if width > self.room(slot):
                raise CacheFullError(
                    f"row {slot} needs {self.lengths[slot] + width} slots, {self.max_length} "
                    f"exist ({self.lengths[slot]} committed, {width} nodes to write)",
                    hint="raise --max-length, or lower --budget",
                )
        starts = tuple(self.lengths[slot] for slot in slots)
        ends = [start + width for start, width in zip(starts, widths, strict=True)]
        for slot, width, end in zip(slots, widths, ends, strict=True):
            self._pending[slot] = width
            self._touched[slot] = max(self._touched[slot], end)
        self._plan = _Plan(tuple(slots), starts, tuple(widths), max(ends))
        self._plan.prepare(self.keys.device)
        return self._plan.used

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new nodes of one layer and return what attention reads.

        Args:
            keys: [B, H, N, C], N the widest tree; a narrower row's surplus is not written.
            values: [B, H, N, C].
            layer: index of the layer.

        Returns:
            Keys and values [B, H, used, C], views where the rows lie side by side.

        Raises:
            ShapeError: the layer's heads are not the cache's.
        """
        plan = self._plan
        store_k, store_v = self.keys[layer], self.values[layer]
        expected = (len(plan.slots), store_k.shape[1], store_k.shape[3])
        if (keys.shape[0], keys.shape[1], keys.shape[3]) != expected:
            raise ShapeError(
                f"cache: layer {layer} writes keys {list(keys.shape)}, expected "
                f"[{expected[0]}, {expected[1]}, N, {expected[2]}]"
            )
        if len(plan.slots) == 1:
            slot, start, width = plan.slots[0], plan.starts[0], plan.widths[0]
            store_k[slot, :, start : start + width] = keys[0, :, :width]
            store_v[slot, :, start : start + width] = values[0, :, :width]
        else:
            store_k[plan.to_rows, :, plan.to_slots] = keys[plan.from_rows, :, plan.from_nodes]
            store_v[plan.to_rows, :, plan.to_slots] = values[plan.from_rows, :, plan.from_nodes]
        return self._read(store_k), self._read(store_v)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep these nodes of the row's last pass, in this order, and forget the others.

        Args:
            slot: the row.
            path: ascending node indices, as in `Verdict.path`.

        Raises:
            ShapeError: a node was not written, or the order is not ascending.
        """
        nodes = list(path)
        if any(b <= a for a, b in zip([-1, *nodes], nodes, strict=False)) or (
            nodes and nodes[-1] >= self._pending[slot]
        ):
            raise ShapeError(
                f"cache: path {nodes} of row {slot}, expected ascending nodes below "
                f"{self._pending[slot]}"
            )
        start = self.lengths[slot]
        still = 0  # leading nodes that are already where they belong
        while still < len(nodes) and nodes[still] == still:
            still += 1
        if still < len(nodes):
            source = torch.tensor(nodes[still:], device=self.keys.device) + start
            here = slice(start + still, start + len(nodes))
            for store in (self.keys, self.values):
                row = store[:, slot]
                row[:, :, here] = row.index_select(2, source)  # all layers at once
        self.lengths[slot] = start + len(nodes)
        self._pending[slot] = 0

    def rollback(self, slot: int) -> None:
        """Forget what was written past the row's committed length."""
        self._pending[slot] = 0

    def truncate(self, slot: int, length: int) -> None:
        """Keep only the first `length` committed slots of a row.

        Raises:
            ShapeError: the row is shorter.
        """
        if not 0 <= length <= self.lengths[slot]:
            raise ShapeError(
                f"cache: row {slot} cut to {length}, it has {self.lengths[slot]} slots"
            )
        self.lengths[slot] = length
        self._pending[slot] = 0

    def reset(self, slot: int) -> None:
        """Empty a row for another request."""
        self.keys[:, slot, :, : self._touched[slot]] = 0
        self.values[:, slot, :, : self._touched[slot]] = 0
        self.lengths[slot] = self._pending[slot] = self._touched[slot] = 0

    def enlarged(self, num_rows: int, max_length: int) -> SlotCache:
        """A cache with at least this room and the same committed slots."""
        layers, _, heads, _, head_size = self.keys.shape
        new = SlotCache(
            layers, max(num_rows, self.num_rows), heads, head_size,
            max(max_length, self.max_length), self.keys.dtype, self.keys.device,
        )  # fmt: skip
        new.keys[:, : self.num_rows, :, : self.max_length] = self.keys
        new.values[:, : self.num_rows, :, : self.max_length] = self.values
        new.lengths[: self.num_rows] = self.lengths
        new._touched[: self.num_rows] = self._touched
        return new

    def get_seq_length(self, _layer: int = 0) -> int:
        """Longest committed row; asked by models that make up positions, which we always give."""
        return max(self.lengths)

    def _read(self, store: Tensor) -> Tensor:
        """[B, H, used, C] of the planned rows."""
        plan = self._plan
        if plan.is_run:
            first = plan.slots[0]
            return store[first : first + len(plan.slots), :, : plan.used]
        return store[:, :, : plan.used].index_select(0, plan.rows)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that, where the system can, take no memory before they are written to."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or sys.platform != "linux" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class _Plan:
    """Where the nodes of one pass go."""

    def __init__(
        self, slots: tuple[int, ...], starts: tuple[int, ...], widths: tuple[int, ...], used: int
    ) -> None:
        self.slots, self.starts, self.widths, self.used = slots, starts, widths, used
        self.is_run = slots == tuple(range(slots[0], slots[0] + len(slots))) if slots else False

    def prepare(self, device: torch.device) -> None:
        """Index tensors for several rows: node `from_nodes` of `from_rows` goes to `to_slots`."""
        if len(self.slots) == 1:
            return
        rows, nodes, slots, places = [], [], [], []
        for row, (slot, start, width) in enumerate(
            zip(self.slots, self.starts, self.widths, strict=True)
        ):
            rows += [row] * width
            nodes += range(width)
            slots += [slot] * width
            places += range(start, start + width)
        packed = torch.tensor([rows, nodes, slots, places], device=device)
        self.from_rows, self.from_nodes, self.to_rows, self.to_slots = packed
        self.rows = torch.tensor(self.slots, device=device)
