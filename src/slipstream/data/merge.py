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
        DataError: a part is no store, is given twice, or does not fit the first.
    """
    if output.exists() and any(output.iterdir()):
        raise OutputError(f"{output} exists and is not empty", "choose another --output")
    indices = [read_index(part) for part in parts]
    first = indices[0]
    seen: set[object] = set()
    for part, index in zip(parts, indices, strict=True):
        shard = index.settings.get("shard")
        if shard in seen:
            raise DataError(f"{part} holds shard {shard}, which is given twice", "leave one out")
        seen.add(shard)
        ours, theirs = _comparable(index), _comparable(first)
        for name in ours.keys() | theirs.keys():
            if ours.get(name) != theirs.get(name):
                raise DataError(
                    f"{part} was made with {name} {ours.get(name)}, {parts[0]} with "
                    f"{theirs.get(name)}",
                    "extract the shards of one file with the same settings",
                )
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
        counts.update(index.counts)
    whole.counts = dict(counts)
    stored = [load_file(part / "counts.safetensors")["counts"] for part in parts]
    save_tensors({"counts": sum(stored)}, output / "counts.safetensors")
    StoreWriter(output, whole).append([], source_rows=whole.source_rows)
    return whole


def _comparable(index: StoreIndex) -> dict[str, object]:
    """What must be the same in every part."""
    settings = {key: value for key, value in index.settings.items() if key != "shard"}
    return {name: value for name, value in asdict(index).items() if name in SAME} | settings


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copyfile(source, target)
