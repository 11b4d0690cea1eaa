"""Medusa heads as their authors store them: a pickled state dict, its shape in its own keys.

`I.R.linear.*` is block R of head I, `I.B.weight` its projection behind B blocks. How many heads
there are is counted, because published configs say 2 where the weights hold 5. Files of blocks
alone ("version 2", safetensors) borrow the target's head.

Layout: FasterDecoding/Medusa `medusa_model.py`.
"""

from __future__ import annotations

import re

import torch

from slipstream.errors import CheckpointError
from slipstream.formats import folder
from slipstream.formats.checkpoint import Files, MedusaCheckpoint, TargetFacts
from slipstream.formats.dialect import Dialect
from slipstream.models.medusa import Medusa, MedusaConfig
from slipstream.models.vocabulary import DraftVocabulary

STEM = "medusa_lm_head"
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")


def claim(files: Files) -> str | None:
    """By the name of the file."""
    return f"a file {files.weights}" if files.weights.startswith(STEM) else None


def load(files: Files, target: TargetFacts | None) -> MedusaCheckpoint:
    """Heads, their shape taken from the tensors themselves.

    Raises:
        CheckpointError: unknown or missing tensors.
    """
    tensors, place = files.tensors, f"{files.place}/{files.weights}"
    blocks = [found for name in tensors if (found := _BLOCK.fullmatch(name))]
    if not blocks:
        raise CheckpointError(
            f"{place} has no tensors named 0.0.linear.weight, so it holds no Medusa heads",
            "give the folder of a Medusa checkpoint",
        )
    own = [name for name in tensors if _HEAD.fullmatch(name)]
    num_rows = tensors[own[0]].shape[0] if own else None
    if num_rows is None and target is not None and target.head is not None:
        num_rows = target.head.shape[0]
    config = MedusaConfig(
        hidden_size=tensors[blocks[0][0]].shape[1],
        num_heads=1 + max(int(found[1]) for found in blocks),
        num_blocks=1 + max(int(found[2]) for found in blocks),
        vocab_size=num_rows,
        draft_vocab_size=num_rows,
        borrows_head=not own,
    )
    model = Medusa(config)
    folder.fill(model, {f"heads.{name}": tensor for name, tensor in tensors.items()}, place)
    vocabulary = None if num_rows is None else DraftVocabulary.full(num_rows)
    return MedusaCheckpoint(model.eval(), vocabulary)


def dump(checkpoint: MedusaCheckpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """The pickled file, or blocks alone where the target's head is borrowed.

    Raises:
        CheckpointError: heads of a reduced vocabulary, for which there is no map.
    """
    network, vocabulary = checkpoint.model.config, checkpoint.vocabulary
    if not network.borrows_head and vocabulary is not None and not vocabulary.is_full:
        raise CheckpointError(
            f"medusa has no map for heads of {len(vocabulary)} of {vocabulary.target_size} ids",
            "choose --to vllm, which has one",
        )
    tensors = {
        name.removeprefix("heads."): tensor
        for name, tensor in folder.to_tensors(checkpoint.model, None, dtype).items()
    }
    config = {
        "base_model_name_or_path": target.name,
        "medusa_num_heads": network.num_heads,
        "medusa_num_layers": network.num_blocks,
        "model_type": "medusa",
    }
    if network.borrows_head:
        config["version"] = "2"
    suffix = ".safetensors" if network.borrows_head else ".pt"
    return Files(config, tensors, weights=STEM + suffix)


MEDUSA = Dialect("medusa", "medusa", "FasterDecoding/Medusa", claim, load, dump)
