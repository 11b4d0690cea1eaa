"""DFlash: the network, its cache of verified features, its blocks, its trees, its checkpoints."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from fakes import growth, random_dflash, tiny_target
from slipstream.drafters.dflash import DFlashDrafter, PathDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import CheckpointError, DrafterMismatchError, SettingError
from slipstream.formats.checkpoint import DFlashCheckpoint
from slipstream.formats.layouts import DFLASH
from slipstream.models.dflash import DFlash, DFlashConfig, choose_mask_token, default_taps
from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Sampling, Verdict
from slipstream.verify.walk import walk

PROMPT = [5, 17, 3, 88, 41, 9, 60]


class FakeRow:
    """A row without an engine."""

    def __init__(self, tokens, key=0, max_depth=16, max_nodes=64, **sampling):
        self.key, self.tokens = key, list(tokens)
        self.max_depth, self.max_nodes = max_depth, max_nodes
        self.sampler = Sampler(Sampling(**sampling), 97)


def features_of(target, tokens, taps):
    cache = target.new_cache(1, len(tokens))
    tree = DraftTree.chain(tokens)
    return target.forward([tree], cache, [0], taps=taps).features[0]


def plain_logits(drafter, target, tokens, width):
    """[J, U] by one dense pass without a cache: context, then the block, everything seen."""
    model = drafter.checkpoint.model
    anchor = len(tokens) - 1
    features = features_of(target, tokens[:-1], drafter.taps)[None]
    context = iter(model.context(model.fuse(features), torch.arange(anchor)[None]))

    def attend(q, k, v):
        text_k, text_v = next(context)
        group = q.shape[1] // k.shape[1]
        keys = torch.cat([text_k, k], 2).repeat_interleave(group, 1)
        values = torch.cat([text_v, v], 2).repeat_interleave(group, 1)
        return (q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ values

    block = model.block(torch.tensor([tokens[-1]]), width)
    states = model.denoise(target.embedding()[block], anchor + torch.arange(width)[None], attend)
    return model.read_out(states)[0] @ target.head()[drafter.checkpoint.vocabulary.target_ids].T


@pytest.mark.parametrize("is_shifted", [False, True])
def test_cached_drafting_is_the_plain_pass(is_shifted):
    """Turn after turn, whatever was accepted, the block sees what a fresh pass would see."""
    target = tiny_target(dtype=torch.float64)
    drafter = random_dflash(target, is_shifted=is_shifted)
    text = [*PROMPT, *range(20, 44)]
    row = FakeRow(PROMPT)
    drafter.open(row, features_of(target, PROMPT[:-1], drafter.taps))
    ids = drafter.checkpoint.vocabulary.target_ids
    for accepted in (0, 3, 1, 0, 2):
        tree = drafter.propose([row])[0]
        expected = plain_logits(drafter, target, row.tokens, drafter.width)
        expected[:, ids == drafter.checkpoint.model.config.mask_token] = float("-inf")
        assert tree.tokens[1:].tolist() == ids[expected.argmax(-1)].tolist()
        assert torch.allclose(
            tree.log_probs[1:].double(), expected.log_softmax(-1).max(-1).values, atol=1e-5
        )
        old = len(row.tokens)
        row.tokens = text[: old + accepted + 1]
        features = features_of(target, row.tokens[:-1], drafter.taps)[old - 1 :]
        drafter.observe(row, Verdict(tuple(range(accepted + 1)), row.tokens[-1]), features)


@pytest.mark.parametrize("tree", ["chain", "best-first"])
def test_a_batch_drafts_what_each_row_drafts_alone(tree):
    target = tiny_target(dtype=torch.float64)
    rows = [FakeRow(PROMPT[: 3 + 2 * i], key=i) for i in range(3)]
    together = random_dflash(target, tree=tree, budget=6)
    alone = []
    for row in rows:
        features = features_of(target, row.tokens[:-1], together.taps)
        together.open(row, features)
        single = random_dflash(target, tree=tree, budget=6)
        single.open(row, features)
        alone.append(single.propose([row])[0])
    for got, expected in zip(together.propose(rows), alone, strict=True):
        assert torch.equal(got.tokens, expected.tokens)
        assert torch.equal(got.parents, expected.parents)


def test_the_cache_holds_verified_features_only():
    target = tiny_target()
    drafter = random_dflash(target)
    row = FakeRow(PROMPT)
    drafter.open(row, features_of(target, PROMPT[:-1], drafter.taps))
    slot = drafter._slots[row.key]
    for _ in range(2):  # drafting again commits nothing
        drafter.propose([row])
        assert drafter._cache.lengths[slot] == len(PROMPT) - 1
    drafter.close(row)
    drafter.close(row)
    assert slot in drafter._free


def test_many_rows_and_long_rows_find_room():
    target = tiny_target()
    drafter = random_dflash(target)
    engine = Engine(target, drafter, walk)
    prompts = [[(3 * i + j) % 90 for j in range(240 + i)] for i in range(3)]
    plain = Engine(target, NoDrafter(), walk)
    expected = plain.generate(prompts, max_new_tokens=24, num_rows=3)
    results = engine.generate(prompts, max_new_tokens=24, num_rows=3)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}])
def test_the_mask_token_is_never_proposed(options):
    target = tiny_target()
    drafter = random_dflash(target, tree="best-first", budget=64, topk=64)
    mask_token = drafter.checkpoint.model.config.mask_token
    assert mask_token in drafter.checkpoint.vocabulary.target_ids.tolist()
    row = FakeRow(PROMPT, **options)
    drafter.open(row, features_of(target, PROMPT[:-1], drafter.taps))
    tree = drafter.propose([row])[0]
    assert len(tree) == 65 and mask_token not in tree.tokens[1:].tolist()


def test_a_narrower_block_drafts_fewer_and_a_wider_one_is_refused():
    target = tiny_target()
    assert random_dflash(target).width == 5
    narrow = random_dflash(target, width=3)
    row = FakeRow(PROMPT)
    narrow.open(row, features_of(target, PROMPT[:-1], narrow.taps))
    assert len(narrow.propose([row])[0]) == 3
    row.max_depth = 1
    assert len(narrow.propose([row])[0]) == 2
    row.max_nodes = 0
    assert len(narrow.propose([row])[0]) == 1
    for width in (1, 6):
        with pytest.raises(SettingError, match=f"width is {width}, expected 2..5"):
            random_dflash(target, width=width)


def conditional(drafter, target, tokens, level, parent):
    """[U] logits of a slot after its parent's token, by the plain pass."""
    logits = plain_logits(drafter, target, tokens, drafter.width)[level]
    head = target.head()[drafter.checkpoint.vocabulary.target_ids]
    model = drafter.checkpoint.model
    if model.path is not None:
        logits = logits + head @ model.path(target.embedding()[parent])
    ids = drafter.checkpoint.vocabulary.target_ids
    return logits.masked_fill(ids == model.config.mask_token, float("-inf"))


@pytest.mark.parametrize("tree", ["chain", "best-first"])
def test_with_a_path_head_a_childs_score_depends_on_its_parent(tree):
    target = tiny_target(dtype=torch.float64)
    drafter = random_dflash(target, tree=tree, budget=20, path_rank=8)
    row = FakeRow(PROMPT)
    drafter.open(row, features_of(target, PROMPT[:-1], drafter.taps))
    made = drafter.propose([row])[0]
    ids = drafter.checkpoint.vocabulary.target_ids.tolist()
    tokens, parents, depths = made.tokens.tolist(), made.parents.tolist(), made.depths.tolist()
    assert len(made) == (5 if tree == "chain" else 21)
    for node in range(1, len(made)):
        parent = parents[node]
        q = conditional(drafter, target, PROMPT, depths[node] - 1, tokens[parent]).log_softmax(-1)
        assert float(made.log_probs[node]) == pytest.approx(q[ids.index(tokens[node])].item())


@pytest.mark.parametrize("path_rank", [0, 8])
@pytest.mark.parametrize("children", ["drawn", "distinct", "mixed"])
def test_what_is_drawn_comes_with_its_exact_q(children, path_rank):
    """q is the slot's softmax after the parent's token at T, 0 outside the draft vocabulary."""
    target = tiny_target(dtype=torch.float64)
    options = {"tree": "kary", "topk": 2, "budget": 6, "children": children}
    drafter = random_dflash(target, path_rank=path_rank, **options)
    row = FakeRow(PROMPT, temperature=0.7, seed=5)
    drafter.open(row, features_of(target, PROMPT[:-1], drafter.taps))
    made = drafter.propose([row])[0]
    ids, tokens = drafter.checkpoint.vocabulary.target_ids, made.tokens.tolist()
    for node in {int(parent) for parent in made.parents[1:]}:
        logits = conditional(drafter, target, PROMPT, int(made.depths[node]), tokens[node])
        expected = torch.zeros(97, dtype=torch.float64)
        expected[ids] = (logits / 0.7).softmax(-1)
        below = (made.parents == node).nonzero()[:, 0].tolist()
        if children == "mixed":
            chosen = [tokens[child] for child in below if not made.is_drawn[child]]
            assert chosen == [int(expected.argmax())]
            expected[chosen] = 0
            expected /= expected.sum()
        else:
            assert bool(made.is_drawn[below].all())
        assert torch.allclose(made.draft_probs[node].double(), expected, atol=1e-5)
        if children != "drawn":
            assert len({tokens[child] for child in below}) == len(below)


def expected_length(tree, follows):
    """Expected accepted drafts of a tree under a Markov law over (token before, token)."""
    reach, tokens = [1.0], tree.tokens.tolist()
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        reach.append(reach[parent] * float(follows[tokens[parent], tokens[node]]))
    return sum(reach[1:])


def test_a_tree_of_paths_beats_a_tree_of_marginals(monkeypatch):
    """Four likely beginnings, each with one likely continuation: marginals mix them up."""
    target = tiny_target(dtype=torch.float64)
    root, starts = 1, torch.arange(10, 14)
    follows = torch.full((97, 97), 1e-4, dtype=torch.float64)
    follows[root, starts] = 0.25
    for depth in range(3):
        follows[starts + 10 * depth, starts + 10 * (depth + 1)] = 0.9
    follows /= follows.sum(-1, keepdim=True)
    marginals, now = [], torch.eye(97, dtype=torch.float64)[root]
    for _ in range(4):
        now = now @ follows
        marginals.append(now)
    lengths = {}
    for path_rank in (0, 4):
        drafter = random_dflash(
            target, size=97, tree="best-first", budget=8, topk=4, path_rank=path_rank
        )
        logits = torch.stack(marginals).log()[None]
        monkeypatch.setattr(drafter, "_denoise", lambda _rows, logits=logits: logits)
        monkeypatch.setattr(
            drafter.network, "after", lambda _logits, tokens: follows[tokens].log(), raising=False
        )
        row = FakeRow([5, root])
        drafter.open(row, features_of(target, [5], drafter.taps))
        lengths[path_rank] = expected_length(drafter.propose([row])[0], follows)
    assert lengths[4] > 1.5 * lengths[0]


def test_drafting_by_paths_needs_a_path_head():
    target = tiny_target()
    with pytest.raises(CheckpointError, match="no path head, which dspark needs"):
        PathDrafter.from_model(random_dflash(target).checkpoint, target, growth())
    made = random_dflash(target, path_rank=4).checkpoint
    row = FakeRow(PROMPT)
    trees = []
    for one in (made, replace_path(made)):
        drafter = DFlashDrafter.from_model(one, target, growth(tree="best-first", depth=16))
        drafter.open(row, features_of(target, PROMPT[:-1], drafter.taps))
        trees.append(drafter.propose([row])[0])
    assert torch.equal(trees[0].tokens, trees[1].tokens)  # dflash leaves the head out


def replace_path(made):
    """The same network without its path head."""
    model = DFlash(replace(made.model.config, path_rank=0))
    model.load_state_dict(made.model.state_dict(), strict=False)
    return DFlashCheckpoint(model.eval(), made.vocabulary)


def test_a_budget_may_pay_for_itself():
    """With passes that cost more by the token, fewer nodes are kept; none when none pays."""
    target = tiny_target()
    sizes = []
    for cost in (lambda _n: 1.0, lambda n: 1.0 + 0.03 * n, lambda n: n**3.0):
        drafter = random_dflash(target, tree="best-first", budget=24, cost=cost)
        row = FakeRow(PROMPT)
        drafter.open(row, features_of(target, PROMPT[:-1], drafter.taps))
        sizes.append(drafter.propose([row])[0].budget)
    assert sizes[0] == 24 > sizes[1] > sizes[2] == 0


def test_default_taps_are_one_above_the_papers_layers():
    assert default_taps(30) == (2, 9, 15, 21, 28)
    assert default_taps(36) == (2, 10, 18, 26, 34)
    assert max(default_taps(4)) == 3 and default_taps(1) == (1,)


def test_the_mask_token_never_occurs_in_text():
    assert choose_mask_token((3, 7), vocab_size=90, num_rows=96, name="x") == 90
    assert choose_mask_token((3, 7), vocab_size=96, num_rows=96, name="x") == 7
    with pytest.raises(SettingError, match="every one of the 96 ids of x may occur"):
        choose_mask_token((), vocab_size=96, num_rows=96, name="x")


@pytest.mark.parametrize("options", [{}, {"is_shifted": True}, {"size": 97}, {"path_rank": 8}])
def test_what_is_written_is_read(tmp_path, options):
    made = random_dflash(tiny_target(), **options).checkpoint
    DFLASH.write(made, tmp_path / "a", dtype=torch.float32, card={"step": 1})
    read = DFLASH.read(tmp_path / "a", target_layers=4)
    assert read.model.config == made.model.config
    assert torch.equal(read.vocabulary.target_ids, made.vocabulary.target_ids)
    for name, tensor in made.model.state_dict().items():
        assert torch.equal(read.model.state_dict()[name], tensor)


def z_lab(folder, **changes):
    """A folder as z-lab writes them: Qwen3 keys, layer ids, no maps, no extras."""
    torch.manual_seed(3)
    d, q, kv, c, wide = 48, 6, 2, 16, 64
    layer = {
        "self_attn.q_proj": (q * c, d), "self_attn.k_proj": (kv * c, d),
        "self_attn.v_proj": (kv * c, d), "self_attn.o_proj": (d, q * c),
        "self_attn.q_norm": (c,), "self_attn.k_norm": (c,),
        "mlp.gate_proj": (wide, d), "mlp.up_proj": (wide, d), "mlp.down_proj": (d, wide),
        "input_layernorm": (d,), "post_attention_layernorm": (d,),
    }  # fmt: skip
    shapes = {"fc": (d, 3 * d), "hidden_norm": (d,), "norm": (d,)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    tensors = {f"{name}.weight": 0.2 * torch.randn(shape) for name, shape in shapes.items()}
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": d,
        "intermediate_size": wide, "num_attention_heads": q, "num_key_value_heads": kv,
        "head_dim": c, "num_hidden_layers": 2, "vocab_size": 97, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "max_position_embeddings": 40960, "num_target_layers": 4,
        "block_size": 6, "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 1, 2]},
    } | changes  # fmt: skip
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def test_a_foreign_checkpoint_is_read_and_drafts(tmp_path):
    tensors = z_lab(tmp_path / "z")
    assert len(tensors) == 11 * 2 + 3
    read = DFLASH.read(tmp_path / "z", target_layers=4)
    config = read.model.config
    assert config.taps == (1, 2, 3) and config.width == 6 and config.mask_token == 96
    assert config.rope_theta == 1e6 and not config.is_shifted and read.vocabulary.is_full
    assert torch.equal(read.model.layers[1].self_attn.k_norm.weight,
                       tensors["layers.1.self_attn.k_norm.weight"])  # fmt: skip
    target = tiny_target()
    drafter = DFlashDrafter.from_checkpoint(tmp_path / "z", target, growth(tree="chain"))
    result = Engine(target, drafter, walk).generate(PROMPT, max_new_tokens=12)
    assert len(result.token_ids) == 12


def test_what_we_write_has_their_layer_ids(tmp_path):
    made = random_dflash(tiny_target(), size=97).checkpoint
    DFLASH.write(made, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [t - 1 for t in made.model.config.taps]
    del config["slipstream"]
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    assert DFLASH.read(tmp_path / "a").model.config.taps == made.model.config.taps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"mask_token_id": 97, "target_layer_ids": [0, 1, 2]}}, "mask token 97"),
        ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 1, 9]}}, "hidden state 10"),
        ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 1]}}, "fc.weight is"),
        ({"block_size": None}, "no block_size"),
        ({"block_size": 1}, "draft nothing"),
        ({"attention_bias": True}, "biases in attention"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"num_key_value_heads": 4}, "do not divide"),
        ({"num_hidden_layers": 3}, "missing tensors"),
        ({"draft_vocab_size": 50}, "no d2t map"),
    ],
)
def test_a_broken_checkpoint_is_named(tmp_path, changes, message):
    z_lab(tmp_path / "z", **changes)
    with pytest.raises(CheckpointError, match=message):
        DFLASH.read(tmp_path / "z", target_layers=4)


def test_another_targets_drafter_is_refused(tmp_path):
    z_lab(tmp_path / "z")
    with pytest.raises(DrafterMismatchError, match=r"vocabulary 97, .* has 80"):
        DFlashDrafter.from_checkpoint(tmp_path / "z", tiny_target(vocab_size=80), growth())
    with pytest.raises(CheckpointError, match="reads hidden state 3, the target has 2 layers"):
        DFlashDrafter.from_checkpoint(tmp_path / "z", tiny_target(num_hidden_layers=2), growth())


def test_another_checkpoint_is_no_dflash(tmp_path):
    z_lab(tmp_path / "z")
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "z" / "model.safetensors")
    with pytest.raises(CheckpointError, match="no DFlash drafter"):
        DFLASH.read(tmp_path / "z")


def test_random_weights_never_change_the_answer():
    target = tiny_target(dtype=torch.float64)
    model = DFlash(DFlashConfig(**target.draft_shape(), num_layers=1, draft_vocab_size=97,
                                taps=(1, 3), width=4, mask_token=0))  # fmt: skip
    vocabulary = random_dflash(target, size=97).checkpoint.vocabulary
    drafter = DFlashDrafter.from_model(
        DFlashCheckpoint(model, vocabulary), target, growth(tree="chain")
    )
    expected = Engine(target, NoDrafter(), walk).generate(PROMPT, max_new_tokens=24)
    result = Engine(target, drafter, walk).generate(PROMPT, max_new_tokens=24)
    assert result.token_ids == expected.token_ids
