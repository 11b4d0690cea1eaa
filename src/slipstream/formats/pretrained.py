"""Draft checkpoints the way transformers users know them: `from_pretrained`, `save_pretrained`.

`slipstream convert` does more: it proves on real features that the written drafter says the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.errors import CheckpointError
from slipstream.formats import detect, folder, hub
from slipstream.formats.checkpoint import Checkpoint, TargetFacts, facts_of
from slipstream.formats.model_card import model_card
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.target.protocol import Target


@dataclass(frozen=True, slots=True)
class PretrainedDrafter:
    """A draft network as files of any project hold it.

    Args:
        checkpoint: the network and what its ids mean.
        dialect: of the files it came from.
        because: what showed the dialect.
        card: `card.json`, or empty.
        readme: `README.md`, or None.

    Example:
        >>> drafter = PretrainedDrafter.from_pretrained("org/drafter")  # doctest: +SKIP
        >>> drafter.save_pretrained("exports/vllm", dialect="vllm")  # doctest: +SKIP
    """

    checkpoint: Checkpoint
    dialect: str
    because: str
    card: Mapping[str, Any] = field(default_factory=dict)
    readme: str | None = None

    @property
    def method(self) -> str:
        """Whose network it is: eagle, eagle3, peagle, medusa, dflash, dspark or chain."""
        return detect.method_of(self.checkpoint)

    @property
    def model(self) -> nn.Module:
        """The network, float32, on the CPU."""
        return self.checkpoint.model

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The ids it drafts; None for the target's own."""
        return self.checkpoint.vocabulary

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        target: Target | None = None,
        revision: str | None = None,
        token: str | None = None,
        local_files_only: bool = False,
    ) -> PretrainedDrafter:
        """Read a drafter.

        Args:
            name: a folder in any known dialect, or a Hugging Face id (ORG/NAME or
                ORG/NAME@REVISION).
            target: what it serves; copies of the target's weights are compared with it.
            revision: branch, tag or commit of an id.
            token: for private and gated repositories; None takes HF_TOKEN or the login.
            local_files_only: do not ask the hub; HF_HUB_OFFLINE says the same.

        Raises:
            CheckpointError: it cannot be had or read.
        """
        place = Path(name).expanduser()
        if not place.is_dir() and hub.is_id(str(name)):
            place = hub.fetch(
                str(name), revision=revision, token=token, is_offline=local_files_only
            )
        found = detect.detect(place)
        checkpoint = found.load(None if target is None else facts_of(target))
        return cls(
            checkpoint,
            found.dialect.name,
            found.because,
            json.loads(_text(place / "card.json") or "{}"),
            _text(place / "README.md"),
        )

    def save_pretrained(
        self,
        place: str | Path,
        *,
        dialect: str = "slipstream",
        target: Target | None = None,
        dtype: torch.dtype = torch.bfloat16,
        overwrite: bool = False,
    ) -> None:
        """Write config.json, the tensors, card.json and README.md; the folder appears whole or not.

        Args:
            place: the folder.
            dialect: to write; `slipstream convert --help` lists them.
            target: what it serves; some dialects keep copies of its weights, or its name.
            dtype: number type of the weights.
            overwrite: replace a folder that is there.

        Raises:
            UnknownNameError: no such dialect.
            CheckpointError: the dialect has no place for the drafter, or needs the target.
            OutputError: the folder exists and `overwrite` is off, or cannot be written.
        """
        place = Path(place).expanduser()
        way = detect.dialect_for(dialect, self.method)
        if target is None and dialect != "slipstream":
            raise CheckpointError(
                f"{dialect} says for which target a drafter is, which was not given",
                "give target=, such as slipstream.load(...).target",
            )
        facts = TargetFacts("", 0) if target is None else facts_of(target)
        made = way.dump(self.checkpoint, facts, dtype)
        with folder.prepared(place, overwrite=overwrite) as aside:
            folder.write(aside, made.tensors, made.config, weights=made.weights, card=self.card)
            way.load(folder.read_files(aside), None if target is None else facts)
            if way.is_model and target is not None and target.tokenizer is not None:
                target.tokenizer.save(aside)
            readme = model_card(
                way, name=place.name, target=facts.name or "the target", readme=self.readme
            )
            (aside / "README.md").write_text(readme, encoding="utf-8")


def _text(path: Path) -> str | None:
    """A file's text, None where there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else None
