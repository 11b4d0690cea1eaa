"""The walk: only the target's own token is followed, and sampled output is plain output."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import NumericError, ShapeError
from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Sampling
from slipstream.verify.walk import follow, walk

V = 6


def tree_of(parents, tokens):
    return DraftTree(torch.tensor(tokens), torch.tensor(parents))


def logits_for(tokens, vocab_size=V):
    """Rows whose argmax is the token, second place the next id."""
    logits = torch.zeros(len(tokens), vocab_size)
    for node, token in enumerate(tokens):
        logits[node, token] = 5.0
        logits[node, (token + 1) % vocab_size] = 4.9
    return logits


def table(seed, vocab_size=V):
    """A target over the last two tokens: [V, V, V] logits, most mass on few tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, vocab_size, vocab_size, generator=generator) * 1.5


def score(target, context, tree):
    """[N, V] logits of every node given the committed context (root included) and its path."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    before = [context[-2]] + [tokens[parent] for parent in parents[1:]]
    return torch.stack([target[b, t] for b, t in zip(before, tokens, strict=True)])


def plain(target, prompt, sampler, count):
    tokens = list(prompt)
    for _ in range(count):
        row = target[tokens[-2], tokens[-1]].unsqueeze(0)
        tokens.append(int(sampler.choose(row, [len(tokens)])))
    return tokens


def random_tree(root, size, generator):
    parents, tokens, used = [-1], [root], set()
    while len(tokens) < size:
        parent = int(torch.randint(len(tokens), (), generator=generator))
        token = int(torch.randint(V, (), generator=generator))
        if (parent, token) in used:
            if len(used) > 40:
                break
            continue
        used.add((parent, token))
        parents.append(parent)
        tokens.append(token)
    return tree_of(parents, tokens)


def test_a_long_branch_below_another_token_is_not_followed():
    """Report B04: sibling 1 is the argmax; sibling 2 is second and starts a matching branch."""
    tree = tree_of([-1, 0, 0, 2, 3], [0, 1, 2, 3, 4])
    logits = logits_for([1, 5, 3, 4, 5])
    kept = walk(tree, logits, Sampler(Sampling(), V), 7)
    assert kept.path == (0, 1) and kept.next_token == 5


@pytest.mark.parametrize(
    ("choices", "path", "next_token", "is_bonus"),
    [
        ([5, 0, 0, 0], (0,), 5, False),  # nothing accepted
        ([1, 5, 0, 0], (0, 1), 5, False),  # stopped inside
        ([1, 2, 5, 0], (0, 1, 2), 5, True),  # a leaf: bonus
        ([3, 0, 0, 5], (0, 3), 5, True),  # the other leaf, shallower
    ],
)
def test_path_next_token_and_bonus(choices, path, next_token, is_bonus):
    tree = tree_of([-1, 0, 1, 0], [0, 1, 2, 3])
    kept = walk(tree, logits_for(choices), Sampler(Sampling(), V), 0)
    assert (kept.path, kept.next_token, kept.is_bonus) == (path, next_token, is_bonus)


def test_a_root_alone_is_plain_decoding():
    """Report B145: nothing drafted falls back to the root's target token, without a bonus."""
    kept = walk(DraftTree.chain([3]), logits_for([4]), Sampler(Sampling(), V), 600)
    assert (kept.path, kept.next_token, kept.is_bonus) == ((0,), 4, False)


def test_of_equal_siblings_the_first_is_followed():
    tree = tree_of([-1, 0, 0, 2], [0, 1, 1, 2])
    assert walk(tree, logits_for([1, 2, 2, 0]), Sampler(Sampling(), V), 0).path == (0, 1)


def test_equal_maxima_follow_the_lowest_id():
    """Report B08: the tie rule is the sampler's, so tree and plain decoding agree."""
    logits = torch.zeros(3, V)
    logits[:, [2, 4]] = 1.0
    kept = walk(tree_of([-1, 0, 0], [0, 4, 2]), logits, Sampler(Sampling(top_p=0.5), V), 0)
    assert kept.path == (0, 2) and kept.next_token == 2


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7, seed=1),
        Sampling(temperature=1.0, top_p=0.95, seed=2),
        Sampling(temperature=2.0, top_k=4, seed=3),
    ],
    ids=str,
)
def test_output_equals_plain_output_for_any_tree(sampling):
    """Reports B06, B13: random trees of many shapes, greedy and keyed, token for token."""
    target, prompt, count = table(11), [1, 2, 3], 120
    want = plain(target, prompt, Sampler(sampling, V), count)
    for seed, size in ((0, 1), (1, 3), (2, 9), (3, 25)):
        generator = torch.Generator().manual_seed(seed)
        sampler, tokens, accepted = Sampler(sampling, V), list(prompt), 0
        while len(tokens) < len(want):
            tree = random_tree(tokens[-1], size, generator)
            kept = walk(tree, score(target, tokens, tree), sampler, len(tokens) - 1)
            tokens += [int(tree.tokens[node]) for node in kept.path[1:]] + [kept.next_token]
            accepted += kept.num_accepted
        assert tokens[: len(want)] == want
        assert (accepted > 0) == (size > 1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_single_steps_have_the_targets_law(temperature):
    """Report B10: siblings hold 90% of the mass; chi-square of 2,000 first tokens, df 5.

    20.5 is the 0.1% critical value; the seeds are fixed.
    """
    logits = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.03, 0.02]).log().repeat(4, 1)
    tree = tree_of([-1, 0, 0, 0], [5, 0, 1, 2])
    sampler = Sampler(Sampling(temperature=temperature, seed=4), V)
    counts = torch.zeros(V)
    for position in range(2000):
        kept = walk(tree, logits, sampler, position)
        token = int(tree.tokens[kept.path[1]]) if kept.num_accepted else kept.next_token
        counts[token] += 1
    expected = sampler.probs(logits[:1])[0] * 2000
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5


def test_a_node_uses_the_noise_of_its_absolute_position():
    sampler = Sampler(Sampling(temperature=1.0, seed=6), V)
    flat = torch.zeros(3, V)
    first, second, third = (int(sampler.noise(p).argmax()) for p in (11, 12, 13))
    kept = walk(DraftTree.chain([0, first, second]), flat, sampler, 10)
    assert kept.path == (0, 1, 2) and kept.next_token == third


def test_only_visited_nodes_are_asked():
    asked = []

    def choose(node):
        asked.append(node)
        return 1

    follow(tree_of([-1, 0, 0, 2], [0, 1, 2, 3]), choose)
    assert asked == [0, 1]


def test_nan_at_a_visited_node_is_an_error_and_elsewhere_is_not():
    """Report B137."""
    tree = DraftTree.chain([0, 1])
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        bad = logits_for([1, 2]) * 100
        bad[0] = float("nan")
        with pytest.raises(NumericError):
            walk(tree, bad, Sampler(sampling, V), 0)
        unreached = logits_for([3, 2]) * 100
        unreached[1] = float("nan")
        assert walk(tree, unreached, Sampler(sampling, V), 0).next_token == 3


def test_one_row_per_node():
    with pytest.raises(ShapeError, match=r"walk: logits is \[3, 6\]"):
        walk(DraftTree.chain([0, 1]), torch.zeros(3, V), Sampler(Sampling(), V), 0)
