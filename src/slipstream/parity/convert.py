"""A drafter from one dialect to another: read, write aside, read back, prove, keep.

Nothing appears at the output before the proof holds. The card travels along and says where the
files come from; so does a README beside it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import CheckpointError
from slipstream.formats import detect, folder, layouts
from slipstream.formats.checkpoint import Checkpoint, Files, facts_of
from slipstream.formats.model_card import model_card
from slipstream.models.readout import Readout
from slipstream.parity.patient import read_card
from slipstream.parity.proof import Proof, doubts, prove
from slipstream.parity.texts import look


@dataclass(frozen=True, slots=True)
class Conversion:
    """What became of a conversion.

    Args:
        source: dialect it came from, and what showed it.
        dialect: it went to.
        method: whose network it is.
        dtype: of the tensors that were written.
        proof: of both saying the same.
        notes: what a user of the output should know.
        doubts: other readings of the source that predict the target better.
        files: names in the output folder.
    """

    source: detect.Found
    dialect: str
    method: str
    dtype: str
    proof: Proof
    notes: tuple[str, ...]
    doubts: tuple[str, ...]
    files: tuple[str, ...]


def convert(
    source: Path,
    dialect: str,
    target: Any,
    output: Path,
    *,
    prompts: Sequence[Sequence[int]],
    target_name: str | None = None,
    overwrite: bool = False,
) -> Conversion:
    """Convert a drafter.

    Args:
        source: its folder, of any known dialect.
        dialect: to write.
        target: loaded; its features prove the conversion.
        output: the folder that appears.
        prompts: token ids of texts to prove it on.
        target_name: what files call the target; None takes its own name.
        overwrite: replace a folder that is there.

    Raises:
        CheckpointError: the source cannot be read, the dialect has no place for it, or the
            drafter is another one afterwards, with the cause.
        DrafterMismatchError: it was made for another target.
        OutputError: the output exists, or cannot be written.
        UnknownNameError: no such dialect.
    """
    folder.refuse_existing(output, overwrite=overwrite)
    found = detect.detect(source)
    facts = facts_of(target, target_name)
    before = found.load(facts)
    layouts.of(before).check_target(before, target)
    method = detect.method_of(before)
    way = detect.dialect_for(dialect, method)
    dtype = _dtype_of(found.files)
    readout = Readout(target.embedding().float().cpu(), target.head().float().cpu())
    texts = [look(target, readout, prompt, []) for prompt in prompts]
    made = way.dump(before, facts, dtype)
    notes = _notes(before, made)
    card = _card(source, found, dialect)
    with folder.prepared(output, overwrite=overwrite) as place:
        folder.write(place, made.tensors, made.config, weights=made.weights)
        proof = prove(before, way.load(folder.read_files(place), facts), texts, readout)
        card["conversion"]["proof"] = asdict(proof)
        if way.is_model and target.tokenizer is not None:
            target.tokenizer.save(place)
        (place / "card.json").write_text(json.dumps(card, indent=2) + "\n")
        told = source / "README.md"
        readme = told.read_text(encoding="utf-8") if told.is_file() else None
        text = model_card(way, name=Path(output).name, target=facts.name, readme=readme)
        (place / "README.md").write_text(text, encoding="utf-8")
        names = tuple(sorted(path.name for path in place.iterdir()))
    return Conversion(
        found,
        dialect,
        method,
        str(dtype).removeprefix("torch."),
        proof,
        notes,
        tuple(doubts(before, texts, readout)),
        names,
    )


def _dtype_of(files: Files) -> torch.dtype:
    """The number type that most of a folder's own weights have."""
    sizes: Counter[torch.dtype] = Counter()
    for name, tensor in files.tensors.items():
        if tensor.is_floating_point() and not name.endswith("embed_tokens.weight"):
            sizes[tensor.dtype] += tensor.numel()
    if not sizes:
        raise CheckpointError(f"{files.place} holds no weights")
    return sizes.most_common(1)[0][0]


def _notes(checkpoint: Checkpoint, made: Files) -> tuple[str, ...]:
    """What the output does otherwise than the source."""
    notes = []
    vocabulary = checkpoint.vocabulary
    has_map = {"d2t", "token_map"} & set(made.tensors)
    if vocabulary is not None and not vocabulary.is_full and not has_map:
        notes.append(
            f"the drafter said {len(vocabulary):,} ids, this dialect has no map: engines read all "
            f"{vocabulary.target_size:,} rows of the target's head, which costs more and may "
            "propose what was never proposed"
        )
    length = getattr(checkpoint.model.config, "max_length", None)
    if length is not None and length <= 2048:
        notes.append(
            f"max_position_embeddings is {length}: some engines draft badly past it; raise it to "
            "the target's if it was trained on longer texts"
        )
    return tuple(notes)


def _card(source: Path, found: detect.Found, dialect: str) -> dict[str, Any]:
    """The source's card, and where this one comes from."""
    card = dict(read_card(source))
    card["conversion"] = {
        "from": found.dialect.name,
        "because": found.because,
        "to": dialect,
        "source": source.name,
        "slipstream": metadata.version("slipstream"),
        "earlier": card.get("conversion"),
    }
    return card
