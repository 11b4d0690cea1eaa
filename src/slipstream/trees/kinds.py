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
