"""Medusa heads on disk: our folder, and the authors' `medusa_lm_head.pt`.

Ours: config.json says `"model_type": "slipstream-medusa"`; model.safetensors holds
`heads.I.R.linear.*` (block R of head I), `heads.I.B.weight` where heads have their own projection
behind their B blocks, and the maps `d2t` and `t2d` of a reduced vocabulary.

Theirs: the same names without `heads.`, pickled (read as tensors only), or as
medusa_lm_head.safetensors with blocks alone ("version 2"), which borrow the target's head. How
many heads there are is counted, because published configs say 2 where the weights hold 5.

Layout: FasterDecoding/Medusa `medusa_model.py`.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.formats import folder as files
from slipstream.models.medusa import Medusa, MedusaConfig
from slipstream.models.vocabulary import DraftVocabulary

MODEL_TYPE = "slipstream-medusa"
OFFICIAL = "medusa_lm_head"
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")


@dataclass(frozen=True, slots=True)
class MedusaCheckpoint:
    """Heads as stored: the network and what its ids mean, None for the target's own."""

    model: Medusa
    vocabulary: DraftVocabulary | None


class _File(BaseModel):
    """config.json of our folders."""

    model_config = ConfigDict(extra="ignore")

    model_type: Literal["slipstream-medusa"]
    hidden_size: int
    num_heads: int
    num_blocks: int
    vocab_size: int
    draft_vocab_size: int
    borrows_head: bool


def read(folder: Path, *, target_layers: int | None = None) -> MedusaCheckpoint:
    """Read a folder of either layout.

    Args:
        folder: holds config.json and model.safetensors, or medusa_lm_head.pt (.safetensors).
        target_layers: not needed by this layout.

    Raises:
        CheckpointError: missing or truncated files, unknown or missing tensors, sizes that
            disagree.
    """
    folder = Path(folder)
    found = [path for path in sorted(folder.glob(f"{OFFICIAL}.*")) if path.suffix in _READERS]
    if found:
        return _read_official(found[0])
    stored, tensors = files.read_config(folder, _File), files.read_tensors(folder)
    config = MedusaConfig(**stored.model_dump(exclude={"model_type"}))
    vocabulary = files.take_vocabulary(
        tensors, folder, vocab_size=stored.vocab_size, draft_vocab_size=stored.draft_vocab_size
    )
    model = Medusa(config)
    files.fill(model, tensors, folder)
    return MedusaCheckpoint(model.eval(), vocabulary)


def write(
    checkpoint: MedusaCheckpoint,
    folder: Path,
    *,
    card: dict[str, Any] | None = None,
    overwrite: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json, model.safetensors and card.json; the folder appears whole or not.

    Raises:
        CheckpointError: heads that borrow a vocabulary nobody named.
        OutputError: the folder exists and `overwrite` is off, or cannot be written.
    """
    config, vocabulary = checkpoint.model.config, checkpoint.vocabulary
    if vocabulary is None:
        raise CheckpointError(
            "these heads do not say how many ids their target has",
            "write them with the target's vocabulary",
        )
    sizes = {"vocab_size": vocabulary.target_size, "draft_vocab_size": len(vocabulary)}
    stored = _File(model_type=MODEL_TYPE, **{**asdict(config), **sizes})
    tensors = files.to_tensors(checkpoint.model, vocabulary, dtype)
    files.write(folder, tensors, stored.model_dump(), card=card, overwrite=overwrite)


def check_target(
    config: MedusaConfig, *, vocab_size: int, hidden_size: int, num_layers: int, name: str
) -> None:
    """Refuse heads made for another target.

    Args:
        config: the heads'.
        vocab_size: rows of the target's embedding.
        hidden_size: D of the target.
        num_layers: L of the target; any will do.
        name: the target's name, for the message.

    Raises:
        DrafterMismatchError: vocabulary or hidden size differ.
    """
    facts = [("hidden size", config.hidden_size, hidden_size)]
    if config.vocab_size is not None:
        facts.append(("vocabulary", config.vocab_size, vocab_size))
    files.check_facts(facts, name=name, method="medusa")


def _read_official(path: Path) -> MedusaCheckpoint:
    """The authors' file, its shape taken from the tensors themselves."""
    try:
        tensors = _READERS[path.suffix](path)
    except Exception as error:  # unpickling fails in many ways
        raise CheckpointError(
            f"{path} cannot be read: {files.first_line(error)}",
            "take the heads from their source again",
        ) from error
    blocks = [found for name in tensors if (found := _BLOCK.fullmatch(name))]
    if not blocks:
        raise CheckpointError(
            f"{path} has no tensors named 0.0.linear.weight, so it holds no Medusa heads",
            "give the folder of a Medusa checkpoint",
        )
    own = [name for name in tensors if _HEAD.fullmatch(name)]
    num_rows = tensors[own[0]].shape[0] if own else None
    config = MedusaConfig(
        hidden_size=tensors[blocks[0][0]].shape[1],
        num_heads=1 + max(int(found[1]) for found in blocks),
        num_blocks=1 + max(int(found[2]) for found in blocks),
        vocab_size=num_rows,
        draft_vocab_size=num_rows,
        borrows_head=not own,
    )
    model = Medusa(config)
    files.fill(model, {f"heads.{name}": tensor for name, tensor in tensors.items()}, path)
    vocabulary = None if num_rows is None else DraftVocabulary.full(num_rows)
    return MedusaCheckpoint(model.eval(), vocabulary)


def _unpickle(path: Path) -> dict[str, Tensor]:
    return torch.load(path, map_location="cpu", weights_only=True)


_READERS = {".pt": _unpickle, ".safetensors": load_file}
