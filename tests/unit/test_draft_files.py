"""Folders of draft language models and Medusa heads: round trips, official files, wrong files."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fakes import tiny_target
from slipstream.errors import CheckpointError, DrafterMismatchError, OutputError
from slipstream.formats.checkpoint import LanguageCheckpoint, MedusaCheckpoint
from slipstream.formats.detect import is_own_language_model
from slipstream.formats.layouts import LANGUAGE, MEDUSA
from slipstream.models.language import Language, LanguageConfig
from slipstream.models.medusa import Medusa, MedusaConfig
from slipstream.models.vocabulary import DraftVocabulary

V, U, D = 97, 40, 48


def vocabulary(size=U):
    return DraftVocabulary(torch.randperm(V)[:size].sort().values, V)


def a_language():
    return LanguageCheckpoint(
        Language(LanguageConfig(D, 64, 2, 6, 2, 16, V, U, 1e-5, 5e5, None, 256)), vocabulary()
    )


def borrowing_heads():
    return MedusaCheckpoint(Medusa(MedusaConfig(D, 3, 2, V, U, True)), vocabulary())


def own_heads():
    return MedusaCheckpoint(Medusa(MedusaConfig(D, 2, 1, V, V, False)), DraftVocabulary.full(V))


MADE = [(LANGUAGE, a_language), (MEDUSA, borrowing_heads), (MEDUSA, own_heads)]


@pytest.fixture(params=MADE, ids=lambda pair: pair[1].__name__)
def stored(request, tmp_path):
    """A layout, what was written in it, and where."""
    torch.manual_seed(0)
    layout, make = request.param
    made = make()
    layout.write(made, tmp_path / "drafter", card={"method": "any"}, dtype=torch.float32)
    return layout, made, tmp_path / "drafter"


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors")


def drop_one(tensors):
    del tensors[next(name for name in tensors if name.endswith("weight"))]


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_round_trip_is_the_identity(stored):
    layout, made, folder = stored
    again = layout.read(folder, target_layers=4)
    assert again.model.config == made.model.config
    assert torch.equal(again.vocabulary.target_ids, made.vocabulary.target_ids)
    for name, tensor in made.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    assert json.loads((folder / "card.json").read_text()) == {"method": "any"}


def test_an_existing_folder_is_kept_unless_told_otherwise(stored):
    layout, made, folder = stored
    with pytest.raises(OutputError, match="exists"):
        layout.write(made, folder)
    layout.write(made, folder, overwrite=True)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["drafter"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: edit_tensors(f, lambda t: t.update(extra=torch.ones(1))), "unknown.*extra"),
        (lambda f: edit_tensors(f, drop_one), "missing tensors"),
        (lambda f: edit_config(f, hidden_size=64), "config.json says"),
        (lambda f: edit_config(f, hidden_size=None), "cannot be read"),
        (lambda f: edit_config(f, model_type="llama"), "cannot be read|no known dialect"),
        (lambda f: (f / "model.safetensors").unlink(), "neither"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-100]), "truncated"),
    ],
)  # fmt: skip
def test_a_wrong_folder_is_refused_with_the_reason(stored, spoil, says):
    layout, _, folder = stored
    spoil(folder)
    with pytest.raises(CheckpointError, match=says):
        layout.read(folder)


@pytest.mark.parametrize("make", [a_language, borrowing_heads])
def test_a_reduced_vocabulary_needs_its_map(make, tmp_path):
    layout = LANGUAGE if make is a_language else MEDUSA
    layout.write(make(), tmp_path / "drafter")
    edit_tensors(tmp_path / "drafter", lambda t: (t.pop("d2t"), t.pop("t2d")))
    with pytest.raises(CheckpointError, match="no d2t map"):
        layout.read(tmp_path / "drafter")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 98}, "vocabulary 97.*has 98"),
        ({"hidden_size": 96}, "hidden size 48.*has 96"),
    ],
)
def test_another_target_is_refused(stored, changes, says):
    layout, made, _ = stored
    layout.check_target(made, tiny_target())
    with pytest.raises(DrafterMismatchError, match=says):
        layout.check_target(made, tiny_target(**changes))


def test_only_our_own_language_models_are_ours(tmp_path):
    LANGUAGE.write(a_language(), tmp_path / "ours")
    assert is_own_language_model(tmp_path / "ours")
    (tmp_path / "other").mkdir()
    assert not is_own_language_model(tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    assert not is_own_language_model(tmp_path / "other")


def official(folder, tensors, *, suffix=".pt"):
    folder.mkdir()
    (folder / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    if suffix == ".pt":
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


def official_tensors(num_heads, *, own=True):
    tensors = {}
    for head in range(num_heads):
        tensors[f"{head}.0.linear.weight"] = torch.randn(D, D)
        tensors[f"{head}.0.linear.bias"] = torch.randn(D)
        if own:
            tensors[f"{head}.1.weight"] = torch.randn(V, D)
    return tensors


def test_official_heads_are_counted_not_believed(tmp_path):
    """Published configs say 2 heads, the weights hold 5."""
    tensors = official_tensors(5)
    read = MEDUSA.read(official(tmp_path / "medusa", tensors))
    assert read.model.config == MedusaConfig(D, 5, 1, V, V, False)
    assert read.vocabulary.is_full and read.vocabulary.target_size == V
    hidden = torch.randn(D)
    for head in range(5):
        inner = tensors[f"{head}.0.linear.weight"] @ hidden + tensors[f"{head}.0.linear.bias"]
        expected = tensors[f"{head}.1.weight"] @ (hidden + torch.nn.functional.silu(inner))
        assert torch.allclose(read.model.logits(hidden)[head], expected, atol=1e-4)


def test_official_blocks_alone_borrow_the_targets_head(tmp_path):
    folder = official(tmp_path / "v2", official_tensors(3, own=False), suffix=".safetensors")
    read = MEDUSA.read(folder)
    assert read.model.config == MedusaConfig(D, 3, 1, None, None, True)
    assert read.vocabulary is None
    with pytest.raises(CheckpointError, match="do not say how many ids"):
        MEDUSA.write(read, tmp_path / "again")


def test_official_heads_survive_our_layout(tmp_path):
    read = MEDUSA.read(official(tmp_path / "medusa", official_tensors(2)))
    MEDUSA.write(read, tmp_path / "ours", dtype=torch.float32)
    again = MEDUSA.read(tmp_path / "ours").model.state_dict()
    assert all(torch.equal(t, again[name]) for name, t in read.model.state_dict().items())


class Planted:
    """What a pickle must never run."""

    def __reduce__(self):
        return (print, ("ran",))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"weights": torch.ones(2)}, "no tensors named 0.0.linear.weight"),
        ({"0.0.linear.weight": Planted()}, "cannot be read"),
        (official_tensors(2) | {"2.0.linear.weight": torch.ones(D, D)}, "missing tensors"),
    ],
)
def test_wrong_official_files_are_refused_and_no_code_runs(tmp_path, content, says, capsys):
    with pytest.raises(CheckpointError, match=says):
        MEDUSA.read(official(tmp_path / "medusa", content))
    assert "ran" not in capsys.readouterr().out
