"""CUDA graphs of the fused pass: captured once per shape, then replayed as a whole.

A decoding step's passes have few shapes: rows, a width (rounded up to one of `WIDTHS`), the slots
that attention reads (rounded up to `SPAN`), the taps. Each that comes up is captured over buffers
of its own; from then on a step copies its inputs there and replays. Prompts, rows that do not lie
side by side and rows that are nearly full run uncaptured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from slipstream.cache import SlotCache
from slipstream.target.attention import fold_mask
from slipstream.target.fused import FusedDecoder
from slipstream.trees.mask import Layout
from slipstream.types import DraftTree, TargetOutput

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # nodes of a row; wider passes gain little
SPAN = 256  # slots
MOST = 48  # captures of a cache that are kept; the longest unused goes

Outputs = tuple[Tensor | None, Tensor, Tensor]  # features, last hidden state, logits
Capture = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]


def why_not_graphed(device: torch.device) -> str | None:
    """Why passes cannot be captured on a device; None where they can."""
    return None if device.type == "cuda" else f"CUDA graphs need a CUDA device, not {device.type}"


@dataclass(slots=True)
class _Captured:
    """A pass over fixed buffers.

    Args:
        inputs: by name.
        outputs: what a replay writes.
        replay: runs the pass.
    """

    inputs: Mapping[str, Tensor]
    outputs: Outputs
    replay: Callable[[], None]


class GraphedPasses:
    """Passes of a fused decoder over trees, replayed from captures.

    Args:
        decoder: runs the passes.
        read_out: [B, N, D] last hidden states to logits [B, N, V].
        windows: by kind of layer, positions a node looks back, or None for all.
        groups: query heads a key head serves.
        dtype: of the masks.
        device: where it runs.
        capture: makes a pass replayable; it has run with its present inputs by then.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        read_out: Callable[[Tensor], Tensor],
        *,
        windows: Mapping[str, int | None],
        groups: int,
        dtype: torch.dtype,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self._decoder, self._read_out = decoder, read_out
        self._windows, self._groups = windows, groups
        self._dtype, self._device = dtype, device
        self._capture = capture or Capturing()
        # A capture writes to one cache's memory, and goes with it.
        self._captured: WeakKeyDictionary[SlotCache, OrderedDict[tuple[object, ...], _Captured]]
        self._captured = WeakKeyDictionary()

    def __len__(self) -> int:
        """Captures that are kept."""
        return sum(map(len, self._captured.values()))

    def score(
        self,
        trees: Sequence[DraftTree],
        cache: SlotCache,
        slots: Sequence[int],
        taps: tuple[int, ...],
    ) -> TargetOutput | None:
        """One pass over trees, see `Target.forward`; None where it has to run uncaptured."""
        rows, n = len(trees), max(len(tree) for tree in trees)
        width = next((width for width in WIDTHS if width >= n), None)
        if width is None or [*slots] != [*range(slots[0], slots[0] + rows)]:
            return None
        lengths = [cache.lengths[slot] for slot in slots]
        end = max(lengths) + width
        if end > cache.max_length:
            return None
        cache.begin(slots, [width] * rows)  # padded nodes are written too, past the tree
        used = min(-(-end // SPAN) * SPAN, cache.max_length)
        inputs = self._inputs(Layout.of(trees, lengths).widened(width), used)
        known = self._captured.setdefault(cache, OrderedDict())
        key = (slots[0], rows, width, used, taps)
        captured = known.get(key)
        if captured is None:
            captured = known[key] = self._new(cache, slots[0], used, inputs, taps)
            if len(known) > MOST:
                known.popitem(last=False)
        else:
            known.move_to_end(key)
            for name, value in inputs.items():
                captured.inputs[name].copy_(value, non_blocking=True)
        captured.replay()
        features, last_hidden, logits = (
            None if each is None else each[:, :n].clone() for each in captured.outputs
        )
        assert last_hidden is not None and logits is not None
        return TargetOutput(logits, features, last_hidden)

    def _inputs(self, layout: Layout, used: int) -> dict[str, Tensor]:
        """What a pass reads besides weights and cache, on the CPU."""
        width = layout.tokens.shape[1]
        starts = torch.tensor(layout.lengths)[:, None]
        inputs = {
            "tokens": layout.tokens.cpu(),
            "positions": layout.positions.cpu(),
            "slots": starts + torch.arange(width),
        }
        for kind, window in self._windows.items():
            mask = layout.mask(used, self._dtype, window)
            inputs[kind] = fold_mask(mask, self._groups)
        return inputs

    def _new(
        self,
        cache: SlotCache,
        first: int,
        used: int,
        inputs: Mapping[str, Tensor],
        taps: tuple[int, ...],
    ) -> _Captured:
        """Capture a pass of this shape; its buffers hold these inputs."""
        held = {
            name: value.to(self._device, copy=True).contiguous() for name, value in inputs.items()
        }
        cos, sin = self._decoder.angles(cache.max_length)
        rows = slice(first, first + len(held["tokens"]))
        store = _Slots(cache.keys[:, rows], cache.values[:, rows], held["slots"], used)

        def run() -> Outputs:
            at = held["positions"]
            angles = cos[at][:, :, None], sin[at][:, :, None]
            features, last_hidden = self._decoder.through(held["tokens"], angles, held, store, taps)
            return features, last_hidden, self._read_out(last_hidden)

        replay, outputs = self._capture(run)
        return _Captured(held, outputs, replay)


class _Slots:
    """Cache rows whose slots are written where a tensor says, and read up to a fixed one."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, used: int) -> None:
        self._keys, self._values, self._used = keys, values, used  # [L, B, H, S, C]
        self._slots = slots[:, None, :, None]  # [B, 1, N, 1]

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write [B, H, N, C] and return what attention reads, [B, H, used, C]."""
        read = []
        for store, new in ((self._keys[layer], keys), (self._values[layer], values)):
            store.scatter_(2, self._slots.expand_as(new), new)
            read.append(store[:, :, : self._used])
        return read[0], read[1]


class Capturing:
    """Captures passes into CUDA graphs that share one memory pool.

    What a replay returns lies in that pool: it is good until the next replay of any of them.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Two runs beside the current stream (libraries set themselves up), then the capture."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = run()
        return graph.replay, outputs
