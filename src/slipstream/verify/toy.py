"""Tiny targets, drafters and steps made of fractions, for `verify.law` to enumerate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from slipstream.types import DraftTree
from slipstream.verify.law import Conditional, Prefix, StepOf
from slipstream.verify.protocol import Chance, Probs, Rule


def drawn_step(
    rule: Rule, target: Conditional, draft: Conditional, num_children: Sequence[int], **how: Any
) -> StepOf:
    """A step whose nodes are drawn: `num_children[d]` siblings under each node of depth d.

    Args:
        rule: the verification rule.
        target: the target's conditional.
        draft: the drafter's conditional.
        num_children: siblings by depth, e.g. (1, 1, 1) for a chain of three.
        how: `with_replacement` (default True), `order` (see `drawn_tree`).
    """

    def step(chance: Chance) -> Prefix:
        tree, prefixes = drawn_tree(draft, num_children, chance, **how)
        return _verify(rule, tree, prefixes, target, draft, chance)

    return step


def drawn_tree(
    draft: Conditional,
    num_children: Sequence[int],
    chance: Chance,
    *,
    with_replacement: bool = True,
    order: Callable[[list[int], Probs], list[int]] | None = None,
) -> tuple[DraftTree, list[Prefix]]:
    """A drawn tree and the prefix of each node.

    Args:
        draft: the drafter's conditional.
        num_children: siblings by depth.
        chance: where the tokens come from.
        with_replacement: siblings are independent draws (equal ones stay separate nodes);
            without, each is drawn from q with the earlier ones taken out, while q lasts.
        order: re-orders the siblings after they were drawn, given q. Only a wrong drafter does.
    """
    prefixes: list[Prefix] = [()]
    parents = [-1]
    level = [0]
    for count in num_children:
        below: list[int] = []
        for node in level:
            q = draft(prefixes[node])
            tokens = _siblings(q, count, chance, with_replacement)
            for token in tokens if order is None else order(tokens, q):
                below.append(len(prefixes))
                prefixes.append((*prefixes[node], token))
                parents.append(node)
        level = below
    return _tree(prefixes, parents, [True] * (len(prefixes) - 1)), prefixes


def mixed_step(
    rule: Rule, target: Conditional, draft: Conditional, num_children: Sequence[int]
) -> StepOf:
    """A step whose nodes have chosen children and one more that is drawn from what they leave.

    Args:
        rule: the verification rule.
        target: the target's conditional.
        draft: the drafter's conditional.
        num_children: siblings by depth, the drawn one included.
    """

    def step(chance: Chance) -> Prefix:
        prefixes: list[Prefix] = [()]
        parents, is_drawn, level = [-1], [], [0]
        for count in num_children:
            below: list[int] = []
            for node in level:
                tokens, rest = likeliest(draft(prefixes[node]), count - 1)
                drawn = [chance.draws(rest)] if rest.sum() > 0 else []
                for token in [*tokens, *drawn]:
                    below.append(len(prefixes))
                    prefixes.append((*prefixes[node], token))
                    parents.append(node)
                is_drawn += [False] * len(tokens) + [True] * len(drawn)
            level = below

        def drawn_from(prefix: Prefix) -> Probs:
            rest = likeliest(draft(prefix), num_children[len(prefix)] - 1)[1]
            return rest / rest.sum()

        tree = _tree(prefixes, parents, is_drawn)
        return _verify(rule, tree, prefixes, target, drawn_from, chance)

    return step


def likeliest(q: Probs, count: int) -> tuple[list[int], Probs]:
    """The `count` likeliest tokens, equals by id, and q with them taken out [V]."""
    tokens = sorted(range(len(q)), key=lambda token: (-q[token], token))[:count]
    rest = q + 0
    rest[tokens] = Fraction(0)
    return tokens, rest


def _siblings(q: Probs, count: int, chance: Chance, with_replacement: bool) -> list[int]:
    tokens: list[int] = []
    rest = q + 0
    while len(tokens) < count and rest.sum() > 0:
        tokens.append(chance.draws(rest))
        if not with_replacement:
            rest[tokens[-1]] = 0
    return tokens


def chosen_step(
    rule: Rule,
    target: Conditional,
    draft: Conditional,
    children_of: Callable[[Prefix], Sequence[int]],
) -> StepOf:
    """A step whose nodes were chosen without looking at the target's randomness.

    Args:
        rule: the verification rule.
        target: the target's conditional.
        draft: the drafter's, for rules that (wrongly) ask for it.
        children_of: prefix to the tokens chosen below it; empty ends the branch.
    """
    tree, prefixes = chosen_tree(children_of)
    return lambda chance: _verify(rule, tree, prefixes, target, draft, chance)


def chosen_tree(
    children_of: Callable[[Prefix], Sequence[int]],
) -> tuple[DraftTree, list[Prefix]]:
    """A chosen tree and the prefix of each node."""
    prefixes: list[Prefix] = [()]
    parents = [-1]
    for node, prefix in enumerate(prefixes):  # grows while it is read: level by level
        for token in children_of(prefix):
            prefixes.append((*prefix, token))
            parents.append(node)
    return _tree(prefixes, parents, [False] * (len(prefixes) - 1)), prefixes


def _tree(prefixes: list[Prefix], parents: list[int], is_drawn: list[bool]) -> DraftTree:
    drawn = torch.tensor([False, *is_drawn])
    tokens = torch.tensor([0] + [prefix[-1] for prefix in prefixes[1:]])
    return DraftTree(tokens, torch.tensor(parents), is_drawn=drawn)


def _verify(
    rule: Rule,
    tree: DraftTree,
    prefixes: list[Prefix],
    target: Conditional,
    draft: Conditional,
    chance: Chance,
) -> Prefix:
    kept = rule(
        tree, lambda node: target(prefixes[node]), lambda node: draft(prefixes[node]), chance
    )
    return (*prefixes[kept.path[-1]], kept.next_token)


def table(rows: Mapping[Prefix, Sequence[Fraction]]) -> Conditional:
    """A conditional from a table; a prefix that is missing uses its longest suffix that is there.

    `table({(): p})` is the same distribution everywhere.
    """
    probs = {prefix: np.array([Fraction(x) for x in row]) for prefix, row in rows.items()}

    def conditional(prefix: Prefix) -> Probs:
        while prefix not in probs:
            prefix = prefix[1:]
        return probs[prefix]

    return conditional


def random_table(vocab_size: int, depth: int, seed: int, *, zeros: bool = False) -> Conditional:
    """A conditional with its own random fractions after every prefix of up to `depth` tokens.

    Args:
        vocab_size: V.
        depth: longest prefix that has a row.
        seed: of the fractions.
        zeros: let some probabilities be 0.
    """
    generator = torch.Generator().manual_seed(seed)
    least = 0 if zeros else 1
    rows: dict[Prefix, list[Fraction]] = {}
    level: list[Prefix] = [()]
    for _ in range(depth + 1):
        for prefix in level:
            parts = torch.randint(least, 7, (vocab_size,), generator=generator).tolist()
            parts[sum(prefix) % vocab_size] += 1
            rows[prefix] = [Fraction(part, sum(parts)) for part in parts]
        level = [(*prefix, token) for prefix in level for token in range(vocab_size)]
    return table(rows)
