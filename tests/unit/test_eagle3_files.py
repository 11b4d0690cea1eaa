"""EAGLE-3 folders: round trips, foreign spellings, and every way a folder can be wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fakes import tiny_target
from slipstream.errors import CheckpointError, DrafterMismatchError, OutputError
from slipstream.formats.checkpoint import Eagle3Checkpoint
from slipstream.formats.layouts import EAGLE3
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.vocabulary import DraftVocabulary

V, U, D = 97, 40, 48


@pytest.fixture
def made():
    torch.manual_seed(0)
    config = Eagle3Config(D, 64, 6, 2, 16, V, U, (1, 2, 3), D, 1e-5, 5e5, None, 256)
    return Eagle3Checkpoint(Eagle3(config), DraftVocabulary(torch.randperm(V)[:U].sort().values, V))


@pytest.fixture
def folder(made, tmp_path):
    EAGLE3.write(made, tmp_path / "drafter", card={"method": "eagle3"}, dtype=torch.float32)
    return tmp_path / "drafter"


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors")


def test_round_trip_is_the_identity(made, folder, tmp_path):
    again = EAGLE3.read(folder)
    assert again.model.config == made.model.config
    assert torch.equal(again.vocabulary.target_ids, made.vocabulary.target_ids)
    for name, tensor in made.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    EAGLE3.write(again, tmp_path / "second", dtype=torch.float32)
    first, second = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_the_map_is_stored_as_offsets(made, folder):
    tensors = load_file(folder / "model.safetensors")
    ids = torch.arange(U) + tensors["d2t"]
    assert torch.equal(ids, made.vocabulary.target_ids)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)


def test_nothing_random_is_exported(made, folder):
    """Every stored tensor equals the one in memory; the embedding is absent (B81)."""
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == {*made.model.state_dict(), "d2t", "t2d"}


def test_other_spellings_are_read(made, folder):
    """`layers.0.`, a `model.` prefix, a stored embedding, nested rope keys (B67, B84)."""

    def respell(tensors):
        for name in list(tensors):
            if name.startswith("midlayer."):
                other = "model.layers.0." + name.removeprefix("midlayer.")
                tensors[other] = tensors.pop(name).clone()
        tensors["embed_tokens.weight"] = torch.zeros(V, D)

    edit_tensors(folder, respell)
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    edit_config(folder, rope_theta=None, rope_parameters=rope)
    again = EAGLE3.read(folder)
    assert again.model.config == made.model.config
    assert torch.equal(again.model.frequencies, made.model.frequencies)


def test_official_files_without_taps_get_the_papers(folder):
    edit_config(folder, slipstream=None, eagle_config=None)
    assert EAGLE3.read(folder, target_layers=30).model.config.taps == (2, 15, 27)


def test_full_vocabulary_needs_no_map(tmp_path):
    model = Eagle3(Eagle3Config(D, 64, 6, 2, 16, V, V, (1, 2, 3), D))
    EAGLE3.write(Eagle3Checkpoint(model, DraftVocabulary.full(V)), tmp_path / "full")
    assert "d2t" not in load_file(tmp_path / "full" / "model.safetensors")
    assert EAGLE3.read(tmp_path / "full").vocabulary.is_full


def test_the_first_ids_are_a_map_where_t2d_says_so(tmp_path):
    """Of a target with more rows than ids, a drafter of all ids has offsets of zero."""
    first = DraftVocabulary(torch.arange(U), V)
    again = DraftVocabulary.from_files(first.offsets(), first.mask(), V)
    assert torch.equal(again.target_ids, first.target_ids) and not again.is_full


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: edit_tensors(f, lambda t: t.pop("fc.weight")), r"missing tensors \['fc"),
        (lambda f: edit_tensors(f, lambda t: t.update(extra=torch.ones(1))), r"unknown.*extra"),
        (lambda f: edit_tensors(f, lambda t: t.update(d2t=torch.zeros(U).long() - torch.arange(U))),
         "ascending"),
        (lambda f: edit_tensors(f, lambda t: (t.update(d2t=torch.zeros(U).long()), t.pop("t2d"))),
         "d2t is all zero"),
        (lambda f: edit_tensors(f, lambda t: (t.update(d2t=t["d2t"][:-1]), t.pop("t2d"))),
         "d2t maps 39 ids, the drafter says 40"),
        (lambda f: edit_tensors(f, lambda t: t.update(t2d=torch.zeros(V).bool())), "t2d"),
        (lambda f: edit_tensors(f, lambda t: (t.pop("d2t"), t.pop("t2d"))), "no d2t"),
        (lambda f: edit_config(f, hidden_size=64), "fc.weight|config.json says"),
        (lambda f: edit_config(f, intermediate_size=65), "mlp.*config.json says"),
        (lambda f: edit_config(f, draft_vocab_size=U - 1), "d2t maps 40 ids, the drafter says 39"),
        (lambda f: edit_config(f, num_key_value_heads=4), "divide"),
        (lambda f: edit_config(f, vocab_size=None), "cannot be read: vocab_size: field required"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "neither"),
        (lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-100]), "truncated"),
        (lambda f: edit_tensors(f, lambda t: [t.pop(k) for k in list(t) if "midlayer" in k]),
         "no EAGLE-3"),
    ],
)  # fmt: skip
def test_a_wrong_folder_is_refused_with_the_reason(folder, spoil, says):
    spoil(folder)
    with pytest.raises(CheckpointError, match=says):
        EAGLE3.read(folder)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        EAGLE3.read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 98}, "vocabulary 97.*has 98"),
        ({"hidden_size": 96}, "hidden size 48.*has 96"),
        ({"num_hidden_layers": 2}, "reads layer 3.*has 2"),
    ],
)
def test_another_target_is_refused(made, changes, says):
    EAGLE3.check_target(made, tiny_target())
    with pytest.raises(DrafterMismatchError, match=says):
        EAGLE3.check_target(made, tiny_target(**changes))


def test_an_existing_folder_is_kept(made, folder):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(OutputError, match="exists"):
        EAGLE3.write(made, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    EAGLE3.write(made, folder, overwrite=True)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["drafter"]


def test_an_unwritable_place_leaves_nothing(made, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        EAGLE3.write(made, tmp_path / "file" / "drafter")
