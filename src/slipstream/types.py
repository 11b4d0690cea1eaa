"""The nouns that travel through the loop: trees, verdicts, steps, outputs.

Shape legend, used in every comment of the package and never redefined:

    B rows (requests)          S committed tokens in a row     N nodes of a tree, root included
    W block width              T training tokens               A anchors
    K target taps              D hidden size                   V target vocabulary
    U draft vocabulary         L layers                        H heads
    C head size                F nodes of one level (frontier)

Dtypes are named only where they are not floating.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.errors import SettingError, ShapeError


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A root (the last emitted token, not yet in the cache) and the nodes drafted below it.

    Args:
        tokens: [N] int64, target vocabulary ids; tokens[0] is the root.
        parents: [N] int64, parents[0] == -1 and parents[i] < i.
        log_probs: [N] nats, log q of each node given its parent (root 0), or None if the
            drafter has no probabilities.
        is_drawn: [N] bool, True where a node is a sample from `draft_probs` of its parent, in
            draw order; False (or None for the whole tree) where it was chosen.
        draft_probs: [N, V], row i is the distribution the children of node i were drawn from;
            None for trees whose nodes were all chosen.

    Raises:
        ShapeError: lengths differ, the tree is empty, or a parent does not precede its child.
    """

    tokens: Tensor
    parents: Tensor
    log_probs: Tensor | None = None
    is_drawn: Tensor | None = None
    draft_probs: Tensor | None = None
    depths: Tensor = field(init=False)  # [N] int64, root 0

    def __post_init__(self) -> None:
        parents = self.parents.tolist()
        if self.tokens.dim() != 1 or self.tokens.shape != self.parents.shape or not parents:
            raise ShapeError(
                f"DraftTree: tokens is {list(self.tokens.shape)}, parents is "
                f"{list(self.parents.shape)}, expected two equal [N], N >= 1"
            )
        depths = [0] * len(parents)
        for node, parent in enumerate(parents):
            if not (-1 <= parent < node) or (parent == -1) != (node == 0):
                raise ShapeError(
                    f"DraftTree: parents[{node}] is {parent}, expected "
                    f"{'-1 for the root' if node == 0 else f'0..{node - 1}'}"
                )
            depths[node] = 0 if node == 0 else depths[parent] + 1
        object.__setattr__(self, "depths", torch.tensor(depths, dtype=torch.int64))

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def budget(self) -> int:
        """Drafted nodes, root not counted."""
        return len(self) - 1

    @property
    def num_drafted(self) -> int:
        """Drafted tokens on the longest path."""
        return int(self.depths.max())

    @classmethod
    def chain(cls, tokens: Sequence[int], log_probs: Tensor | None = None) -> DraftTree:
        """A chain: tokens[0] is the root, each later token is the child of the one before.

        Example:
            >>> DraftTree.chain([5, 6, 7]).parents
            tensor([-1,  0,  1])
        """
        n = len(tokens)
        return cls(
            torch.as_tensor(tokens, dtype=torch.int64),
            torch.arange(-1, n - 1, dtype=torch.int64),
            log_probs=log_probs,
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """How the candidate children of a frontier were drawn; a level without it was chosen.

    Args:
        is_drawn: [F, M] bool, True where a candidate is a sample from its node's row of
            `draft_probs`, in draw order; False where it was chosen.
        draft_probs: [F, V] float32, the distribution each node's children were drawn from.
    """

    is_drawn: Tensor
    draft_probs: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier kept of a tree.

    Args:
        path: accepted nodes from the root down, path[0] == 0; length 1 + num_accepted.
        next_token: the target's own token that ends the step.
        is_bonus: True when `next_token` follows a fully accepted path (its last node is a leaf
            and at least one drafted node was accepted).
    """

    path: tuple[int, ...]
    next_token: int
    is_bonus: bool = False

    @property
    def num_accepted(self) -> int:
        """Drafted tokens kept."""
        return len(self.path) - 1

    @property
    def num_emitted(self) -> int:
        """Tokens this step adds before stopping rules cut: accepted plus the target's own."""
        return len(self.path)


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What a target pass returns for a batch of trees, padded to the widest.

    Args:
        logits: [B, N, V] float32; [B, 1, V] when only the last node was asked for.
        features: [B, N, K*D] hidden states at the taps, or None.
        last_hidden: [B, N, D] input of the head (after the final norm), or None.
    """

    logits: Tensor
    features: Tensor | None = None
    last_hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the loop for one row: a draft, a target pass, a verdict.

    Args:
        tree: the tree that was verified.
        verdict: what the verifier kept.
        emitted: tokens that reached the output, after stopping rules; may be fewer than
            `verdict.num_emitted`.
        draft_seconds: drafting, shared by the rows of the batch.
        target_seconds: the target pass.
        other_seconds: everything else in the step.
        target_log_probs: [N] nats, the target's log p of each node given its parent (root 0);
            only when a trace was asked for.
        top_tokens: per node, the target's three most likely (token, probability); only when a
            trace was asked for.
    """

    tree: DraftTree
    verdict: Verdict
    emitted: tuple[int, ...]
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    other_seconds: float = 0.0
    target_log_probs: Tensor | None = None
    top_tokens: tuple[tuple[tuple[int, float], ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request samples. Temperature 0 is greedy, whatever the other settings.

    Args:
        temperature: 0 or more.
        top_k: keep this many most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches this, in (0, 1].
        seed: key of the request's noise.

    Raises:
        SettingError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise SettingError("temperature", self.temperature, "0 or more", "use 0 for greedy")
        if self.top_k < 0:
            raise SettingError("top-k", self.top_k, "0 or more", "use 0 to keep all tokens")
        if not 0 < self.top_p <= 1:
            raise SettingError("top-p", self.top_p, "in (0, 1]", "use 1 to keep all tokens")

    @property
    def is_greedy(self) -> bool:
        """True at temperature 0."""
        return self.temperature == 0
