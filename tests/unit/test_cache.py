"""`SlotCache` by itself: what is written where, what moves, what is refused."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from slipstream.cache import SlotCache
from slipstream.errors import CacheFullError, SettingError, ShapeError


def filled(num_layers: int, num_rows: int, n: int, first: float) -> list[torch.Tensor]:
    """Per layer [B, 2, n, 3]: node i of row r at layer l holds first + 100 l + 10 r + i."""
    nodes = torch.arange(n)[None, None, :, None].float()
    rows = 10 * torch.arange(num_rows)[:, None, None, None].float()
    return [(first + 100 * i + rows + nodes).expand(-1, 2, -1, 3) for i in range(num_layers)]


def write(cache: SlotCache, slots: list[int], widths: list[int], first: float) -> list:
    cache.begin(slots, widths)
    news = filled(2, len(slots), max(widths), first)
    return [cache.update(new, -new, layer) for layer, new in enumerate(news)]


def test_commit_moves_the_path_down_in_every_layer() -> None:
    cache = SlotCache(2, 1, 2, 3, 16)
    write(cache, [0], [3], 1)
    cache.commit(0, [0, 1, 2])
    write(cache, [0], [6], 50)
    cache.commit(0, [0, 2, 5])
    assert cache.lengths == [6] and cache.room(0) == 10
    for layer in range(2):
        expected = torch.tensor([1.0, 2, 3, 50, 52, 55]) + 100 * layer
        assert torch.equal(cache.keys[layer, 0, 1, :6, 2], expected)
        assert torch.equal(cache.values[layer, 0, 1, :6, 2], -expected)


def test_reads_are_views_where_rows_lie_side_by_side() -> None:
    cache = SlotCache(2, 4, 2, 3, 16)
    keys, values = write(cache, [1, 2], [2, 5], 7)[1]
    assert keys.shape == (2, 2, 5, 3) == values.shape
    assert keys.data_ptr() == cache.keys[1, 1].data_ptr()
    scattered, _ = write(cache, [3, 0], [2, 5], 7)[1]
    assert torch.equal(scattered[1, :, :5], cache.keys[1, 0, :, :5])
    assert torch.equal(scattered[0, :, :2], cache.keys[1, 3, :, :2])


def test_a_narrow_row_does_not_write_its_padding() -> None:
    cache = SlotCache(2, 2, 2, 3, 6)
    write(cache, [0, 1], [4, 4], 1)
    cache.commit(0, [0, 1, 2, 3])
    cache.rollback(1)
    write(cache, [0, 1], [2, 6], 20)  # row 0 has room for two, the batch is six wide
    assert torch.equal(cache.keys[0, 0, 0, :, 0], torch.tensor([1.0, 2, 3, 4, 20, 21]))
    assert torch.equal(cache.keys[0, 1, 0, :, 0], torch.arange(30.0, 36.0))


def test_a_full_row_is_refused_by_number() -> None:
    cache = SlotCache(1, 2, 2, 3, 8)
    with pytest.raises(CacheFullError, match="row 1 needs 9 slots, 8 exist"):
        cache.begin([0, 1], [2, 9])
    cache.begin([1], [8])


@pytest.mark.parametrize("path", [[1, 0], [0, 0], [0, 3], [-1]])
def test_a_path_that_was_not_written_is_refused(path: list[int]) -> None:
    cache = SlotCache(1, 1, 2, 3, 8)
    cache.begin([0], [3])
    with pytest.raises(ShapeError, match="path"):
        cache.commit(0, path)


def test_commit_after_rollback_is_refused() -> None:
    cache = SlotCache(1, 1, 2, 3, 8)
    cache.begin([0], [3])
    cache.rollback(0)
    with pytest.raises(ShapeError):
        cache.commit(0, [0])


def test_bad_sizes() -> None:
    with pytest.raises(SettingError):
        SlotCache(1, 0, 2, 3, 8)
    with pytest.raises(SettingError):
        SlotCache(1, 1, 2, 3, 0)
    cache = SlotCache(1, 2, 2, 3, 8)
    for slots in ([0, 0], [2, 1], []):
        with pytest.raises(ShapeError):
            cache.begin(slots, [1] * len(slots))
    cache.begin([0], [1])
    with pytest.raises(ShapeError, match="layer 0 writes"):
        cache.update(torch.zeros(1, 3, 1, 3), torch.zeros(1, 3, 1, 3), 0)


def test_truncate() -> None:
    cache = SlotCache(1, 1, 2, 3, 8)
    cache.begin([0], [5])
    cache.commit(0, range(5))
    cache.truncate(0, 2)
    assert cache.lengths == [2]
    with pytest.raises(ShapeError):
        cache.truncate(0, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all of it is taken at once")
def test_memory_is_taken_by_what_is_written() -> None:
    def resident() -> int:
        """Bytes of this process in memory."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * mmap.PAGESIZE

    before = resident()
    cache = SlotCache(4, 64, 2, 64, 4096)  # a GiB
    assert cache.keys.nbytes + cache.values.nbytes == 2**30 and cache.keys.data_ptr() % 64 == 0
    cache.begin([5], [3])
    for layer in range(4):
        cache.update(torch.ones(1, 2, 3, 64), torch.ones(1, 2, 3, 64), layer)
    cache.commit(5, [0, 2])
    assert resident() - before < 2**27
    assert cache.keys[:, 5, :, :2].eq(1).all() and not cache.keys[:, 6].any()


def test_made_in_inference_mode_it_can_be_written_outside() -> None:
    with torch.inference_mode():
        cache = SlotCache(1, 1, 2, 3, 8)
    cache.begin([0], [3])
    cache.update(torch.ones(1, 2, 3, 3), torch.ones(1, 2, 3, 3), 0)
    cache.commit(0, [0, 2])
