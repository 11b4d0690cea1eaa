"""EAGLE-1 folders: round trips, foreign spellings, and every way a folder can be wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fakes import tiny_target
from slipstream.errors import CheckpointError, DrafterMismatchError
from slipstream.formats.checkpoint import EagleCheckpoint
from slipstream.formats.layouts import EAGLE
from slipstream.models.eagle import Eagle, EagleConfig
from slipstream.models.vocabulary import DraftVocabulary

V, U, D = 97, 40, 48


def make(**changes):
    torch.manual_seed(0)
    config = EagleConfig(D, 64, 6, 2, 16, V, U, 1e-5, 5e5, None, 256, **changes)
    return EagleCheckpoint(Eagle(config), DraftVocabulary(torch.randperm(V)[:U].sort().values, V))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors")


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"qkv_bias": True}])
def test_round_trip_is_the_identity(changes, tmp_path):
    made = make(**changes)
    EAGLE.write(made, tmp_path / "drafter", card={"method": "eagle"}, dtype=torch.float32)
    again = EAGLE.read(tmp_path / "drafter")
    assert again.model.config == made.model.config
    assert torch.equal(again.vocabulary.target_ids, made.vocabulary.target_ids)
    for name, tensor in made.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name


def test_tensors_have_the_authors_names_and_nothing_of_the_target(tmp_path):
    EAGLE.write(make(), tmp_path / "drafter")
    layer = "layers.0."
    assert set(load_file(tmp_path / "drafter" / "model.safetensors")) == {
        "fc.weight", "fc.bias", "d2t", "t2d",
        *(f"{layer}self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"{layer}mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        f"{layer}post_attention_layernorm.weight",
    }  # fmt: skip


def test_the_authors_files_are_read(tmp_path):
    """A full vocabulary, a stored embedding, a prefix, no rope keys, no bias."""
    folder = tmp_path / "drafter"
    EAGLE.write(make(bias=False), folder, dtype=torch.float32)

    def respell(tensors):
        del tensors["d2t"], tensors["t2d"]
        for name in list(tensors):
            tensors["model." + name] = tensors.pop(name)
        tensors["model.embed_tokens.weight"] = torch.zeros(V, D)

    edit_tensors(folder, respell)
    edit_config(folder, draft_vocab_size=None, rope_theta=None, bias=None)
    read = EAGLE.read(folder)
    assert read.vocabulary.is_full and not read.model.config.bias
    assert read.model.config.rope_theta == 10000.0


@pytest.mark.parametrize(
    ("change", "config", "told"),
    [
        (lambda t: t.pop("fc.weight"), {}, r"missing tensors \['fc.weight'\]"),
        (lambda t: t.update(other=torch.zeros(1)), {}, r"unknown tensors \['other'\]"),
        (lambda t: t.update({"norm.weight": torch.ones(D)}), {}, "no EAGLE-1 drafter"),
        (lambda t: t.pop("layers.0.self_attn.q_proj.weight"), {}, "no EAGLE-1 drafter"),
        (lambda t: t.pop("d2t"), {}, "no d2t map"),
        (lambda t: None, {"num_hidden_layers": 2}, "2 draft layers"),
        (lambda t: None, {"intermediate_size": 65}, "config.json says"),
        (lambda t: None, {"hidden_size": None}, "config.json cannot be read"),
    ],
)
def test_broken_folders_say_what_is_wrong(change, config, told, tmp_path):
    folder = tmp_path / "drafter"
    EAGLE.write(make(), folder)
    edit_tensors(folder, change)
    edit_config(folder, **config)
    with pytest.raises(CheckpointError, match=told):
        EAGLE.read(folder)


@pytest.mark.parametrize(
    ("changes", "told"), [({"vocab_size": 98}, "vocabulary 97"), ({"hidden_size": 96}, "size 48")]
)
def test_another_target_is_refused(changes, told):
    EAGLE.check_target(make(), tiny_target())
    with pytest.raises(DrafterMismatchError, match=told):
        EAGLE.check_target(make(), tiny_target(**changes))
