"""Several feature stores as one: the shards that several machines made of one data file."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file

from slipstream.data.store import StoreIndex, StoreWriter, read_index, save_tensors
from slipstream.errors import DataError, OutputError

SAME = ("target", "taps", "hidden_size", "vocab_size", "source_hash", "bits")


def merge(parts: Sequence[Path], output: Path) -> StoreIndex:
    """Make one store of several; shards are hard links where the disk allows, else copies.

    Args:
        parts: stores of the same data file, target, taps and settings.
        output: the store to make.

    Raises:
        OutputError: the output exists and is not empty.
        DataError: a part is no store, is given twice, misses rows or does not fit the first, or a
            shard is missing.
    """
    if output.exists() and any(output.iterdir()):
        raise OutputError(f"{output} exists and is not empty", "choose another --output")
    indices = [read_index(part) for part in parts]
    first = indices[0]
    for part, index in zip(parts, indices, strict=True):
        ours, theirs = _comparable(index), _comparable(first)
        for name in ours.keys() | theirs.keys():
            if ours.get(name) != theirs.get(name):
                raise DataError(
                    f"{part} was made with {name} {ours.get(name)}, {parts[0]} with "
                    f"{theirs.get(name)}",
                    "extract the shards of one file with the same settings",
                )
    _check_whole(parts, indices)
    whole = StoreIndex(**{name: getattr(first, name) for name in SAME})
    whole.settings = first.settings | {"shard": None}
    counts: Counter[str] = Counter()
    output.mkdir(parents=True, exist_ok=True)
    _link(parts[0] / "readout.safetensors", output / "readout.safetensors")
    for part, index in zip(parts, indices, strict=True):
        for shard in index.shards:
            name = f"shard-{len(whole.shards):05d}.safetensors"
            _link(part / shard["file"], output / name)
            whole.shards.append({"file": name, "offsets": shard["offsets"]})
        whole.source_rows += index.source_rows
        whole.planned_rows = whole.source_rows
        counts.update(index.counts)
    whole.counts = dict(counts)
    stored = [load_file(part / "counts.safetensors")["counts"] for part in parts]
    save_tensors({"counts": sum(stored)}, output / "counts.safetensors")
    StoreWriter(output, whole).append([], source_rows=whole.source_rows)
    return whole


def _check_whole(parts: Sequence[Path], indices: Sequence[StoreIndex]) -> None:
    """Raises DataError unless the parts are all shards of a file, each of them whole."""
    names = [str(index.settings.get("shard") or "0/1") for index in indices]
    seen: set[str] = set()
    for part, index, name in zip(parts, indices, names, strict=True):
        if name in seen:
            raise DataError(f"{part} holds shard {name}, which is given twice", "leave one out")
        seen.add(name)
        planned = index.planned_rows
        if planned is not None and index.source_rows != planned:
            raise DataError(
                f"{part} is not whole: {index.source_rows} of {planned} rows are done",
                "finish it with its `slipstream data extract` command and --resume",
            )
    count = int(names[0].partition("/")[2])
    missing = [name for i in range(count) if (name := f"{i}/{count}") not in seen]
    if missing or len(seen) != count:
        raise DataError(
            f"found shards {', '.join(names)}, expected all of 0/{count} to {count - 1}/{count}",
            "extract the missing ones first, and give every shard",
        )


def _comparable(index: StoreIndex) -> dict[str, object]:
    """What must be the same in every part."""
    settings = {key: value for key, value in index.settings.items() if key != "shard"}
    return {name: value for name, value in asdict(index).items() if name in SAME} | settings


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copyfile(source, target)
