"""P-EAGLE: one pass over pairs and masked slots, its cache, its trees, its checkpoints."""

from dataclasses import fields, replace

import pytest
import torch

import slipstream
from fakes import growth, random_peagle, tiny_model, tiny_target
from made import a_peagle, stored
from published import D, L, V, eagle3, peagle, publish, speculators, write
from slipstream.drafters import peagle as drafting
from slipstream.drafters.compiled import CompiledNetwork
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import CheckpointError, DrafterMismatchError
from slipstream.formats import detect
from slipstream.formats.checkpoint import TargetFacts
from slipstream.formats.dialects import ALL
from slipstream.formats.layouts import EAGLE3, PEAGLE
from slipstream.formats.model_card import model_card
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.peagle import PEagle
from slipstream.parity.drafted import causal
from slipstream.sampling import Sampler
from slipstream.target.compiled import why_not_compiled
from slipstream.target.hf import HFTarget
from slipstream.types import DraftTree, Sampling, Verdict
from slipstream.verify.walk import walk

PROMPT = [5, 17, 3, 88, 41, 9, 60]
TEXT = [*PROMPT, *range(20, 60)]


class FakeRow:
    """A row without an engine."""

    def __init__(self, tokens, key=0, max_depth=16, max_nodes=64, **sampling):
        self.key, self.tokens = key, list(tokens)
        self.max_depth, self.max_nodes = max_depth, max_nodes
        self.sampler = Sampler(Sampling(**sampling), V)


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float64)


def features_of(target, tokens, taps=(1, 2, 3)):
    """[n - 1, K*D] of every position but the root's."""
    tree = DraftTree.chain(tokens[:-1])
    return target.forward([tree], target.new_cache(1, len(tree)), [0], taps=taps).features[0]


def opened(drafter, target, row):
    drafter.open(row, features_of(target, row.tokens))
    return row


@torch.no_grad()
def said(checkpoint, target, tokens, num_slots):
    """[n - 1 + num_slots, U] logits from scratch: every pair of the text and the slots behind."""
    model, count = checkpoint.model, len(tokens) - 1
    slots = model.mask_hidden[0].expand(num_slots, -1)
    fused = model.fuse(torch.cat([features_of(target, tokens), slots]))
    ids = torch.tensor(tokens[1:] + [model.config.mask_token] * num_slots)
    places = torch.arange(count + num_slots)
    embedded = model.embed_tokens(ids)
    return model.logits(model.step(fused[None], embedded[None], places[None], causal))[0]


def same(one, other):
    return torch.equal(one.tokens, other.tokens) and torch.equal(one.parents, other.parents)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_cached_drafting_is_the_plain_pass(target, num_layers):
    """Turn after turn, whatever was accepted, one pass says what a fresh one would say."""
    drafter = random_peagle(target, num_layers=num_layers)
    ids, mask = drafter.checkpoint.vocabulary.target_ids, drafter.checkpoint.model.config.mask_token
    row = opened(drafter, target, FakeRow(PROMPT))
    for accepted in (0, 3, 1, 0, 5):
        tree = drafter.propose([row])[0]
        expected = said(drafter.checkpoint, target, row.tokens, 4)[-5:]
        expected[:, ids == mask] = float("-inf")
        assert tree.tokens[1:].tolist() == ids[expected.argmax(-1)].tolist()
        assert torch.allclose(
            tree.log_probs[1:].double(), expected.log_softmax(-1).max(-1).values, atol=1e-5
        )
        old = len(row.tokens)
        row.tokens = TEXT[: old + accepted + 1]
        new = features_of(target, row.tokens)[old - 1 :]
        drafter.observe(row, Verdict(tuple(range(accepted + 1)), row.tokens[-1]), new)


@pytest.mark.parametrize("tree", ["chain", "best-first"])
def test_a_batch_drafts_what_each_row_drafts_alone(target, tree):
    together = random_peagle(target, tree=tree, budget=6)
    rows = [FakeRow(TEXT[: 2 + 5 * i], key=i, max_depth=1 + 2 * i) for i in range(4)]
    alone = []
    for row in rows:
        single = random_peagle(target, tree=tree, budget=6)
        alone.append(single.propose([opened(single, target, row)])[0])
        opened(together, target, row)
    for got, expected in zip(together.propose(rows), alone, strict=True):
        assert same(got, expected) and int(got.depths.max()) <= expected.budget


@pytest.mark.parametrize(("chunk", "late"), [(4, 3), (512, 1), (1, 30)])
def test_a_prompt_may_come_in_chunks(target, monkeypatch, chunk, late):
    whole, parts = random_peagle(target), random_peagle(target)
    row = opened(whole, target, FakeRow(TEXT))
    expected = whole.propose([row])[0]
    monkeypatch.setattr(drafting, "CHUNK", chunk)
    monkeypatch.setattr(drafting, "TOGETHER", late)
    got = parts.propose([opened(parts, target, row)])[0]
    assert same(got, expected) and torch.allclose(got.log_probs, expected.log_probs, atol=1e-5)


def test_the_cache_holds_verified_pairs_only(target):
    """Drafting again commits nothing and says the same, with no pair that is new."""
    drafter = random_peagle(target, num_layers=2)
    row = opened(drafter, target, FakeRow(PROMPT))
    slot, trees = drafter._slots[row.key], []
    for _ in range(3):
        trees += drafter.propose([row])
        assert drafter._cache.lengths[slot] == len(PROMPT) - 1
    assert same(trees[0], trees[1]) and same(trees[0], trees[2])
    row.max_depth = 1
    assert same(drafter.propose([row])[0], DraftTree.chain(trees[0].tokens[:2].tolist()))
    row.max_nodes = 0
    assert len(drafter.propose([row])[0]) == 1
    drafter.close(row)
    drafter.close(row)
    assert slot in drafter._free and not drafter._newest


def test_nothing_sees_what_is_behind_it(target):
    """Pairs say the same with other pairs or slots behind them, slots with more slots."""
    made, count = random_peagle(target).checkpoint, len(PROMPT) - 1
    full = said(made, target, PROMPT, 6)
    assert torch.allclose(full[: count + 2], said(made, target, PROMPT, 2), atol=1e-10)
    other = said(made, target, [*PROMPT[:-1], 77, 13], 6)
    assert torch.allclose(full[: count - 1], other[: count - 1], atol=1e-10)
    assert not torch.allclose(full[count - 1 : count + 5], other[count - 1 : count + 5], atol=1e-3)


@torch.no_grad()
def test_keys_of_pairs_do_not_depend_on_slots(target):
    few, many = (random_peagle(target, budget=depth, depth=depth) for depth in (1, 9))
    for drafter in (few, many):
        drafter.propose([opened(drafter, target, FakeRow(PROMPT))])
    for name in ("keys", "values"):
        one, two = (getattr(d._cache, name)[:, 0, :, : len(PROMPT) - 1] for d in (few, many))
        assert torch.allclose(one, two, atol=1e-10)


@torch.no_grad()
def test_pairs_of_one_layer_say_what_eagle3_says(target):
    made = random_peagle(target, num_layers=1).checkpoint
    shape = {field.name: getattr(made.model.config, field.name) for field in fields(Eagle3Config)}
    model = Eagle3(Eagle3Config(**shape)).double()
    model.load_state_dict(made.model.state_dict(), strict=False)
    embedded, places = model.embed_tokens(torch.tensor(PROMPT[1:])), torch.arange(len(PROMPT) - 1)
    states = model.fuse(features_of(target, PROMPT))
    logits = model.logits(model.step(states[None], embedded[None], places[None], causal))[0]
    assert torch.allclose(logits, said(made, target, PROMPT, 3)[:-3], atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}])
def test_the_mask_token_is_never_proposed(target, options):
    drafter = random_peagle(target, tree="best-first", budget=64, topk=64)
    mask = drafter.checkpoint.model.config.mask_token
    assert mask in drafter.checkpoint.vocabulary.target_ids.tolist()
    tree = drafter.propose([opened(drafter, target, FakeRow(PROMPT, **options))])[0]
    assert len(tree) == 65 and mask not in tree.tokens[1:].tolist()


@pytest.mark.parametrize("children", ["drawn", "distinct", "mixed"])
def test_what_is_drawn_comes_with_its_exact_q(target, children):
    drafter = random_peagle(target, budget=3, depth=3, children=children)
    row = opened(drafter, target, FakeRow(PROMPT, temperature=0.7, seed=5))
    tree, made = drafter.propose([row])[0], drafter.checkpoint
    logits = said(made, target, PROMPT, 2)[-3:]
    logits[:, made.vocabulary.target_ids == made.model.config.mask_token] = float("-inf")
    expected = torch.zeros(3, V, dtype=torch.float64)
    expected[:, made.vocabulary.target_ids] = (logits / 0.7).softmax(-1)
    assert len(tree) == 4 and bool(tree.is_drawn[1:].all())
    assert torch.allclose(tree.draft_probs[:3].double(), expected, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 4}])
def test_many_rows_and_long_rows_say_what_the_target_says(options):
    target = tiny_target()
    prompts = [[(3 * i + j) % 90 for j in range(length)] for i, length in enumerate((250, 3, 300))]
    asked = {"max_new_tokens": 24, "num_rows": 3, **options}
    expected = Engine(target, NoDrafter(), walk).generate(prompts, **asked)
    for tree in ("chain", "best-first"):
        results = Engine(target, random_peagle(target, tree=tree), walk).generate(prompts, **asked)
        assert [r.token_ids for r in results] == [r.token_ids for r in expected]


def test_a_compiled_target_has_it_compiled():
    model = tiny_model(vocab_size=96).bfloat16()
    reason = why_not_compiled(model)
    if reason is not None:
        pytest.skip(reason)
    target = HFTarget(model, decoder="compiled")
    drafter = random_peagle(target)
    assert isinstance(drafter.network, CompiledNetwork) and drafter.rests_threads
    made, plain = drafter.checkpoint, tiny_target(vocab_size=96, dtype=torch.bfloat16)
    exact = drafting.PEagleDrafter.from_model(made, plain, growth(tree="chain", budget=3, depth=3))
    features = features_of(plain, PROMPT)
    logits = []
    for each in (drafter, exact):
        row = FakeRow(PROMPT)
        each.open(row, features)
        with torch.no_grad():
            logits.append(each._draft([row])[0, :3])
    known = logits[1].isfinite()
    ours, truth = (each[known] for each in logits)
    assert float((ours - truth).norm() / truth.norm()) < 0.05
    plain = Engine(target, NoDrafter(), walk).generate(PROMPT, max_new_tokens=24)
    assert (
        Engine(target, drafter, walk).generate(PROMPT, max_new_tokens=24).token_ids
        == plain.token_ids
    )


def test_handing_normed_states_on_changes_nothing():
    """There is nobody to hand them to."""
    target, made = tiny_target(num_hidden_layers=L), a_peagle()[1]
    other = PEagle(replace(made.model.config, norm_output=True))
    other.load_state_dict(made.model.state_dict())
    one = said(made, target, PROMPT, 3)
    assert torch.equal(one, said(replace(made, model=other.eval()), target, PROMPT, 3))


CONFIG = speculators("peagle", "llama", 3) | {
    "mask_token_id": 96, "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        ({"mask_token_id": None}, {}, "config.json says no mask_token_id, expected the id that"),
        ({"mask_token_id": V}, {}, "mask token 97 has no row in an embedding of 97"),
        ({}, {"mask_hidden": torch.zeros(1, 1, 2 * D)}, r"mask_hidden is \[1, 1, 96\], config.jso"),
        ({}, {"layers.2.mlp.up_proj.weight": None}, r"missing tensors \['layers.2.mlp.up_proj"),
        ({}, {"mask_hidden": None}, r"missing tensors \['mask_hidden'\]"),
        ({}, {"fc.weight": torch.zeros(D, 5 * D)}, "3 taps"),
        ({"transformer_layer_config": CONFIG["transformer_layer_config"] | {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        }}, {}, "sliding window"),
    ],
)  # fmt: skip
def test_a_broken_checkpoint_is_named(config, tensors, says, tmp_path):
    kept = {name: t for name, t in (peagle() | tensors).items() if t is not None}
    folder = write(tmp_path / "made", CONFIG | config, kept)
    with pytest.raises(CheckpointError, match=says):
        PEAGLE.read(folder, target_layers=L)


def test_files_without_speculators_schema_are_known_by_their_mask_hidden(tmp_path):
    """As vLLM reads them: ids are taps, the mask token has one of three names."""
    config, tensors, _ = publish("vllm/peagle", torch.randn(V, D), torch.randn(V, D))
    tensors["mask_hidden"] = tensors["mask_hidden"][0]  # some leave a dimension out
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}
    del config["ptd_token_id"]
    folder = write(tmp_path / "made", config | {"pard_token": 11}, tensors)
    read = PEAGLE.read(folder).model
    assert (read.config.taps, read.config.mask_token) == ((1, 3, 7), 11)
    assert (read.config.num_layers, read.mask_hidden.shape) == (3, (1, 1, 3 * D))
    unsaid = write(tmp_path / "unsaid", config, tensors)
    with pytest.raises(CheckpointError, match="no mask_token_id"):
        PEAGLE.read(unsaid)
    with pytest.raises(CheckpointError, match=r"holds a P-EAGLE drafter.*no EAGLE-3"):
        EAGLE3.read(folder)


def test_eagle3s_files_are_no_peagles(tmp_path):
    folder = write(tmp_path / "made", CONFIG, eagle3("layers.0."))
    with pytest.raises(CheckpointError, match="missing tensors"):
        PEAGLE.read(folder)


def test_an_embedding_that_is_not_stored_is_the_targets(tmp_path):
    target = tiny_target(num_hidden_layers=L)
    tensors = peagle()
    tensors["embed_tokens.weight"] = target.embedding()
    whole = write(tmp_path / "whole", CONFIG, tensors)
    del tensors["embed_tokens.weight"]
    part = write(tmp_path / "part", CONFIG, tensors)
    trees = []
    for folder in (whole, part):
        engine = slipstream.load(target, "peagle", drafter=folder)
        trees.append([s.tree for s in engine.generate(PROMPT, max_new_tokens=9, trace=True).steps])
    assert all(same(one, two) for one, two in zip(*trees, strict=True))
    assert not PEAGLE.read(part).model.config.has_embedding


def test_another_targets_drafter_is_refused(tmp_path):
    folder = stored(a_peagle(), tmp_path / "ours")
    for changes, says in (({"vocab_size": 80}, "97, .* has 80"), ({}, "reads layer 5, .* has 4")):
        with pytest.raises(DrafterMismatchError, match=says):
            slipstream.load(tiny_target(**changes), "peagle", drafter=folder)
    with pytest.raises(CheckpointError, match="the zoo has no peagle drafter") as caught:
        slipstream.load(tiny_target(), "peagle")
    assert "train" not in caught.value.hint


@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "output_bias": True}])
def test_what_is_written_is_read(tmp_path, options):
    _, made = a_peagle(norm_each_tap=True, **options)
    read = PEAGLE.read(stored((PEAGLE, made), tmp_path / "a"))
    assert read.model.config == made.model.config
    for name, tensor in made.model.state_dict().items():
        assert torch.equal(read.model.state_dict()[name], tensor), name
    assert detect.method_of(read) == "peagle"


def test_other_engines_are_told_its_other_name(tmp_path):
    for dialect in ALL:
        if dialect.method == "peagle" and dialect.name != "slipstream":
            card = model_card(dialect, name="d", target="o/m")
            assert '"method": "eagle3", "parallel_drafting": true' in card
    made = detect.dialect_for("speculators", "peagle").dump(
        a_peagle()[1], TargetFacts("o/m", L), torch.float32
    )
    assert made.config["speculators_model_type"] == "peagle"
    assert made.config["mask_token_id"] == 96 and made.config["embed_requires_grad"]
    assert made.config["transformer_layer_config"]["num_hidden_layers"] == 2
