"""The kinds of tree by name: from `--tree NAME` and its numbers to what grows such trees.

A kind is one function below, registered under the name that is typed. Kinds with a `shape` are
fixed before anything is drafted, so their children may be chosen or drawn; the others keep the
nodes that score best, so theirs are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.errors import SettingError
from slipstream.trees import choices, sequoia, static
from slipstream.trees.budget import Cost
from slipstream.trees.dynamic import DynamicBuilder
from slipstream.trees.protocol import TreeBuilder
from slipstream.trees.static import Shape, StaticBuilder

MakeBuilder = Callable[[int, int], TreeBuilder]
"""(deepest node, most nodes) to a fresh builder; both are 1 or more."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of tree with its numbers decided.

    Args:
        build: (deepest node, most nodes) to a builder that stays within them.
        topk: children a drafter has to offer below one node.
        shape: which ranks are drafted, or None where the scores decide.
    """

    build: MakeBuilder
    topk: int
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a kind; each takes what means something to it.

    Args:
        budget: drafted nodes, root not counted.
        depth: of the deepest node.
        topk: children considered per node; a chain has one, a static shape its own.
        shape: of a static tree; None takes EAGLE-1's 25 nodes.
        acceptance: of a sequoia tree, per rank; None takes `sequoia.DEFAULT_ACCEPTANCE`.
        cost: of trees whose scores decide: keep as many nodes as pay for themselves.
    """

    budget: int
    depth: int
    topk: int
    shape: Shape | None = None
    acceptance: Sequence[float] | None = None
    cost: Cost | None = None


@dataclass(frozen=True, slots=True)
class Growth:
    """How a drafter grows its trees: a kind with its numbers, and what fills it.

    Args:
        tree: a name of `KINDS`.
        budget: drafted nodes, root not counted.
        depth: of the deepest node.
        topk: children considered per node.
        children: how they come about, see `drafters.candidates`.
        cost: seconds of a step by the tokens of its pass; given, a tree whose scores decide keeps
            as many nodes as pay for themselves.

    Example:
        >>> Growth("chain", budget=3, depth=4, topk=1).kind().shape.parents
        (-1, 0, 1, 2)
    """

    tree: str
    budget: int
    depth: int
    topk: int
    children: str = "chosen"
    cost: Cost | None = None

    def kind(self, *, vocab_size: int | None = None, shape: Shape | None = None) -> Kind:
        """What grows such trees.

        Args:
            vocab_size: U of the draft vocabulary, which topk must not exceed where it counts.
            shape: of a static tree.

        Raises:
            SettingError: no such kind, or a number that is too small or too large.
        """
        if vocab_size is not None and self.tree not in OWN_TOPK and self.topk > vocab_size:
            raise SettingError(
                "topk",
                self.topk,
                f"at most the draft vocabulary, {vocab_size}",
                "choose a smaller topk",
            )
        return make(
            self.tree,
            budget=self.budget,
            depth=self.depth,
            topk=self.topk,
            shape=shape,
            cost=self.cost,
        )


def make(
    tree: str,
    *,
    budget: int,
    depth: int,
    topk: int,
    shape: Shape | None = None,
    acceptance: Sequence[float] | None = None,
    cost: Cost | None = None,
) -> Kind:
    """What grows trees of a kind.

    Args:
        tree: a name of `KINDS`.
        budget: drafted nodes; this and the rest are explained at `Wish`.
        depth: of the deepest node.
        topk: children considered per node.
        shape: of a static tree.
        acceptance: of a sequoia tree.
        cost: of a dynamic or best-first tree.

    Raises:
        SettingError: no such kind, a number below 1, or acceptance is no acceptance.

    Example:
        >>> make("kary", budget=6, depth=2, topk=2).shape.parents
        (-1, 0, 0, 1, 1, 2, 2)
    """
    if tree not in KINDS:
        raise SettingError("tree", tree, f"one of {', '.join(KINDS)}")
    for name, value in (("budget", budget), ("depth", depth), ("topk", topk)):
        if value < 1:
            raise SettingError(name, value, "1 or more")
    return KINDS[tree](Wish(budget, depth, topk, shape, acceptance, cost))


def fixed(shape: Shape) -> Kind:
    """The kind that fills one shape, cut to the room there is."""

    def build(max_depth: int, max_nodes: int) -> TreeBuilder:
        return StaticBuilder(shape.cut(depth=max_depth, budget=max_nodes))

    return Kind(build, shape.topk, shape)


def _chain(wish: Wish) -> Kind:
    return fixed(static.chain(min(wish.depth, wish.budget)))


def _static(wish: Wish) -> Kind:
    shape = wish.shape or choices.EAGLE1
    return fixed(shape.cut(depth=wish.depth, budget=wish.budget))


def _kary(wish: Wish) -> Kind:
    return fixed(static.complete(wish.topk, wish.depth, wish.budget))


def _sequoia(wish: Wish) -> Kind:
    acceptance = wish.acceptance or sequoia.DEFAULT_ACCEPTANCE
    return fixed(sequoia.best(acceptance[: wish.topk], wish.budget, wish.depth))


def _dynamic(wish: Wish, beam: int | None = None) -> Kind:
    def build(max_depth: int, max_nodes: int) -> TreeBuilder:
        budget, depth = min(wish.budget, max_nodes), min(wish.depth, max_depth)
        return DynamicBuilder(budget, depth, wish.topk, beam=beam, cost=wish.cost)

    return Kind(build, wish.topk)


def _best_first(wish: Wish) -> Kind:
    """Whatever could enter the tree is expanded, so it holds the best of all nodes there are."""
    return _dynamic(wish, beam=wish.budget)


KINDS: dict[str, Callable[[Wish], Kind]] = {
    "chain": _chain,
    "static": _static,
    "kary": _kary,
    "sequoia": _sequoia,
    "dynamic": _dynamic,
    "best-first": _best_first,
}
OWN_TOPK = ("chain", "static")  # whose topk is not asked
