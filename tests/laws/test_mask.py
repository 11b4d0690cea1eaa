"""A tree pass equals one plain pass per root path, for every architecture, tree, batch and pass.

The plain side is transformers' own model with its own eager attention, no cache and no mask of
ours. Bug reports B50, B84, B146.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch

from fakes import tiny_model
from slipstream.target.hf import HFTarget
from slipstream.trees import kinds
from slipstream.trees.mask import Layout, ancestors
from slipstream.types import DraftTree

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-one-group": ("llama", {"num_key_value_heads": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2-half-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "mistral": ("mistral", {"sliding_window": None}),
}


PASSES = ("stock", "fused")


def pair(name: str, way: str = "stock") -> tuple[HFTarget, torch.nn.Module]:
    """A target and an untouched twin with eager attention; biases are random, not zero."""
    kind, changes = MODELS[name]
    model = tiny_model(kind, **changes)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("bias"):
                value.normal_(std=0.5)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    return HFTarget(model, decoder=way), plain


def random_tree(rng: random.Random, num_nodes: int, max_depth: int, root: int) -> DraftTree:
    parents, depths = [-1], [0]
    while len(parents) < num_nodes:
        parent = rng.randrange(len(parents))
        if depths[parent] < max_depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    tokens = [root] + [rng.randrange(97) for _ in parents[1:]]
    return DraftTree(torch.tensor(tokens), torch.tensor(parents))


def path_to(tree: DraftTree, node: int) -> list[int]:
    path = [node]
    while (parent := int(tree.parents[path[-1]])) >= 0:
        path.append(parent)
    return path[::-1]


def plain_logits(plain: torch.nn.Module, texts: list[list[int]]) -> torch.Tensor:
    """[B, V] logits of each text's last token; padding on the right is not seen by it."""
    lengths = torch.tensor([len(text) for text in texts])
    padded = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = torch.tensor(text)
    with torch.no_grad():
        logits = plain(padded, use_cache=False).logits
    return logits[torch.arange(len(texts)), lengths - 1]


def node_logits(plain: torch.nn.Module, prompt: list[int], tree: DraftTree) -> torch.Tensor:
    """[N, V] logits of every node from a plain pass over the prompt and its root path."""
    paths = [path_to(tree, node) for node in range(len(tree))]
    return plain_logits(plain, [prompt + tree.tokens[path].tolist() for path in paths])


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(20))
def test_ancestors_against_walking_up(seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, rng.randint(1, 40), rng.randint(1, 40), 0)
    expected = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    for node in range(len(tree)):
        expected[node, path_to(tree, node)] = True
    assert torch.equal(ancestors(tree.parents), expected)


def test_ancestors_of_a_chain() -> None:
    for n in (1, 2, 3, 4, 5, 31, 32, 33):
        chain = DraftTree.chain(range(n))
        assert torch.equal(ancestors(chain.parents), torch.ones(n, n).tril().bool())


@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_mask_against_the_written_rule(window: int | None) -> None:
    """Entry by entry: prefix columns first, then the tree's, each by position."""
    rng = random.Random(4)
    trees = [random_tree(rng, n, 5, 0) for n in (9, 4, 1)]
    lengths = [3, 11, 7]
    layout = Layout.of(trees, lengths)
    used = max(length + len(tree) for tree, length in zip(trees, lengths, strict=True))
    mask = layout.mask(used, torch.float32, window)
    for row, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
        for node in range(len(tree)):
            position = length + int(tree.depths[node])
            for slot in range(used):
                if slot < length:
                    sees, at = True, slot
                else:
                    sees = slot - length in path_to(tree, node)
                    at = length + int(tree.depths[slot - length]) if sees else 0
                sees = sees and (window is None or position - at < window)
                assert (mask[row, node, slot] == 0) == sees, (row, node, slot)
        assert (mask[row] == 0).any(dim=1).all()  # padded nodes see something too


@pytest.mark.parametrize("way", PASSES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_tree_pass_equals_one_pass_per_path(name: str, seed: int, way: str) -> None:
    target, plain = pair(name, way)
    rng = random.Random(seed)
    prompt = [rng.randrange(97) for _ in range(rng.choice([1, 5, 14]))]
    tree = random_tree(rng, rng.randint(2, 30), 5, rng.randrange(97))
    cache = target.new_cache(1, 64)
    target.forward([DraftTree.chain(prompt)], cache, [0], last_only=True)
    cache.commit(0, range(len(prompt)))
    output = target.forward([tree], cache, [0])
    assert output.logits.shape == (1, len(tree), 97)
    assert_same(output.logits[0], node_logits(plain, prompt, tree))


@pytest.mark.parametrize("tree_kind", kinds.KINDS)
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_every_kind_of_tree_equals_one_pass_per_path(name: str, tree_kind: str) -> None:
    """As its builder grows it, with siblings, levels and nodes in its own order."""
    target, plain = pair(name, "fused")
    generator = torch.Generator().manual_seed(3)
    kind = kinds.make(tree_kind, budget=24, depth=5, topk=3)
    builder = kind.build(5, 24)
    builder.start(9)
    while builder.num_children:
        logits = 2 * torch.randn(len(builder.num_children), 97, generator=generator)
        builder.grow(*logits.log_softmax(-1).topk(kind.topk))
    tree = builder.finish()
    prompt = [5, 6, 7, 11, 2, 3]
    cache = target.new_cache(1, 64)
    target.forward([DraftTree.chain(prompt)], cache, [0], last_only=True)
    cache.commit(0, range(len(prompt)))
    output = target.forward([tree], cache, [0])
    assert_same(output.logits[0], node_logits(plain, prompt, tree))


@pytest.mark.parametrize("way", PASSES)
@pytest.mark.parametrize("name", MODELS)
def test_ragged_rows_equal_rows_alone(name: str, way: str) -> None:
    """Rows of other lengths, other trees, in any slots, padded: each as if it were alone."""
    target, plain = pair(name, way)
    rng = random.Random(7)
    prompts = [[rng.randrange(97) for _ in range(n)] for n in (13, 1, 6)]
    trees = [random_tree(rng, n, 5, rng.randrange(97)) for n in (7, 18, 1)]
    for slots in ([0, 1, 2], [3, 0, 2]):
        cache = target.new_cache(4, 40)
        chunks = [DraftTree.chain(prompt) for prompt in prompts]
        output = target.forward(chunks, cache, slots, last_only=True)
        assert_same(output.logits[:, 0], plain_logits(plain, prompts))
        for row, prompt in enumerate(prompts):
            cache.commit(slots[row], range(len(prompt)))
        output = target.forward(trees, cache, slots, taps=(0, 2, 4))
        assert torch.isfinite(output.logits).all() and torch.isfinite(output.features).all()
        for row, tree in enumerate(trees):
            expected = node_logits(plain, prompts[row], tree)
            assert_same(output.logits[row, : len(tree)], expected)


@pytest.mark.parametrize("way", PASSES)
@pytest.mark.parametrize("name", ["llama", "qwen2-half-window", "mistral-window"])
def test_chunked_prefill_equals_unchunked(name: str, way: str) -> None:
    target, plain = pair(name, way)
    rng = random.Random(1)
    prompt = [rng.randrange(97) for _ in range(40)]
    with torch.no_grad():
        expected = plain(torch.tensor([prompt]), use_cache=False).logits[0]
    for chunk in (40, 16, 7, 1):
        cache = target.new_cache(1, 40)
        logits = []
        for start in range(0, len(prompt), chunk):
            part = DraftTree.chain(prompt[start : start + chunk])
            logits.append(target.forward([part], cache, [0]).logits[0])
            cache.commit(0, range(len(part)))
        assert_same(torch.cat(logits), expected)


@pytest.mark.parametrize("way", PASSES)
def test_wide_passes_are_not_folded_and_equal(way: str) -> None:
    """Beyond the folding limit the grouped path runs; same numbers."""
    target, plain = pair("mistral-window", way)
    rng = random.Random(2)
    prompt, tree = [5, 6, 7], random_tree(rng, 80, 6, 9)
    cache = target.new_cache(1, 128)
    target.forward([DraftTree.chain(prompt)], cache, [0])
    cache.commit(0, range(3))
    output = target.forward([tree], cache, [0])
    assert_same(output.logits[0], node_logits(plain, prompt, tree))
