"""`PretrainedDrafter`: any dialect in and out, the hub's arguments, the model card."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
import torch

import slipstream
from fakes import tiny_target
from made import U, a_dflash, an_eagle, an_eagle3, heads, stored
from slipstream.errors import CheckpointError, OutputError, UnknownNameError
from slipstream.formats.detect import dialect_for
from slipstream.formats.model_card import model_card


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=8)


def same(one, other):
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(t, theirs[k]) for k, t in ours.items())


@pytest.mark.parametrize(
    ("make", "dialect"),
    [(an_eagle3, "vllm"), (an_eagle, "specforge"), (heads, "vllm"), (a_dflash, "speculators")],
)
def test_out_and_in_again(make, dialect, target, tmp_path):
    folder = stored(make(), tmp_path / "ours", card={"tau": 2.0})
    read = slipstream.PretrainedDrafter.from_pretrained(folder, target=target)
    assert read.dialect == "slipstream" and read.card == {"tau": 2.0} and len(read.vocabulary) == U
    place = tmp_path / "theirs"
    read.save_pretrained(place, dialect=dialect, target=target, dtype=torch.float32)
    again = slipstream.PretrainedDrafter.from_pretrained(place, target=target)
    assert (again.dialect, again.method) == (dialect, read.method)
    assert again.card == {"tau": 2.0} and again.readme.startswith("---\n")


def test_our_own_folder_needs_no_target_and_keeps_changes(tmp_path):
    read = slipstream.PretrainedDrafter.from_pretrained(stored(an_eagle3(), tmp_path / "ours"))
    with torch.no_grad():
        read.model.fc.weight.add_(1)
    read.save_pretrained(tmp_path / "changed", dtype=torch.float32)
    assert same(read, slipstream.PretrainedDrafter.from_pretrained(tmp_path / "changed"))


def test_mistakes_are_told(target, tmp_path):
    read = slipstream.PretrainedDrafter.from_pretrained(stored(an_eagle3(), tmp_path / "ours"))
    with pytest.raises(CheckpointError, match="for which target") as caught:
        read.save_pretrained(tmp_path / "x", dialect="vllm")
    assert "target=" in caught.value.hint
    with pytest.raises(UnknownNameError, match="no dialect 'sglang'"):
        read.save_pretrained(tmp_path / "x", dialect="sglang", target=target)
    with pytest.raises(OutputError, match="exists"):
        read.save_pretrained(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="only local files"):
        slipstream.PretrainedDrafter.from_pretrained("org/drafter", local_files_only=True)
    assert not (tmp_path / "x").exists()


def test_the_hubs_arguments_arrive(tmp_path, monkeypatch):
    asked = {}
    folder = stored(an_eagle3(), tmp_path / "ours")

    def download(name, **options):
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    slipstream.PretrainedDrafter.from_pretrained("org/drafter@v1", revision="v2", token="secret")
    assert (asked["name"], asked["revision"], asked["token"]) == ("org/drafter", "v2", "secret")
    assert asked["local_files_only"] is False


@pytest.mark.parametrize(
    ("dialect", "method", "says"),
    [
        ("vllm", "eagle3", '"method": "eagle3"'),
        ("specforge", "eagle3", "--speculative-algorithm EAGLE3"),
        ("medusa", "medusa", "the layout of FasterDecoding/Medusa"),
    ],
)
def test_a_card_says_how_to_serve(dialect, method, says):
    card = model_card(dialect_for(dialect, method), name="mine", target="org/model")
    assert says in card and "base_model: org/model\n" in card and f"- {method}\n" in card
    assert "--drafter mine" in card


def test_a_card_keeps_what_was_written():
    way = dialect_for("vllm", "eagle3")
    assert model_card(way, name="d", target="/a/folder", readme="# Mine\n").endswith("# Mine\n")
    assert "base_model" not in model_card(way, name="d", target="/a/folder")
    tagged = "---\ntags: [x]\n---\n# Mine\n"
    assert model_card(way, name="d", target="o/m", readme=tagged) == tagged


def test_a_conversion_without_a_readme_gets_a_card(target, tmp_path):
    from slipstream.parity.convert import convert

    folder = stored(an_eagle3(), tmp_path / "ours")
    convert(
        folder, "vllm", target, tmp_path / "out",
        prompts=[list(range(3, 33))], target_name="org/model",
    )  # fmt: skip
    text = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: org/model" in text and "vllm serve org/model" in text
    assert json.loads((tmp_path / "out" / "card.json").read_text())["conversion"]["to"] == "vllm"
