"""A draft language model: any smaller model that reads the same tokens drafts any tree.

Paper: Leviathan et al. 2023, arXiv:2211.17192, and Chen et al. 2023, arXiv:2302.01318 (chains);
Miao et al. 2023, SpecInfer, arXiv:2305.09781, and Chen et al. 2024, Sequoia, arXiv:2402.12374
(trees).
Differs: what was accepted is read again together with the new root, in the pass that has to be
run for the root anyway; so the cache never holds a token that was not verified, and a fully
accepted chain, whose last token was drafted but never read, needs no special case.

Entry i of the rollout is token x[i] at position i; its state predicts x[i+1].
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.drafters.attention import CachedAttention
from slipstream.drafters.compiled import CompiledNetwork, can_compile
from slipstream.drafters.model_rollout import ModelRollout
from slipstream.drafters.products import frozen_copy, narrow
from slipstream.drafters.protocol import Row
from slipstream.drafters.rollout import Entries, Rollout
from slipstream.errors import DrafterMismatchError
from slipstream.formats import detect, layouts
from slipstream.formats.checkpoint import LanguageCheckpoint
from slipstream.models.language import Language
from slipstream.target.packed import can_pack, pack_linears
from slipstream.target.protocol import Target
from slipstream.trees.kinds import Growth
from slipstream.types import DraftTree, Verdict

ENOUGH = 0.9  # share of the target's tokens a draft model must know


class ChainDrafter:
    """Drafts with a language model of its own; see the module's text.

    Args:
        rollout: grows the trees, through a small network or a whole model.
    """

    name = "chain"
    taps: tuple[int, ...] = ()

    def __init__(self, rollout: Rollout | ModelRollout) -> None:
        self._rollout = rollout
        self.rests_threads = getattr(rollout, "rests_threads", False)

    @classmethod
    def from_checkpoint(
        cls, folder: Path | str, target: Target, growth: Growth, *, token: str | None = None
    ) -> Self:
        """Read a draft language model and fit it to a target.

        Args:
            folder: of our own checkpoint, or any Hugging Face model: a folder, a name, an id.
            target: whose text is drafted.
            growth: of the trees.
            token: of Hugging Face, for a private or gated model.

        Raises:
            CheckpointError: the folder cannot be read.
            DrafterMismatchError: it was made for another target, or reads other tokens.
            SettingError: topk is larger than the draft vocabulary, or the tree is unknown.
            UnsupportedTargetError: it is a model that cannot score trees.
        """
        if is_whole_model(folder):
            from slipstream.target.hf import load_target

            spec, threads = target.spec, torch.get_num_threads()
            draft = load_target(
                str(folder), dtype=spec.dtype, device=spec.device, threads=threads, token=token
            )
            return cls.from_target(draft, target, growth)
        checkpoint = layouts.LANGUAGE.read(folder)
        narrow(checkpoint.model, target.spec.dtype)
        return cls.from_model(checkpoint, target, growth)

    @classmethod
    def from_target(cls, draft: Target, target: Target, growth: Growth) -> Self:
        """Let a whole loaded model draft for a target; see `from_checkpoint`."""
        check_same_tokens(draft, target)
        rollout = ModelRollout(
            draft,
            growth.kind().build,
            vocab_size=target.spec.vocab_size,
            children=growth.children,
        )
        return cls(rollout)

    @classmethod
    def from_model(cls, checkpoint: LanguageCheckpoint, target: Target, growth: Growth) -> Self:
        """Fit a network in memory to a target; see `from_checkpoint`."""
        embedding, spec = target.embedding(), target.spec
        layouts.LANGUAGE.check_target(checkpoint, target)
        kind = growth.kind(vocab_size=len(checkpoint.vocabulary))
        network: TokenNetwork | CompiledNetwork
        if can_compile(spec, checkpoint.model.config):
            network = CompiledNetwork(checkpoint.model, embedding)
        else:
            network = TokenNetwork(
                checkpoint.model, embedding, dtype=spec.dtype, device=spec.device
            )
        rollout = Rollout(
            network,
            kind.build,
            target_ids=checkpoint.vocabulary.target_ids,
            vocab_size=spec.vocab_size,
            children=growth.children,
        )
        return cls(rollout)

    def open(self, row: Row, features: Tensor | None) -> None:
        """Begin a row; its prompt is read with the first proposal."""
        self._rollout.open(row.key)

    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        """One tree per row; every row reads what it has not read yet, the root last."""
        drafting = [row for row in rows if row.max_depth >= 1 and row.max_nodes >= 1]
        trees = {row.key: DraftTree.chain([row.tokens[-1]]) for row in rows}
        if drafting:
            unread = [Entries(row.tokens[self._rollout.length(row.key) :]) for row in drafting]
            for row, tree in zip(drafting, self._rollout.draft(drafting, unread), strict=True):
                trees[row.key] = tree
        return [trees[row.key] for row in rows]

    def observe(self, row: Row, verdict: Verdict, features: Tensor | None) -> None:
        """What is new is read with the next proposal."""

    def close(self, row: Row) -> None:
        """Free the row."""
        self._rollout.close(row.key)


def is_whole_model(folder: Path | str) -> bool:
    """True for what is not a folder of our own small models but may be a model of its own."""
    path = Path(folder)
    return not path.is_dir() or (
        (path / "config.json").is_file() and not detect.is_own_language_model(path)
    )


def check_same_tokens(draft: Target, target: Target) -> None:
    """Refuse a draft model whose ids mean other tokens than the target's.

    Models without tokenizers must have vocabularies of one size.

    Raises:
        DrafterMismatchError: an id differs, or most of the target's ids are unknown to the draft.
    """
    hint = "choose a draft model of the target's own family"
    names = f"{draft.spec.name} cannot draft for {target.spec.name}"
    theirs, ours = (
        getattr(getattr(model, "tokenizer", None), "tokens", None) for model in (draft, target)
    )
    if theirs is None or ours is None:
        if draft.spec.vocab_size != target.spec.vocab_size:
            raise DrafterMismatchError(
                f"{names}: vocabularies of {draft.spec.vocab_size} and {target.spec.vocab_size} "
                "ids, and no tokenizers to compare",
                hint,
            )
        return
    shared = theirs.keys() & ours.keys()
    different = sorted(id for id in shared if theirs[id] != ours[id])
    if different:
        first = different[0]
        raise DrafterMismatchError(
            f"{names}: its tokenizer is another one; {len(different)} of {len(shared)} ids differ, "
            f"first {first}, which is {theirs[first]!r} there and {ours[first]!r} here",
            hint,
        )
    if len(shared) < ENOUGH * len(ours):
        raise DrafterMismatchError(
            f"{names}: its tokenizer knows {len(shared)} of the target's {len(ours)} tokens", hint
        )


class TokenNetwork:
    """A draft network that reads tokens, for a rollout: frozen, with the target's embedding.

    Args:
        model: the network; it is copied.
        embedding: [V', D], the target's.
        dtype: the network runs in.
        device: where it runs.
    """

    def __init__(
        self,
        model: Language,
        embedding: Tensor,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.dtype, self.device = dtype, torch.device(device)
        self.num_layers = model.config.num_layers
        self.num_kv_heads = model.config.num_kv_heads
        self.head_size = model.config.head_size
        self._model = frozen_copy(model, dtype, self.device)
        self._embedding = embedding
        self.logits = self._model.logits
        if can_pack(dtype, self.device):
            pack_linears(self._model)

    def step(
        self, tokens: Tensor, inputs: Tensor | None, positions: Tensor, attend: CachedAttention
    ) -> Tensor:
        """[B, N, D] states; see `DraftNetwork.step`."""
        embedded = F.embedding(tokens, self._embedding).to(self.dtype)
        return self._model(embedded, positions, attend)
