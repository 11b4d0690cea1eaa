"""Lookahead: the window is the tree of the paper, its n-grams reach the pool, guesses pay."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fakes import ScriptTarget, TableTarget
from slipstream.drafters.lookahead import LookaheadDrafter, NgramPool, Window
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.union import UnionDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import SettingError
from slipstream.trees.mask import ancestors
from slipstream.types import Verdict
from slipstream.verify.walk import walk


def row_of(tokens, *, depth=50, nodes=64, stops=()):
    return SimpleNamespace(
        key=0, tokens=list(tokens), max_depth=depth, max_nodes=nodes, stop_ids=frozenset(stops)
    )


def turn(drafter, row, predict, token):
    """One step in which nothing is accepted; `predict` gives the choice at a node of the tree."""
    tree = drafter.propose([row])[0]
    choices = torch.tensor([predict(tree, node) for node in range(len(tree))])
    row.tokens.append(token)
    drafter.read_choices(row, choices)
    drafter.observe(row, Verdict((0,), token), None)
    return tree


def filled(budget=17, depth=3):
    """A drafter whose window is filled with tokens that all differ, and its row."""
    drafter, row = LookaheadDrafter(budget=budget, depth=depth), row_of(range(500, 540))
    drafter.open(row, None)
    for step in range(depth):
        turn(drafter, row, lambda tree, node, step=step: 1000 * (step + 1) + node, 600 + step)
    return drafter, row


def test_the_window_is_laid_out_as_in_the_paper():
    """Level l of column c: at root + l + c, sees level 0 up to c and its own column."""
    drafter, row = filled()
    tree = drafter.propose([row])[0]
    columns = drafter._rows[0].columns
    assert [len(column) for column in columns] == [3, 3, 3]
    assert len({token for column in columns for token in column}) == 9  # no two were merged
    node_of = {token: node for node, token in enumerate(tree.tokens.tolist())}
    place = [[node_of[token] for token in column] for column in columns]
    sees = ancestors(tree.parents)
    for c in range(3):
        for level in range(3):
            node = place[c][level]
            expected = {place[other][0] for other in range(c + 1)} | set(place[c][: level + 1])
            assert set(sees[node].nonzero().flatten().tolist()) == expected
            assert int(tree.depths[node]) == level + c
    assert drafter._rows[0].last_level == [column[-1] for column in place]


def test_levels_move_up_and_columns_become_ngrams():
    drafter, row = filled()
    state = drafter._rows[0]
    before = state.window.columns(row.tokens[-1])
    turn(drafter, row, lambda tree, node: 9000 + node, 700)
    after = state.window.columns(row.tokens[-1])
    # one level up is one column left, because the root has moved on by one
    assert [after[c][0] for c in (1, 2)] == [before[c][1] for c in (1, 2)]
    assert [after[c][1] for c in (0, 1, 2)] == [before[c][2] for c in (0, 1, 2)]
    newest = [column[-1] for column in after]
    assert all(9000 <= token < 9100 for token in newest)
    for column, prediction in zip(before, newest, strict=True):
        assert state.pool.after(column[0])[0] == (*column[1:], prediction)


def test_the_window_starts_with_the_prompt_and_fills_level_by_level():
    window = Window(3, 3, [5, 6, 7])
    assert (len(window.levels), window.size, window.depth) == (1, 4, 4)
    window.advance([10, 11, 12, 13, 14])
    assert [len(level) for level in window.levels] == [3, 4]
    window.advance([20, 21, 22, 23])
    assert [len(level) for level in window.levels] == [2, 3, 3]
    assert window.columns(1)[0] == [1, 12, 21]
    window.advance([30, 31, 32])
    assert window.columns(2) == [[2, 21, 30], [13, 22, 31], [14, 23, 32]]


def test_the_pool_keeps_the_latest_of_each_key():
    pool = NgramPool(2, per_key=2)
    for ngram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7], [8, 9, 9]):
        pool.add(ngram)
    assert pool.after(1) == [(6, 7), (2, 3)]
    assert pool.after(8) == [(9, 9)] and pool.after(5) == []
    pool.extend([20, 21, 22])
    pool.extend([20, 21, 22, 23])
    assert pool.after(20) == [(21, 22)] and pool.after(21) == [(22, 23)]


def test_the_prompt_seeds_the_pool_and_guesses_share_prefixes():
    drafter, row = LookaheadDrafter(budget=17, depth=3), row_of([1, 2, 3, 4, 1, 2, 3, 5, 8, 1])
    drafter.open(row, None)
    row.max_depth = 3  # no room for the window
    tree = drafter.propose([row])[0]
    assert tree.tokens.tolist() == [1, 2, 3, 5, 4] and tree.parents.tolist() == [-1, 0, 1, 2, 2]


def test_an_end_never_enters_the_window_but_may_end_a_guess():
    drafter, row = LookaheadDrafter(budget=17, depth=3), row_of([7, 1, 7, 2, 7, 3], stops=[7, 99])
    drafter.open(row, None)
    for _ in range(8):
        turn(drafter, row, lambda tree, node: 99 if node % 2 else 50 + node, 4)
        assert not {7, 99} & {t for level in drafter._rows[0].window.levels for t in level}
    known = drafter._rows[0].pool._known
    assert any(99 in rest for rests in known.values() for rest in rests)


@pytest.mark.parametrize("nodes", [0, 1, 4, 9, 30])
@pytest.mark.parametrize("depth", [0, 1, 3, 30])
def test_room_is_respected(nodes, depth):
    drafter, row = filled()
    row.max_nodes, row.max_depth = nodes, depth
    tree = drafter.propose([row])[0]
    assert tree.budget <= min(17, nodes) and tree.num_drafted <= depth
    drafter.read_choices(row, torch.arange(len(tree)))  # also where the window was left out


def test_a_whole_guess_is_followed_by_the_targets_own_token():
    """A text that repeats: guesses of 3 are accepted whole and give 4 tokens a pass."""
    target = ScriptTarget([11, 12, 13, 14, 15], 2, scale=1.0)
    result = Engine(target, LookaheadDrafter(budget=17, depth=3), walk).generate(
        [1, 2], max_new_tokens=60, trace=True
    )
    assert list(result.token_ids) == [11, 12, 13, 14, 15] * 12
    assert [s.verdict.num_accepted for s in result.steps][-4:-1] == [3, 3, 3]
    assert result.steps[-3].verdict.is_bonus


def test_the_window_finds_what_the_text_never_said():
    """An order-1 target that counts upwards never repeats, yet the window drafts it right."""

    class Counter(TableTarget):
        def logits_of(self, context):
            return torch.nn.functional.one_hot(
                torch.tensor((context[-1] + 1) % self.spec.vocab_size), self.spec.vocab_size
            ).float()

    target = Counter(4001)
    result = Engine(target, LookaheadDrafter(budget=17, depth=3), walk).generate(
        [40, 7], max_new_tokens=80
    )
    assert list(result.token_ids) == list(range(8, 88))
    assert result.tau > 1.5


def test_it_can_be_first_of_a_union_but_not_second():
    ahead = LookaheadDrafter(budget=17, depth=3)
    target = ScriptTarget([11, 12, 13, 14, 15], 2, scale=1.0)
    engine = Engine(target, UnionDrafter(ahead, NgramDrafter(), 25), walk)
    assert list(engine.generate([1, 2], max_new_tokens=20).token_ids) == [11, 12, 13, 14, 15] * 4
    with pytest.raises(SettingError, match="second drafter"):
        UnionDrafter(NgramDrafter(), ahead, 25)


@pytest.mark.parametrize(
    ("numbers", "says"), [({"depth": 1}, "depth is 1"), ({"budget": 4, "depth": 3}, "budget is 4")]
)
def test_numbers_without_room_for_a_window_are_refused(numbers, says):
    with pytest.raises(SettingError, match=says):
        LookaheadDrafter(**numbers)
