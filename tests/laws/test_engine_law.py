"""Every verifier through the real engine: answers have the target's law.

Enumeration ends where a generator begins, so this is the only place that counts samples. Seeds are
fixed; with fresh seeds one of the chi-squares would fail about once in 10,000 runs.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fakes import TableTarget, random_eagle3, tiny_target
from slipstream import methods
from slipstream.drafters.candidates import pick
from slipstream.engine.engine import Engine
from slipstream.errors import VerifierMismatchError
from slipstream.trees import choices, static
from slipstream.types import DraftTree

NUM_ANSWERS, NUM_TOKENS, V = 600, 4, 3
PROMPT = [0, 1]
TREE = choices.from_choices([(0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0)])


class TableDrafter:
    """Drafts from a table under a fixed shape, through `pick` and the static builder."""

    name, taps = "table", ()

    def __init__(self, table: TableTarget, children: str, shape: static.Shape) -> None:
        self.table, self.children, self.shape = table, children, shape

    def open(self, row, features): ...

    def observe(self, row, verdict, features): ...

    def close(self, row): ...

    def propose(self, rows):
        return [self.tree(row) for row in rows]

    def tree(self, row) -> DraftTree:
        if row.max_depth < 1:
            return DraftTree.chain(row.tokens[-1:])
        builder = static.StaticBuilder(self.shape.cut(depth=row.max_depth, budget=row.max_nodes))
        builder.start(row.tokens[-1])
        contexts = [row.tokens]
        while contexts:
            picked = pick(
                torch.stack([self.table.logits_of(context) for context in contexts]),
                children=self.children,
                counts=builder.num_children,
                sampler=row.sampler,
                position=len(contexts[0]),
                target_ids=None,
                vocab_size=V,
            )
            frontier = builder.grow(picked.log_probs, picked.tokens, picked.drawn)
            if frontier is None:
                break
            grown = zip(frontier.tokens.tolist(), frontier.parents.tolist(), strict=True)
            contexts = [[*contexts[parent], token] for token, parent in grown]
        return builder.finish()


def engine_of(name: str, children: str | None = None) -> Engine:
    target = TableTarget(V, scale=1.0, seed=4)
    shape = static.chain(3) if name in methods.FOR_CHAINS else TREE
    drafter = TableDrafter(
        TableTarget(V, scale=1.0, seed=5), children or methods.CHILDREN[name], shape
    )
    return Engine(target, drafter, methods.resolve(methods.VERIFIERS[name]))


def law_of(target: TableTarget, temperature: float) -> dict[tuple[int, ...], float]:
    law = {}
    for answer in product(range(V), repeat=NUM_TOKENS):
        mass, context = 1.0, list(PROMPT)
        for token in answer:
            mass *= float((target.logits_of(context) / temperature).softmax(-1)[token])
            context.append(token)
        law[answer] = mass
    return law


def statistic(engine: Engine, temperature: float) -> tuple[float, int, float]:
    """Chi-square over the answers, rare ones taken together; degrees of freedom; mean tau."""
    seen: dict[tuple[int, ...], int] = {}
    passes = 0
    for seed in range(NUM_ANSWERS):
        result = engine.generate(
            PROMPT, max_new_tokens=NUM_TOKENS, temperature=temperature, seed=seed
        )
        seen[tuple(result.token_ids)] = seen.get(tuple(result.token_ids), 0) + 1
        passes += result.num_target_passes - 1
    cells = {True: [0.0, 0.0]}  # expected and seen of the rare ones
    for answer, mass in law_of(engine.target, temperature).items():
        expected = mass * NUM_ANSWERS
        cell = cells.setdefault(True if expected < 5 else answer, [0.0, 0.0])
        cell[0] += expected
        cell[1] += seen.get(answer, 0)
    value = sum((found - expected) ** 2 / expected for expected, found in cells.values())
    return value, len(cells) - 1, (NUM_TOKENS - 1) * NUM_ANSWERS / passes


def critical(degrees: int, z: float = 4.265) -> float:
    """Chi-square exceeded once in 100,000 (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + z * spread**0.5) ** 3


@pytest.mark.parametrize("name", methods.VERIFIERS)
def test_answers_have_the_targets_law(name: str) -> None:
    value, degrees, tau = statistic(engine_of(name), temperature=0.8)
    assert degrees > 20 and tau > 1.5
    if name in methods.LOSSY:
        assert value > 2 * critical(degrees)
    else:
        assert value < critical(degrees)


def test_the_count_finds_draws_of_the_wrong_kind() -> None:
    """What no check can see on distinct tokens: drawn without replacement, judged as with."""
    value, degrees, _ = statistic(engine_of("with-replacement", "distinct"), temperature=0.8)
    assert value > critical(degrees)


@pytest.mark.parametrize("name", methods.VERIFIERS)
def test_greedy_answers_are_plain_decodings(name: str) -> None:
    engine = engine_of(name)
    for prompt in ([0, 1], [2, 2], [1, 0, 2]):
        result = engine.generate(prompt, max_new_tokens=20)
        assert list(result.token_ids) == engine.target.answer(prompt, 20)


@pytest.mark.parametrize("name", methods.VERIFIERS)
def test_a_drafter_with_a_network_draws_what_the_rule_needs(name: str) -> None:
    """Every fixed tree, a reduced draft vocabulary: nothing is refused, and something is kept."""
    target = tiny_target()
    for tree in ("chain",) if name in methods.FOR_CHAINS else methods.FIXED_TREES:
        drafter = random_eagle3(
            target, tree=tree, budget=6, depth=3, topk=3, children=methods.CHILDREN[name]
        )
        engine = Engine(target, drafter, methods.resolve(methods.VERIFIERS[name]))
        result = engine.generate([1, 2, 3], max_new_tokens=60, temperature=3.0, seed=1)
        assert result.num_tokens == 60 and result.tau > 1


@pytest.mark.parametrize("name", [n for n in methods.VERIFIERS if methods.CHILDREN[n] != "chosen"])
def test_chosen_children_are_refused_by_name(name: str) -> None:
    engine = engine_of(name, "chosen")
    words = "without draft_probs" if methods.CHILDREN[name] == "mixed" else "with . chosen nodes"
    with pytest.raises(VerifierMismatchError, match=f"verifier '{name}' got a tree {words}"):
        engine.generate(PROMPT, max_new_tokens=4, temperature=1.0)
