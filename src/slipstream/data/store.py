"""Features on disk: safetensors shards with a JSON index.

A folder holds `index.json`, `readout.safetensors` (the target's frozen embedding and head),
`counts.safetensors` (how often each id is supervised) and `shard-00000.safetensors`, ...; a shard
holds the concatenated rows of some texts and where each begins. The index is rewritten,
atomically, after each shard, so a killed extraction leaves a valid shorter store.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.data.eightbit import group_size, quantise, restore
from slipstream.errors import DataError, OutputError
from slipstream.models.readout import Readout

VERSION = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One text with what the target made of it.

    Args:
        tokens: [T] int64.
        loss_mask: [T] bool, True where the token itself is to be predicted.
        best: [T] int64, the target's most likely token *after* each position.
        features: [T, K*D] hidden states at the taps.
        last_hidden: [T, D] input of the target's head.
    """

    tokens: Tensor
    loss_mask: Tensor
    best: Tensor
    features: Tensor
    last_hidden: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]


@dataclass(slots=True)
class StoreIndex:
    """What a store holds; `index.json`.

    Args:
        target: the target's name.
        taps: indices into its hidden states.
        hidden_size: D.
        vocab_size: V.
        source_rows: rows of the data file consumed, skipped ones included (resume point).
        planned_rows: rows that it will have consumed when it is whole; None in older stores.
        source_hash: identifies the data file.
        shards: {file, offsets} per shard, offsets [rows + 1].
        counts: of what was skipped or cut, by reason.
        settings: how texts were made of rows; empty in older stores.
        bits: of a stored hidden value, 16 or 8.
        version: of this layout.
    """

    target: str
    taps: list[int]
    hidden_size: int
    vocab_size: int
    source_rows: int = 0
    source_hash: str = ""
    shards: list[dict] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    bits: int = 16
    planned_rows: int | None = None
    version: int = VERSION

    @property
    def num_rows(self) -> int:
        """Texts stored."""
        return sum(len(shard["offsets"]) - 1 for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens stored, prompts included."""
        return sum(shard["offsets"][-1] for shard in self.shards)


def bytes_per_token(num_taps: int, hidden_size: int, bits: int = 16) -> int:
    """Bytes a token takes in a store: features and last hidden, two ids and a mask.

    Example:
        >>> bytes_per_token(3, 576), bytes_per_token(3, 576, bits=8)
        (4617, 2385)
    """
    scales = 2 * hidden_size // group_size(hidden_size) if bits == 8 else 0
    return (num_taps + 1) * (hidden_size * bits // 8 + scales) + 4 + 4 + 1


def check_room(folder: Path, needed: int) -> None:
    """Refuse before the work when the disk is too small.

    Raises:
        OutputError: fewer than `needed` bytes are free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"features need {needed / 1e9:.1f} GB in {folder}, {free / 1e9:.1f} GB are free",
            hint="use --bits 8, --limit for fewer rows, train --online, or another --output",
        )


class StoreWriter:
    """Appends shards to a folder."""

    def __init__(self, folder: Path, index: StoreIndex) -> None:
        self.folder = folder
        self.index = index
        folder.mkdir(parents=True, exist_ok=True)

    def write_readout(self, readout: Readout) -> None:
        """Store the frozen embedding and head once."""
        tensors = {"embedding": readout.embedding.detach().to(torch.bfloat16).contiguous()}
        if readout.head.data_ptr() != readout.embedding.data_ptr():
            tensors["head"] = readout.head.detach().to(torch.bfloat16).contiguous()
        save_tensors(tensors, self.folder / "readout.safetensors")

    def write_counts(self, texts: Iterable[tuple[list[int], list[bool]]]) -> None:
        """Store how often each id is supervised in the whole data file, features or not."""
        counts = torch.zeros(self.index.vocab_size, dtype=torch.int64)
        for tokens, mask in texts:
            ids = torch.tensor(tokens)[torch.tensor(mask)]
            counts += torch.bincount(ids, minlength=counts.numel())
        save_tensors({"counts": counts}, self.folder / "counts.safetensors")

    def append(self, samples: list[Sample], *, source_rows: int) -> None:
        """Write one shard and the index that includes it."""
        if samples:
            name = f"shard-{len(self.index.shards):05d}.safetensors"
            offsets = [0]
            for sample in samples:
                offsets.append(offsets[-1] + len(sample))
            save_tensors(
                {
                    "tokens": torch.cat([s.tokens for s in samples]).to(torch.int32),
                    "best": torch.cat([s.best for s in samples]).to(torch.int32),
                    "loss_mask": torch.cat([s.loss_mask for s in samples]),
                    **self._packed("features", torch.cat([s.features for s in samples])),
                    **self._packed("last_hidden", torch.cat([s.last_hidden for s in samples])),
                },
                self.folder / name,
            )
            self.index.shards.append({"file": name, "offsets": offsets})
        self.index.source_rows = source_rows
        temporary = self.folder / "index.json.partial"
        temporary.write_text(json.dumps(asdict(self.index)))
        temporary.replace(self.folder / "index.json")

    def _packed(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """Hidden values as they are stored."""
        if self.index.bits == 16:
            return {name: values.to(torch.bfloat16)}
        packed, scales = quantise(values, self.index.hidden_size)
        return {name: packed, f"{name}_scales": scales}


class Store:
    """Random access to the samples of a store.

    Args:
        folder: of the store.
        taps: hidden states the samples' features should hold, in this order; None takes all that
            are stored.

    Raises:
        DataError: the folder is no store, is damaged, or lacks some of the taps.
    """

    def __init__(self, folder: Path, *, taps: Sequence[int] | None = None) -> None:
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        self.taps = tuple(self.index.taps if taps is None else taps)
        self._columns = self._places(self.taps)
        self._keys = ["tokens", "loss_mask", "best", "features", "last_hidden"]
        self._keys += ["features_scales", "last_hidden_scales"] * (self.index.bits == 8)
        self._where = [
            (shard["file"], start, end)
            for shard in self.index.shards
            for start, end in zip(shard["offsets"], shard["offsets"][1:], strict=False)
        ]
        self._open: dict[str, safe_open] = {}

    def __len__(self) -> int:
        return len(self._where)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [end - start for _, start, end in self._where]

    def __getitem__(self, item: int) -> Sample:
        name, start, end = self._where[item]
        shard = self._shard(name)
        read = {key: shard.get_slice(key)[start:end] for key in self._keys}
        if self.index.bits == 8:
            for key in ("features", "last_hidden"):
                read[key] = restore(read[key], read[f"{key}_scales"])
        return Sample(
            tokens=read["tokens"].to(torch.int64),
            loss_mask=read["loss_mask"],
            best=read["best"].to(torch.int64),
            features=self._select(read["features"]),
            last_hidden=read["last_hidden"],
        )

    def take(self, items: Sequence[int]) -> list[Sample]:
        """Several samples."""
        return [self[item] for item in items]

    def readout(self, dtype: torch.dtype = torch.float32) -> Readout:
        """The target's frozen embedding and head."""
        tensors = _load(self.folder / "readout.safetensors")
        embedding = tensors["embedding"].to(dtype)
        head = tensors["head"].to(dtype) if "head" in tensors else embedding
        return Readout(embedding, head)

    def vocabulary_counts(self, held_out: Sequence[int]) -> Tensor:
        """[V] int64, how often each id is supervised in the data file, held-out texts left out.

        A draft vocabulary chosen by these counts also holds ids that only occur in rows whose
        features were never taken.
        """
        path = self.folder / "counts.safetensors"
        kept = [item for item in range(len(self)) if item not in set(held_out)]
        if not path.is_file():
            return self.supervised_counts(kept)
        return _load(path)["counts"] - self.supervised_counts(held_out)

    def supervised_counts(self, items: Iterable[int] | None = None) -> Tensor:
        """[V] int64, how often each id is supervised."""
        counts = torch.zeros(self.index.vocab_size, dtype=torch.int64)
        for item in range(len(self)) if items is None else items:
            name, start, end = self._where[item]
            shard = self._shard(name)
            tokens = shard.get_slice("tokens")[start:end].to(torch.int64)
            mask = shard.get_slice("loss_mask")[start:end]
            counts += torch.bincount(tokens[mask], minlength=counts.numel())
        return counts

    def _places(self, taps: tuple[int, ...]) -> list[int]:
        """Where each tap lies within the stored features, counted in hidden sizes."""
        stored = self.index.taps
        missing = [tap for tap in taps if tap not in stored]
        if missing:
            raise DataError(
                f"{self.folder} holds features of taps {_listed(stored)}, not of "
                f"{_listed(missing)}",
                hint=f"extract again with --taps {_listed(sorted({*stored, *taps}))}",
            )
        return list(range(len(stored))) if list(taps) == stored else [stored.index(t) for t in taps]

    def _select(self, features: Tensor) -> Tensor:
        """[T, K*D] of the wanted taps, of [T, stored*D]."""
        if self._columns == list(range(len(self.index.taps))):
            return features
        by_tap = features.unflatten(-1, (-1, self.index.hidden_size))
        return by_tap[:, self._columns].flatten(1)

    def _shard(self, name: str) -> safe_open:
        if name not in self._open:
            path = self.folder / name
            try:
                self._open[name] = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise _broken(path, error) from error
        return self._open[name]


def read_index(folder: Path) -> StoreIndex:
    """Read and check `index.json`.

    Raises:
        DataError: the folder is no store, of another version, or misses a shard.
    """
    path = folder / "index.json"
    if not path.is_file():
        raise DataError(
            f"{folder} holds no index.json, so it is not a feature store",
            hint="make one with `slipstream data extract --data FILE --output FOLDER`",
        )
    try:
        index = StoreIndex(**json.loads(path.read_text()))
    except (TypeError, json.JSONDecodeError) as error:
        raise DataError(
            f"{path} is not a feature store's index: {error}", hint="extract again"
        ) from error
    if index.version != VERSION:
        raise DataError(
            f"{path} has version {index.version}, expected {VERSION}", hint="extract again"
        )
    missing = [s["file"] for s in index.shards if not (folder / s["file"]).is_file()]
    if missing:
        raise DataError(f"{folder} misses {', '.join(missing[:3])}", hint="extract again")
    return index


def is_before_index(file: str) -> bool:
    """Whether a file of this name may lie in a store that a kill left without an index."""
    return file.endswith(".partial") or file in (
        "readout.safetensors",
        "counts.safetensors",
        "shard-00000.safetensors",
    )


def _listed(taps: Iterable[int]) -> str:
    return ",".join(map(str, taps))


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is missing or damaged: {error}", hint="extract again")


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file that appears whole or not at all."""
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary)
    temporary.replace(path)
