"""Medusa's drafting: one look at the target's last hidden state proposes every depth at once.

Paper: Cai et al. 2024, Medusa, arXiv:2401.10774, sections 2.1 and 2.3.3.
Differs: any tree of chosen children, the authors' 63 nodes among them; with a small budget the
best nodes by the heads' own probabilities (`best-first`) are the better tree.

Heads do not know of each other, so all nodes of a depth have the same candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from slipstream.drafters.candidates import pick
from slipstream.drafters.products import frozen_copy, narrow, product, replace_linears
from slipstream.drafters.protocol import Row
from slipstream.formats import layouts
from slipstream.formats.checkpoint import MedusaCheckpoint, facts_of
from slipstream.target.protocol import Target
from slipstream.trees import choices
from slipstream.trees.kinds import Growth, MakeBuilder
from slipstream.types import DraftTree, Verdict


class MedusaDrafter:
    """Drafts with Medusa heads; see the module's text.

    Args:
        heads: the network with what it borrows from its target.
        build: (deepest node, most nodes) to a fresh tree builder.
        target_ids: [U] int64, the target id of each draft id; None when they are the same.
        vocab_size: V; draft ids beyond it are never proposed.
        tap: index of the target's last hidden state.
    """

    name = "medusa"

    def __init__(
        self,
        heads: HeadNetwork,
        build: MakeBuilder,
        *,
        target_ids: Tensor | None,
        vocab_size: int,
        tap: int,
    ) -> None:
        self.taps = (tap,)
        self.rests_threads = heads.rests_threads
        self._heads, self._build = heads, build
        self._target_ids, self._vocab_size = target_ids, vocab_size
        self._hidden: dict[int, Tensor] = {}  # row key to [D], of the newest verified position

    @classmethod
    def from_checkpoint(cls, folder: Path | str, target: Target, growth: Growth) -> Self:
        """Read heads and fit them to a target.

        Args:
            folder: of the checkpoint.
            target: whose text is drafted.
            growth: of the trees; static is the authors' 63 nodes, and there is a head for each
                depth and no more.

        Raises:
            CheckpointError: the folder cannot be read.
            DrafterMismatchError: the heads were made for another target.
            SettingError: topk is larger than the draft vocabulary, or the tree is unknown.
        """
        checkpoint = layouts.MEDUSA.read(folder, target=facts_of(target))
        narrow(checkpoint.model, target.spec.dtype)
        return cls.from_model(checkpoint, target, growth)

    @classmethod
    def from_model(cls, checkpoint: MedusaCheckpoint, target: Target, growth: Growth) -> Self:
        """Fit heads in memory to a target; see `from_checkpoint`."""
        spec, vocabulary = target.spec, checkpoint.vocabulary
        layouts.MEDUSA.check_target(checkpoint, target)
        size = target.head().shape[0] if vocabulary is None else len(vocabulary)
        kind = growth.kind(vocab_size=size, shape=choices.MEDUSA)
        ids = None if vocabulary is None else vocabulary.target_ids.to(spec.device)
        return cls(
            HeadNetwork(checkpoint, target),
            kind.build,
            target_ids=ids,
            vocab_size=spec.vocab_size,
            tap=spec.num_layers,
        )

    def open(self, row: Row, features: Tensor | None) -> None:
        """Remember the hidden state that gave the root."""
        assert features is not None, "the engine gives features for our tap"
        self._hidden[row.key] = features[-1]

    def observe(self, row: Row, verdict: Verdict, features: Tensor | None) -> None:
        """Remember the hidden state that gave the new root: the path's last."""
        assert features is not None, "the engine gives features for our tap"
        self._hidden[row.key] = features[-1]

    def close(self, row: Row) -> None:
        """Forget the row."""
        self._hidden.pop(row.key, None)

    @torch.no_grad()
    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        """One tree per row, from one look at each row's hidden state."""
        drafting = [row for row in rows if row.max_depth >= 1 and row.max_nodes >= 1]
        trees = {row.key: DraftTree.chain([row.tokens[-1]]) for row in rows}
        if drafting:
            hidden = torch.stack([self._hidden[row.key] for row in drafting])  # [B, D]
            logits = self._heads.logits(hidden)  # [heads, B, U]
            for index, row in enumerate(drafting):
                trees[row.key] = self._tree(row, logits[:, index])
        return [trees[row.key] for row in rows]

    def _tree(self, row: Row, logits: Tensor) -> DraftTree:
        """Grow a tree from the heads' logits [heads, U]."""
        builder = self._build(row.max_depth, row.max_nodes)
        builder.start(row.tokens[-1])
        for depth, level in enumerate(logits):
            width = len(builder.num_children)
            offered = pick(
                level[None],
                children="chosen",
                counts=(max(builder.num_children),),
                sampler=row.sampler,
                position=len(row.tokens) + depth,
                target_ids=self._target_ids,
                vocab_size=self._vocab_size,
            )
            same = (offered.log_probs.expand(width, -1), offered.tokens.expand(width, -1))
            if builder.grow(*same) is None:
                break
        return builder.finish()


class HeadNetwork:
    """Medusa heads for drafting: frozen, with the target's head where they borrow it.

    Args:
        checkpoint: the heads; their network is copied.
        target: whose head may be borrowed.
    """

    def __init__(self, checkpoint: MedusaCheckpoint, target: Target) -> None:
        self._dtype, device = target.spec.dtype, target.spec.device
        self.rests_threads = target.spec.decoder == "compiled"  # then its products are, too
        self._model = frozen_copy(checkpoint.model, self._dtype, device)
        replace_linears(self._model, target.spec)
        self._project = None
        if checkpoint.model.config.borrows_head:
            head, vocabulary = target.head(), checkpoint.vocabulary
            if vocabulary is not None:
                head = head[vocabulary.target_ids.to(head.device)]
            self._project = product(head, None, target.spec, is_head=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """[heads, B, U] of the target's last hidden states [B, D]."""
        return self._model.logits(hidden.to(self._dtype), self._project)
