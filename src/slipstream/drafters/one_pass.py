"""What drafters share that say all depths in one pass (DFlash, P-EAGLE): their rows, their trees.

One pass gives one list of logits per depth: marginals, which know nothing of each other. They
become a chain, a tree of any fixed shape, or the tree of the likeliest prefixes (DDTree's heap).

Paper: Ringel and Romano 2026, DDTree, arXiv:2604.12989 (the best-first tree over marginals).
Differs: above temperature 0 children are chosen with the target's noise or drawn from the
marginals, never argmax drafts under a p/q test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from slipstream.cache import SlotCache
from slipstream.drafters.candidates import Candidates, pick
from slipstream.drafters.pending import Pending
from slipstream.drafters.protocol import Row
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.target.protocol import Target
from slipstream.trees.best_first import from_marginals
from slipstream.trees.kinds import Growth
from slipstream.types import DraftTree, Verdict

ROOM = 256  # slots the cache grows by


class OnePassDrafter:
    """Drafts with a network that says all depths at once; a subclass runs it (`_draft`).

    Args:
        network: the draft network.
        cache: an empty one for a single row, `ROOM` long, of the network's shape.
        taps: indices into the target's hidden states that the network reads.
        vocabulary: the ids that the network's logits are of.
        target: whose text is drafted.
        growth: of the trees; best-first ones of chosen children grow by the heap over marginals,
            as DDTree does.
        depth: of the deepest token that the network says.
    """

    name: str
    reads_path: ClassVar[bool] = False  # a child's score depends on its parent: `network.after`

    def __init__(
        self,
        network: Any,
        cache: SlotCache,
        *,
        taps: tuple[int, ...],
        vocabulary: DraftVocabulary,
        target: Target,
        growth: Growth,
        depth: int,
    ) -> None:
        spec = target.spec
        self.taps, self.network = taps, network
        self.rests_threads: bool = getattr(network, "rests_threads", False)
        self._kind = replace(growth, topk=min(growth.topk, len(vocabulary))).kind()
        self._children, self._is_marginal = growth.children, growth.tree == "best-first"
        shape = self._kind.shape
        self._is_chain = shape is not None and shape.depth == shape.budget
        self._depth, self._budget = min(growth.depth, depth), growth.budget
        self._target_ids = vocabulary.target_ids.to(spec.device)
        self._vocab_size, self._cost = spec.vocab_size, growth.cost
        self._slots: dict[int, int] = {}
        self._pending = Pending()
        self._cache = cache
        self._free = [0]

    def open(self, row: Row, features: Tensor | None) -> None:
        """Remember the prompt's features; they enter the cache with the first proposal."""
        assert features is not None, "the engine gives features for our taps"
        if not self._free:
            self._enlarge(self._cache.num_rows * 2, self._cache.max_length)
        slot = self._slots[row.key] = self._free.pop()
        self._cache.reset(slot)
        self._pending.add(row.key, features)

    def observe(self, row: Row, verdict: Verdict, features: Tensor | None) -> None:
        """Remember the verified features; they enter the cache with the next proposal."""
        assert features is not None, "the engine gives features for our taps"
        self._pending.add(row.key, features)

    def close(self, row: Row) -> None:
        """Free the row."""
        slot = self._slots.pop(row.key, None)
        self._pending.close(row.key)
        if slot is not None:
            self._free.append(slot)

    @torch.no_grad()
    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        """One tree per row, of one pass over all rows."""
        drafting = [row for row in rows if row.max_depth >= 1 and row.max_nodes >= 1]
        trees = {row.key: DraftTree.chain([row.tokens[-1]]) for row in rows}
        if drafting:
            for row, logits in zip(drafting, self._draft(drafting), strict=True):
                trees[row.key] = self._tree(row, logits)
        return [trees[row.key] for row in rows]

    def _draft(self, rows: list[Row]) -> Tensor:
        """[B, J, U] logits of the rows' next J tokens; -inf is never proposed."""
        raise NotImplementedError

    def _tree(self, row: Row, logits: Tensor) -> DraftTree:
        """The tree of one row's marginals [J, U]."""
        depth, root = min(self._depth, row.max_depth), row.tokens[-1]
        budget = min(self._budget, row.max_nodes)
        same = None  # candidates of each level, where all of its nodes have the same
        if self._children == "chosen" and not self.reads_path:
            same = self._rank(row, logits[:depth], budget if self._is_marginal else self._kind.topk)
        if self._is_marginal and same is not None:
            return from_marginals(root, same.log_probs, same.tokens, budget, cost=self._cost)
        if self._is_chain and same is not None:
            return _chain(root, same, budget)
        builder = self._kind.build(depth, row.max_nodes)
        builder.start(root)
        newest = torch.tensor([root])  # [F] int64, the frontier's tokens
        for level in range(depth):
            counts = builder.num_children
            if same is not None:
                shape = (len(counts), -1)
                offered = Candidates(
                    same.log_probs[level].expand(shape), same.tokens[level].expand(shape)
                )
            elif self.reads_path:
                after = self.network.after(logits[level], newest)
                offered = self._pick(row, after, level, counts)
            else:
                offered = self._pick(row, logits[level].expand(len(counts), -1), level, counts)
            frontier = builder.grow(offered.log_probs, offered.tokens, offered.drawn)
            if frontier is None:
                break
            newest = frontier.tokens
        return builder.finish()

    def _rank(self, row: Row, logits: Tensor, count: int) -> Candidates:
        """[J, count] candidates of every level by its own logits [J, U]."""
        if row.sampler.is_greedy:  # no noise, so that positions do not matter
            return self._pick(row, logits, 0, (count,) * len(logits))
        levels = [self._pick(row, own[None], level, (count,)) for level, own in enumerate(logits)]
        return Candidates(
            torch.cat([level.log_probs for level in levels]),
            torch.cat([level.tokens for level in levels]),
        )

    def _pick(self, row: Row, logits: Tensor, level: int, counts: tuple[int, ...]) -> Candidates:
        """Children of nodes at this depth by their logits [F, U]."""
        return pick(
            logits,
            children=self._children,
            counts=counts,
            sampler=row.sampler,
            position=len(row.tokens) + level,
            target_ids=self._target_ids,
            vocab_size=self._vocab_size,
        )

    def _make_room(self, slots: list[int], widths: list[int]) -> None:
        needed = max(self._cache.lengths[s] + w for s, w in zip(slots, widths, strict=True))
        if needed > self._cache.max_length:
            self._enlarge(self._cache.num_rows, needed + ROOM)

    def _enlarge(self, num_rows: int, max_length: int) -> None:
        """A larger cache with the same contents."""
        self._free.extend(range(self._cache.num_rows, num_rows))
        self._cache = self._cache.enlarged(num_rows, max_length)


def _chain(root: int, levels: Candidates, budget: int) -> DraftTree:
    """The likeliest of every level, up to one that has none."""
    given = levels.log_probs[:budget, 0].float().cpu()
    known = int((given > float("-inf")).long().cumprod(0).sum())
    tokens = levels.tokens[:known, 0].tolist()
    return DraftTree.chain([root, *tokens], log_probs=torch.cat([torch.zeros(1), given[:known]]))
