"""Every trainable method has a recipe that learns, is written, read back and decodes."""

import json
from dataclasses import replace

import pytest
import torch

from chats import PLAIN, byte_tokenizer
from elsewhere import Elsewhere
from fakes import tiny_model
from slipstream import assemble, methods
from slipstream.data.batches import collate
from slipstream.data.extract import extract_shards
from slipstream.data.store import Store
from slipstream.errors import DataError, SettingError
from slipstream.models.readout import Readout
from slipstream.parity.decoding import judged
from slipstream.target.hf import load_target
from slipstream.train import recipes
from slipstream.train.loop import _Together
from slipstream.train.recipes.recipe import Material

TRAINABLE = [method.name for method in methods.all() if method.is_trainable]
TEXTS = ["the quick brown fox jumps over", "a lazy dog sleeps all day long here"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer(PLAIN)
    tiny_model(
        vocab_size=261, eos_token_id=tokenizer.eos_token_id, max_position_embeddings=256
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_target(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def every_tap(target, tmp_path_factory):
    """A store of two texts that holds all hidden states."""
    folder = tmp_path_factory.mktemp("store")
    rows = [
        {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": text}]}
        for text in TEXTS
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    extract_shards(
        target, Readout(target.embedding(), target.head()), folder / "rows.jsonl",
        folder / "features", name="tiny", tokenizer=target.tokenizer,
        taps=tuple(range(target.spec.num_layers + 1)), loops="keep",
    )  # fmt: skip
    return folder / "features"


def material(target, store):
    return Material(
        name="tiny",
        num_layers=target.spec.num_layers,
        max_length=target.spec.max_length,
        shape=target.draft_shape(),
        taps=store.taps,
        readout=store.readout(),
        counts=store.supervised_counts()[: target.spec.vocab_size],
        always=(*target.spec.eos_ids, *target.tokenizer.special_ids),
        spare=target.tokenizer.spare_ids,
        layer_weights=target.layer_weights,
        final_norm=target.final_norm(),
        generator=torch.Generator().manual_seed(0),
    )


def test_every_trainable_method_has_a_recipe_and_no_other():
    assert set(recipes.RECIPES) == set(TRAINABLE)
    with pytest.raises(SettingError, match=r"ngram, expected one that is trained: .*eagle3"):
        recipes.get("ngram")


@pytest.mark.parametrize("method", TRAINABLE)
def test_one_batch_can_be_overfitted_and_decoded(method, target, every_tap, tmp_path):
    """The loss falls, the first draft becomes right, and what is written keeps the output."""
    recipe = recipes.get(method)
    has_widths = "narrow" in recipe.settings.model_fields  # narrow blocks count no prefixes
    settings = recipe.settings(**({"narrow": 0} if has_widths else {}))
    store = Store(every_tap, taps=recipe.taps(settings, target.spec.num_layers))
    checkpoint = recipe.make(material(target, store), settings)
    objective, readout = recipe.objective(checkpoint, settings), store.readout()
    batch = collate([[store[0], store[1]]], max_length=128, dtype=torch.float32)
    model = checkpoint.model.train()
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=3e-3)
    first = last = None
    for _ in range(500):
        last = objective(model, batch, readout)
        first = first or last
        if float(last.prefix_hits[0] / last.prefix_count) > 0.9:
            break
        optimizer.zero_grad()
        last.total.backward()
        optimizer.step()
    else:
        pytest.fail(f"first drafts right: {last.prefix_hits / last.prefix_count}")
    assert last is not first and bool(last.total < first.total)
    recipe.layout.write(checkpoint, tmp_path / "drafter")
    read = recipe.layout.read(tmp_path / "drafter", target_layers=target.spec.num_layers)
    assert read.model.state_dict().keys() == model.state_dict().keys()
    engine = assemble.load(target, method, drafter=tmp_path / "drafter")
    prompt = [target.tokenizer.encode("the quick")]
    plain = assemble.load(target, "none").generate(prompt, max_new_tokens=12)[0].token_ids
    assert engine.generate(prompt, max_new_tokens=12)[0].token_ids == plain


@pytest.mark.parametrize("method", TRAINABLE)
@pytest.mark.parametrize("is_training", [True, False])
def test_objectives_keep_to_the_device_of_their_data(method, is_training, target, every_tap):
    """As on a GPU: nothing that is made on the way may lie in the processor's memory."""
    recipe = recipes.get(method)
    variants = [{}]
    if "weighting" in recipe.settings.model_fields:
        variants.append({"weighting": "pace", "hard": 0.5, "rounds": 2, "is_shifted": False})
    for changes in variants:
        settings = recipe.settings(**changes)
        store = Store(every_tap, taps=recipe.taps(settings, target.spec.num_layers))
        checkpoint = recipe.make(material(target, store), settings)
        objective, readout = recipe.objective(checkpoint, settings), store.readout()
        rows = [[store[0], store[1]], [store[1]]]
        batch = collate(rows, max_length=128, dtype=torch.float32)
        with Elsewhere() as device:
            model = device.mark(checkpoint.model.train(is_training))
            device.mark(readout)
            together = _Together(model, objective, readout)
            _, loss = together(device.mark(batch))
            for value in (loss.total, loss.prefix_hits, loss.prefix_count, loss.num_supervised):
                assert device.has(value)
            here = collate(rows, max_length=128, dtype=torch.float32)
            assert device.has(judged(model, objective, here, store.readout()).total)


@pytest.mark.parametrize("method", TRAINABLE)
def test_a_target_elsewhere_can_be_started_from(method, target, every_tap):
    recipe = recipes.get(method)
    settings = recipe.settings()
    store = Store(every_tap, taps=recipe.taps(settings, target.spec.num_layers))
    given = material(target, store)
    with Elsewhere() as device:
        layers = {
            index: {name: device.mark(t.clone()) for name, t in target.layer_weights(index).items()}
            for index in range(-target.spec.num_layers, target.spec.num_layers)
        }
        norm = device.mark(given.final_norm.clone())
        there = replace(given, layer_weights=layers.__getitem__, final_norm=norm)
        moved = recipe.make(there, settings).model.state_dict()
    here = recipe.make(material(target, store), settings).model.state_dict()
    assert all(map(torch.equal, moved.values(), here.values()))


@pytest.mark.parametrize("method", TRAINABLE)
def test_network_settings_are_settings(method):
    recipe = recipes.get(method)
    assert set(recipe.network_settings) <= set(recipe.settings.model_fields)


def test_a_store_gives_the_taps_asked_for_and_names_those_it_lacks(target, every_tap):
    whole, some = Store(every_tap), Store(every_tap, taps=(3, 1))
    hidden = target.spec.hidden_size
    by_tap = whole[1].features.unflatten(-1, (-1, hidden))
    assert torch.equal(some[1].features, torch.cat([by_tap[:, 3], by_tap[:, 1]], -1))
    assert torch.equal(some[1].last_hidden, whole[1].last_hidden)
    assert Store(every_tap, taps=())[0].features.shape == (len(whole[0]), 0)
    with pytest.raises(DataError, match="taps 0,1,2,3,4, not of 7") as caught:
        Store(every_tap, taps=(2, 7))
    assert "--taps 0,1,2,3,4,7" in caught.value.hint
