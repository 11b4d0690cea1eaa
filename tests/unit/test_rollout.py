"""The rollout of any network: what it is asked, what it is offered, and what it leaves behind."""

import pytest
import torch

from slipstream.drafters.rollout import Entries, Rollout
from slipstream.sampling import Sampler
from slipstream.trees import kinds
from slipstream.types import Sampling

V, D = 23, 8


class TwoLayers:
    """A random network of two layers that reads tokens alone, written without any cache."""

    num_layers, num_kv_heads, head_size = 2, 1, D
    dtype, device = torch.float64, torch.device("cpu")

    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(V, D, generator=draw, dtype=self.dtype)
        self.places = torch.randn(400, D, generator=draw, dtype=self.dtype)
        self.layers = 0.4 * torch.randn(2, 3, D, D, generator=draw, dtype=self.dtype)
        self.passes = []

    def step(self, tokens, inputs, positions, attend):
        self.passes.append((tokens.clone(), positions.clone()))
        x = self.embedding[tokens] + self.places[positions]
        for query, key, value in self.layers:
            heads = [(x @ w)[:, None] for w in (query, key, value)]
            x = x + attend(*heads)[:, 0]
        return x

    def logits(self, states):
        return states @ self.embedding.T

    def whole(self, tokens):
        """[V] log-probabilities after a text, in one dense pass."""
        size = len(tokens)
        x = self.embedding[torch.tensor(tokens)] + self.places[:size]
        below = torch.ones(size, size).tril().bool()
        for query, key, value in self.layers:
            scores = (x @ query) @ (x @ key).T / D**0.5
            x = x + scores.masked_fill(~below, -torch.inf).softmax(-1) @ (x @ value)
        return self.logits(x[-1]).log_softmax(-1)


class OneRow:
    def __init__(self, tokens, key=0, max_depth=5, max_nodes=60, **sampling):
        self.key, self.tokens = key, list(tokens)
        self.max_depth, self.max_nodes = max_depth, max_nodes
        self.sampler = Sampler(Sampling(**sampling), V)


def make(children="chosen", vocab_size=V, **tree):
    network = TwoLayers()
    kind = kinds.make(**tree)
    return network, Rollout(
        network, kind.build, target_ids=None, vocab_size=vocab_size, children=children
    )


def paths(tree):
    """Tokens from the root down to each node."""
    found = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


TREES = [
    {"tree": "chain", "budget": 4, "depth": 4, "topk": 1},
    {"tree": "static", "budget": 25, "depth": 5, "topk": 1},
    {"tree": "kary", "budget": 14, "depth": 3, "topk": 2},
    {"tree": "dynamic", "budget": 12, "depth": 4, "topk": 3},
    {"tree": "best-first", "budget": 9, "depth": 4, "topk": 3},
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["tree"])
def test_every_node_is_scored_as_by_one_dense_pass(tree):
    """All layers, all masks and positions, for rows of different lengths and rooms together."""
    network, rollout = make(**tree)
    rows = [
        OneRow([1, 2, 3], key=0),
        OneRow(range(17), key=1, max_nodes=5),
        OneRow([7], key=2, max_depth=1),
    ]
    for row in rows:
        rollout.open(row.key)
    rollout.commit(1, Entries(rows[1].tokens[:-4]))
    news = [Entries(row.tokens[rollout.length(row.key) :]) for row in rows]
    for row, drafted in zip(rows, rollout.draft(rows, news), strict=True):
        assert drafted.budget <= row.max_nodes and drafted.num_drafted <= row.max_depth
        assert rollout.length(row.key) == len(row.tokens)
        for node, path in enumerate(paths(drafted)[1:], start=1):
            expected = network.whole(row.tokens[:-1] + path[:-1])[path[-1]]
            assert float(drafted.log_probs[node]) == pytest.approx(float(expected), abs=1e-5)


def test_a_level_is_one_pass_and_the_first_rides_with_the_new_entries():
    network, rollout = make(**TREES[0])
    row = OneRow(range(9))
    rollout.open(0)
    rollout.commit(0, Entries(row.tokens[:6]))
    network.passes.clear()
    rollout.draft([row], [Entries(row.tokens[6:])])
    shapes = [tuple(tokens.shape) for tokens, _ in network.passes]
    assert shapes == [(1, 3), (1, 1), (1, 1), (1, 1)]
    assert [positions[0].tolist() for _, positions in network.passes] == [
        [6, 7, 8],
        [9],
        [10],
        [11],
    ]


def test_drafting_again_reads_no_entry_twice():
    network, rollout = make(**TREES[3])
    row = OneRow(range(9))
    rollout.open(0)
    first = rollout.draft([row], [Entries(row.tokens)])[0]
    network.passes.clear()
    again = rollout.draft([row], [Entries([])])[0]
    assert torch.equal(first.tokens, again.tokens)
    assert all(int(positions.min()) >= len(row.tokens) for _, positions in network.passes)


@pytest.mark.parametrize("children", ["drawn", "distinct", "mixed"])
def test_children_are_drawn_from_what_the_tree_says(children):
    network, rollout = make(children, **TREES[2])
    row = OneRow([4, 5], temperature=0.7, seed=5)
    rollout.open(0)
    tree = rollout.draft([row], [Entries(row.tokens)])[0]
    assert tree.is_drawn is not None and bool(tree.is_drawn[1:].any())
    for node, path in enumerate(paths(tree)):
        below = (tree.parents == node).nonzero().flatten().tolist()
        if not below:
            continue
        q = (network.whole(row.tokens[:-1] + path) / 0.7).softmax(-1)
        if children == "mixed":  # the last child is drawn from what the first leaves
            assert tree.is_drawn[below].tolist() == [False, True]
            q[int(tree.tokens[below[0]])] = 0
            q = q / q.sum()
        assert torch.allclose(tree.draft_probs[node].double(), q, atol=1e-5)
        if children == "distinct":
            assert len(set(tree.tokens[below].tolist())) == len(below)


def test_with_the_targets_noise_the_chain_is_the_networks_own_sample():
    """Chosen children above temperature 0: a network that is the target would be right."""
    network, rollout = make(**TREES[0])
    row = OneRow([4, 5], temperature=1.0, seed=3)
    rollout.open(0)
    tree = rollout.draft([row], [Entries(row.tokens)])[0]
    tokens = list(row.tokens)
    for _ in range(4):
        logits = network.whole(tokens)[None].float()
        tokens.append(int(row.sampler.choose(logits, [len(tokens)])[0]))
    assert tree.tokens.tolist() == tokens[1:]


def test_ids_that_only_pad_the_head_are_never_drafted():
    _, rollout = make(vocab_size=9, **TREES[3])
    row = OneRow([1, 2])
    rollout.open(0)
    assert int(rollout.draft([row], [Entries(row.tokens)])[0].tokens.max()) < 9


def test_a_closed_rows_place_is_used_again_and_growth_keeps_rows():
    _, rollout = make(**TREES[0])
    rows = [OneRow([key + 1] * (300 if key == 1 else 5), key=key) for key in range(4)]
    for row in rows[:3]:
        rollout.open(row.key)
        rollout.commit(row.key, Entries(row.tokens))
    rollout.close(0)
    rollout.close(0)
    rollout.open(3)
    assert rollout.length(3) == 0 and [rollout.length(key) for key in (1, 2)] == [300, 5]
    trees = rollout.draft(rows[2:], [Entries([]), Entries(rows[3].tokens)])
    for row, tree in zip(rows[2:], trees, strict=True):
        _, alone = make(**TREES[0])
        alone.open(row.key)
        assert torch.equal(alone.draft([row], [Entries(row.tokens)])[0].tokens, tree.tokens)
