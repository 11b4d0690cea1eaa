"""The numbers of docs/trees.md: worked examples, and explanations that need correcting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from slipstream import methods
from slipstream.assemble import decide
from slipstream.trees import kinds
from slipstream.trees.budget import best_size, rates
from slipstream.trees.choices import EAGLE1, MEDUSA, by_accuracy
from slipstream.trees.dynamic import DynamicBuilder
from slipstream.trees.mask import Layout, ancestors
from slipstream.trees.sequoia import DEFAULT_ACCEPTANCE, best, expected
from slipstream.trees.static import complete, expansion
from slipstream.types import DraftTree

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "trees.md").read_text(encoding="utf-8")


def test_the_page_has_every_kind() -> None:
    for name in kinds.KINDS:
        assert f"| `{name}` |" in PAGE


def test_the_mask_of_seven_nodes() -> None:
    tree = DraftTree(torch.arange(7), torch.tensor([-1, 0, 0, 1, 1, 2, 2]))
    expected_rows = ["1000000", "1100000", "1010000", "1101000", "1100100", "1010010", "1010001"]
    rows = ["".join(str(int(seen)) for seen in row) for row in ancestors(tree.parents).tolist()]
    assert rows == expected_rows
    layout = Layout.of([tree], [10])
    assert layout.positions.tolist() == [[10, 11, 11, 12, 12, 12, 12]]
    mask = layout.mask(17, torch.float32)[0]
    assert (mask[:, :10] == 0).all()  # the prefix is seen by all
    assert torch.equal(mask[:, 10:] == 0, ancestors(tree.parents))
    for row in rows:  # and the page shows the same
        assert "prefix  " + " ".join(row).replace("1", "x").replace("0", ".") in PAGE


def test_the_expansion_example() -> None:
    """0.95/0.6/0.3/0.05 with a beam of 2: 0.855, 0.42, 0.38, 0.12."""
    builder = DynamicBuilder(budget=8, depth=2, topk=4, beam=2)
    builder.start(0)
    first = torch.tensor([[0.95, 0.6, 0.3, 0.05]])
    frontier = builder.grow(first.log(), torch.tensor([[1, 2, 3, 4]]))
    assert frontier.tokens.tolist() == [1, 2]
    builder.grow(torch.tensor([[0.9, 0.4], [0.7, 0.2]]).log(), torch.tensor([[5, 6], [7, 8]]))
    tree = builder.finish()
    own, parents = tree.log_probs.exp().tolist(), tree.parents.tolist()
    level = [own[node] * own[parents[node]] for node in range(5, 9)]
    assert sorted(level, reverse=True) == pytest.approx([0.855, 0.42, 0.38, 0.12])
    builder.budget = 5
    assert sorted(builder.finish().tokens.tolist()) == [0, 1, 2, 5, 6, 7]
    assert "0.855, 0.42, 0.38 and 0.12" in PAGE


def test_sparse_not_complete() -> None:
    assert (EAGLE1.budget, MEDUSA.budget) == (25, 63)
    assert (complete(2, 5).budget, complete(2, 4).budget) == (62, 30)
    assert expansion((1, 1, 3, 1, 1)).budget == 11


def test_leaves_are_not_independent() -> None:
    """1 - (1 - a^d)^(2^d) gives 0.965 where 0.614 is right."""
    first, second, depth = 0.7, 0.15, 3
    wrong = 1 - (1 - first**depth) ** (2**depth)
    whole = expected(complete(2, depth), (first, second))
    shorter = expected(complete(2, depth - 1), (first, second))
    assert round(wrong, 3) == 0.965
    assert round(whole - shorter, 3) == round((first + second) ** depth, 3) == 0.614
    assert round(whole, 2) == 3.19


def test_the_head_is_read_once() -> None:
    nodes, vocab_size, hidden_size = 60, 128_000, 4_096
    assert round(2 * nodes * vocab_size * hidden_size / 1e9) == 63  # GFLOP
    assert round(2 * vocab_size * hidden_size / 1e9, 2) == 1.05  # GB


def test_how_many_nodes_pay() -> None:
    reach = torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)
    found = rates(reach, lambda n: 1 + 0.2 * n)
    assert [round(rate, 2) for rate in found.tolist()] == [0.83, 1.36, 1.5, 1.39]
    assert best_size(reach, lambda n: 1 + 0.2 * n) == 2


def test_a_shape_by_accuracy() -> None:
    shape = by_accuracy([[0.6, 0.2], [0.5, 0.1]], budget=4)
    assert kinds.make("static", budget=4, depth=2, topk=1, shape=shape).shape == shape
    assert shape.parents == (-1, 0, 0, 1, 2)  # 0.6, 0.3, 0.2, then 0.1 before 0.06


def test_the_default_acceptance_is_stated() -> None:
    assert ", ".join(f"{chance:g}" for chance in DEFAULT_ACCEPTANCE) in PAGE.replace("\n", " ")


def test_sequoia_beats_what_it_is_compared_with() -> None:
    """The table of the page, line by line."""
    lines = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]*) \| ([\d.]+) \|$", PAGE, re.M)
    assert [line[0] for line in lines] == ["4", "8", "16", "25", "63"]
    for nodes, *others, ours in lines:
        assert float(ours) >= max(float(other) for other in others if other)
        assert ours == f"{expected(best(DEFAULT_ACCEPTANCE, int(nodes)), DEFAULT_ACCEPTANCE):.2f}"


def test_the_commands_give_the_trees_they_name() -> None:
    for line in re.findall(r"slipstream generate (--tree .*?) --prompt", PAGE):
        words = line.replace("--", "").split()
        wishes = dict(zip(words[::2], words[1::2], strict=True))
        numbers = {key: value if key == "tree" else int(value) for key, value in wishes.items()}
        shape = decide(methods.get("eagle3"), **numbers)
        kind = kinds.make(shape.tree, budget=shape.budget, depth=shape.depth, topk=shape.topk)
        assert kind.shape is None or kind.shape.budget == numbers["budget"]
