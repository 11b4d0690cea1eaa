"""Hugging Face habits: ids with revisions, tokens, offline mode, adapters, spread-out models."""

from __future__ import annotations

import json
from types import SimpleNamespace

import huggingface_hub
import pytest

import slipstream
from fakes import tiny_model, tiny_target
from slipstream import assemble
from slipstream.errors import CheckpointError, UnsupportedTargetError
from slipstream.formats import hub
from slipstream.target import hf
from slipstream.target.hf import HFTarget, load_target
from slipstream.target.source import pinned


@pytest.mark.parametrize(
    ("source", "asked", "gives"),
    [
        ("org/model", None, ("org/model", None)),
        ("org/model@v1.2", None, ("org/model", "v1.2")),
        ("org/model@v1", "v2", ("org/model", "v2")),
        ("/a/folder", None, ("/a/folder", None)),
    ],
)
def test_an_id_may_name_its_revision(source, asked, gives):
    assert pinned(source, asked) == gives


def test_revision_and_token_reach_the_loader(monkeypatch):
    """Of the configuration, the weights and the tokenizer alike."""
    asked = []

    def seen(*args, **options):
        asked.append((args[0], options["revision"], options["token"]))
        return tiny_model().config

    def stop(*args, **options):
        seen(*args, **options)
        raise OSError("far enough")

    monkeypatch.setattr(hf.AutoConfig, "from_pretrained", seen)
    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", stop)
    with pytest.raises(CheckpointError):
        slipstream.load("org/model", "none", revision="v3", token="secret")
    assert asked == [("org/model", "v3", "secret")] * 2


def test_offline_mode_is_told():
    """The tests run with HF_HUB_OFFLINE=1."""
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set") as caught:
        load_target("nobody/nothing")
    assert "hf download nobody/nothing" in caught.value.hint


def test_a_drafter_is_fetched_by_its_id(monkeypatch, tmp_path):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = assemble.locate("org/drafter@main", "eagle3", "smollm2-135m", token="secret")
    assert found == tmp_path
    assert (asked["name"], asked["revision"], asked["token"]) == ("org/drafter", "main", "secret")
    assert not any(pattern == "*" for pattern in asked["allow_patterns"])


def test_a_drafter_that_is_nowhere_is_told():
    with pytest.raises(CheckpointError, match=r"no folder here.*HF_HUB_OFFLINE is set"):
        assemble.locate("org/drafter", "eagle3", "smollm2-135m")


def test_paths_are_no_ids(tmp_path, monkeypatch):
    """A mistyped folder beside existing ones is not asked of the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert not hub.is_id("runs/eagle")
    with pytest.raises(CheckpointError, match="is no folder, expected"):
        assemble.locate("runs/eagle", "eagle3", "smollm2-135m")


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_adapter_is_refused(is_alone, tmp_path):
    """Also beside a config.json: without peft, transformers would leave it out in silence."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    if not is_alone:
        tiny_model().config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedTargetError, match="adapter") as caught:
        load_target(str(tmp_path))
    assert "merge_and_unload" in caught.value.hint


def test_adapters_beside_the_weights_are_refused():
    model = tiny_model()
    model.peft_config = {"default": SimpleNamespace()}
    with pytest.raises(UnsupportedTargetError, match="adapters"):
        HFTarget(model)


def test_a_model_of_peft_is_refused_until_it_is_merged():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny_model(), config)
    for model in (adapted, adapted.base_model.model):
        with pytest.raises(UnsupportedTargetError, match="adapters"):
            HFTarget(model)
    assert HFTarget(adapted.merge_and_unload()).spec.num_layers == 4


def test_a_model_on_several_devices_is_refused():
    model = tiny_model()
    model.hf_device_map = {"model.embed_tokens": "cpu", "model.layers": "cuda:0"}
    with pytest.raises(UnsupportedTargetError, match="spread over cpu, cuda:0"):
        HFTarget(model)
    model.hf_device_map = {"": "cpu"}
    assert tiny_target().spec.num_layers == HFTarget(model).spec.num_layers
