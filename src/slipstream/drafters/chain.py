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

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.drafters.protocol import Row
from slipstream.drafters.rollout import Entries, Rollout
from slipstream.errors import SettingError
from slipstream.formats import language
from slipstream.formats.language import LanguageCheckpoint
from slipstream.models.blocks import Attend
from slipstream.models.language import Language
from slipstream.target.packed import can_pack, pack_linears
from slipstream.target.protocol import Target
from slipstream.trees import kinds
from slipstream.types import DraftTree, Verdict


class ChainDrafter:
    """Drafts with a language model of its own; see the module's text.

    Args:
        rollout: grows the trees.
    """

    name = "chain"
    taps: tuple[int, ...] = ()

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    @classmethod
    def from_checkpoint(
        cls,
        folder: Path | str,
        target: Target,
        *,
        tree: str = "chain",
        budget: int = 4,
        depth: int = 4,
        topk: int = 1,
        children: str = "chosen",
    ) -> Self:
        """Read a draft language model and fit it to a target.

        Args:
            folder: of the checkpoint.
            target: whose text is drafted.
            tree: kind of tree, see `trees.kinds`.
            budget: drafted nodes.
            depth: of the deepest node.
            topk: children considered per node.
            children: how they come about, see `drafters.candidates`.

        Raises:
            CheckpointError: the folder cannot be read.
            DrafterMismatchError: it was made for another target.
            SettingError: topk is larger than the draft vocabulary, or the tree is unknown.
        """
        checkpoint = language.read(Path(folder))
        return cls.from_model(
            checkpoint,
            target,
            tree=tree,
            budget=budget,
            depth=depth,
            topk=topk,
            children=children,
        )

    @classmethod
    def from_model(
        cls,
        checkpoint: LanguageCheckpoint,
        target: Target,
        *,
        tree: str = "chain",
        budget: int = 4,
        depth: int = 4,
        topk: int = 1,
        children: str = "chosen",
    ) -> Self:
        """Fit a network in memory to a target; see `from_checkpoint`."""
        embedding, spec = target.embedding(), target.spec
        language.check_target(
            checkpoint.model.config,
            vocab_size=embedding.shape[0],
            hidden_size=spec.hidden_size,
            num_layers=spec.num_layers,
            name=spec.name,
        )
        size = len(checkpoint.vocabulary)
        if topk > size:
            raise SettingError(
                "topk", topk, f"at most the draft vocabulary, {size}", "choose a smaller topk"
            )
        network = TokenNetwork(checkpoint.model, embedding, dtype=spec.dtype, device=spec.device)
        rollout = Rollout(
            network,
            kinds.make(tree, budget=budget, depth=depth, topk=topk).build,
            target_ids=checkpoint.vocabulary.target_ids,
            vocab_size=spec.vocab_size,
            children=children,
        )
        return cls(rollout)

    def open(self, row: Row, features: Tensor | None) -> None:
        """Read the prompt."""
        self._rollout.open(row.key)
        self._rollout.commit(row.key, Entries(row.tokens[:-1]))

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
        self._model = copy.deepcopy(model).to(self.device, dtype).eval().requires_grad_(False)
        self._model.frequencies = model.frequencies.to(self.device)  # stay float32
        self._embedding = embedding
        self.logits = self._model.logits
        if can_pack(dtype, self.device):
            pack_linears(self._model)

    def step(
        self, tokens: Tensor, inputs: Tensor | None, positions: Tensor, attend: Attend
    ) -> Tensor:
        """[B, N, D] states; see `DraftNetwork.step`."""
        embedded = F.embedding(tokens, self._embedding).to(self.dtype)
        return self._model(embedded, positions, attend)
