"""Which dialect a folder is of, pickles, shards, and relatives that are refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from published import (
    LLAMA,
    D,
    V,
    dflash,
    eagle,
    eagle3,
    layer,
    markov,
    publish,
    speculators,
    write,
)
from slipstream.errors import CheckpointError
from slipstream.formats import detect
from slipstream.formats.checkpoint import TargetFacts
from slipstream.formats.layouts import DFLASH, EAGLE3, MEDUSA
from slipstream.train import recipes

REDUCED = LLAMA | {"draft_vocab_size": 40, "architectures": ["LlamaForCausalLMEagle3"]}
BLOCKS = LLAMA | {"num_hidden_layers": 2, "block_size": 4}
IDS = {"mask_token_id": 96, "target_layer_ids": [1, 2, 3, 4, 5]}
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
VLLM, SGLANG = "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"


def test_a_pickle_is_read_as_tensors_only_and_a_conversion_offered(tmp_path):
    folder = write(tmp_path / "old", REDUCED, eagle3(), "pytorch_model.bin")
    with pytest.warns(UserWarning, match="slipstream convert --from"):
        EAGLE3.read(folder, target_layers=8)


def test_a_pickle_of_something_else_is_refused(tmp_path):
    folder = write(tmp_path / "old", REDUCED, {})
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": {"nested": 1}}, folder / "pytorch_model.bin")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="no state dict"):
        detect.detect(folder)


def test_shards_are_read_together(tmp_path):
    tensors = eagle3()
    folder = write(tmp_path / "one", REDUCED, tensors)
    expected = EAGLE3.read(folder, target_layers=8)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for part, held in parts.items():
        save_file({n: tensors[n].contiguous() for n in held}, folder / part)
    index = {"weight_map": {n: part for part, held in parts.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    read = EAGLE3.read(folder, target_layers=8)
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(read.model.state_dict()[name], tensor)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        EAGLE3.read(folder)


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        (REDUCED | {"eagle_config": {"use_aux_hidden_state": False}}, eagle3, "without taps"),
        (REDUCED, lambda: eagle3("layers.0.") | layer("layers.1.", D), "has 2 draft layers"),
        (REDUCED | {"hidden_act": "gelu"}, eagle3, "gelu MLP"),
        (REDUCED | {"mlp_bias": True}, eagle3, "biases in the MLP"),
        (REDUCED | {"quantization_config": {"bits": 8}}, eagle3, "quantised"),
        (REDUCED | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, eagle3, "RoPE"),
        (REDUCED | {"hidden_size": "wide"}, eagle3, "hidden_size: input should be a valid int"),
        (REDUCED | {"eagle_config": {IDS_KEY: [1, 3, 5]}, "architectures": ["MyDraft"]}, eagle3,
         r"eagle_config.eagle_aux_hidden_state_layer_ids \[1, 3, 5\]\) under MyDraft"),
        (REDUCED | {IDS_KEY: [2, 4, 6], "eagle_config": {IDS_KEY: [2, 4, 6]}}, eagle3,
         r"twice.*\(2, 4, 6\).*\(3, 5, 7\)"),
        (REDUCED, lambda: eagle3("midlayer.", 5), "3 taps"),
        (LLAMA | {"add_para_norm": True}, eagle, "add_para_norm"),
        (speculators("eagle", "llama") | {"layernorms": True}, eagle, "layernorms"),
        (speculators("mtp", "llama"), eagle3, "speculators mtp"),
        (BLOCKS | {"dflash_config": IDS | {"causal": True}}, dflash, "causal attention"),
        (BLOCKS | {"dflash_config": IDS | {"projector_type": "domino"}}, dflash, "head of domino"),
        (BLOCKS | {"dflash_config": IDS | {"use_swa": True}}, dflash, "sliding window"),
        (BLOCKS | {"dflash_config": {"mask_token_id": 96}}, dflash, "target_layer_ids"),
        (BLOCKS | IDS | {"markov_rank": 8, "markov_head_type": "rnn"},
         lambda: dflash() | markov(), "rnn head"),
        (BLOCKS | IDS | {"markov_rank": 8}, dflash, "lacks markov_head"),
        (LLAMA, lambda: {"odd": torch.ones(1)}, "no known dialect"),
    ],
)  # fmt: skip
def test_relatives_are_refused_by_name(config, tensors, says, tmp_path):
    folder = write(tmp_path / "made", config, tensors())
    with pytest.raises(CheckpointError, match=says):
        detect.detect(folder).load(TargetFacts("tiny", 8))


@pytest.mark.parametrize(
    ("name", "prefix", "config", "taps"),
    [
        (VLLM, "layers.0.", {IDS_KEY: [1, 3, 7]}, (1, 3, 7)),  # vLLM's newer runner
        (VLLM, "layers.0.", {"eagle_config": {IDS_KEY: [1, 3, 7]}}, (1, 3, 7)),
        (VLLM, "midlayer.", {IDS_KEY: [1, 3, 7]}, (1, 3, 7)),
        (VLLM, "midlayer.", {"aux_hidden_states_layer_ids": [0, 2, 6]}, (1, 3, 7)),  # AngelSlim's
        (SGLANG, "midlayer.", {IDS_KEY: [1, 3, 7]}, (1, 3, 7)),
        (SGLANG, "midlayer.", {"eagle_config": {IDS_KEY: [0, 2, 6]}}, (1, 3, 7)),
        (SGLANG, "midlayer.", {IDS_KEY: [1, 3, 7], "eagle_config": {IDS_KEY: [0, 2, 6]}},
         (1, 3, 7)),
        (SGLANG, "midlayer.", {"eagle_config": {IDS_KEY: []}}, (2, 4, 5)),  # ModelOpt: not set
        (VLLM, "layers.0.", {IDS_KEY: None}, (2, 4, 5)),
        ("MyDraft", "midlayer.", {}, (2, 4, 5)),
    ],
)  # fmt: skip
def test_the_targets_layers_are_found_where_engines_look(name, prefix, config, taps, tmp_path):
    folder = write(tmp_path / "made", REDUCED | {"architectures": [name]} | config, eagle3(prefix))
    assert EAGLE3.read(folder, target_layers=8).model.config.taps == taps


@pytest.mark.parametrize("name", ["eagle/eagle3", "angelslim/eagle3", "speculators/eagle3"])
@pytest.mark.filterwarnings("ignore:.*is a pickle")
def test_taps_that_only_the_target_knows_are_not_guessed(name, tmp_path):
    """They were taken for those of 32 layers, and stored so."""
    folder = write(tmp_path / "made", *publish(name, torch.randn(V, D), torch.randn(V, D)))
    with pytest.raises(CheckpointError, match="names no layers of the target") as caught:
        detect.detect(folder).load()
    assert "target=" in caught.value.hint


@pytest.mark.parametrize(
    ("said", "is_shifted"),
    [
        ({"sample_from_anchor": True}, True),
        ({"sample_from_anchor": False, "shift_label": True}, False),
        ({"query_zero_predicts_next": True}, True),
        ({"shift_label": True}, True),
        ({}, False),
    ],
)
def test_a_block_says_which_token_its_slots_mean(said, is_shifted, tmp_path):
    folder = write(tmp_path / "made", BLOCKS | {"dflash_config": IDS | said}, dflash())
    assert DFLASH.read(folder, target_layers=8).model.config.is_shifted is is_shifted
    config = {key: value for key, value in said.items() if key != "shift_label"}
    if config:  # engines also look above the block
        folder = write(tmp_path / "above", BLOCKS | config | {"dflash_config": IDS}, dflash())
        assert DFLASH.read(folder, target_layers=8).model.config.is_shifted is is_shifted


def test_layers_are_counted_in_the_weights(tmp_path):
    """A published EAGLE-3 says 40, its target's, and stores one."""
    folder = write(tmp_path / "made", REDUCED | {"num_hidden_layers": 40}, eagle3())
    assert EAGLE3.read(folder, target_layers=8).model.config.taps == (2, 4, 5)


def test_draft_ids_are_counted_in_the_head(tmp_path):
    folder = write(tmp_path / "made", REDUCED | {"draft_vocab_size": None}, eagle3())
    read = EAGLE3.read(folder, target_layers=8)
    assert read.model.config.draft_vocab_size == len(read.vocabulary) == 40


@pytest.mark.parametrize("is_reduced", [True, False])
def test_a_head_that_is_not_stored_is_the_targets(is_reduced, tmp_path):
    tensors = eagle3()
    del tensors["lm_head.weight"]
    if not is_reduced:
        del tensors["d2t"], tensors["t2d"]
    folder = write(tmp_path / "made", REDUCED | {"draft_vocab_size": None}, tensors)
    head = torch.randn(V, D)
    read = detect.detect(folder).load(TargetFacts("tiny", 8, torch.randn(V, D), head))
    assert torch.equal(read.model.lm_head.weight, head[read.vocabulary.target_ids])
    assert read.vocabulary.is_full is not is_reduced
    with pytest.raises(CheckpointError, match="reads the target's, which was not given"):
        EAGLE3.read(folder, target_layers=8)
    with pytest.raises(CheckpointError, match=r"needs the target's as \[97, 48\]"):
        detect.detect(folder).load(TargetFacts("tiny", 8, None, torch.randn(V, 64)))


def test_vllms_old_nested_config_is_unwrapped(tmp_path):
    config = {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": LLAMA}
    read = detect.detect(write(tmp_path / "made", config, eagle())).load()
    assert read.model.config.hidden_size == D and read.model.config.bias


def test_another_methods_drafter_is_told(tmp_path):
    folder = write(tmp_path / "made", REDUCED, eagle3())
    with pytest.raises(CheckpointError, match=r"holds an EAGLE-3 .*no Medusa") as caught:
        MEDUSA.read(folder)
    assert "--method eagle3" in caught.value.hint


def test_a_published_folder_drafts_at_once(tmp_path):
    """A foreign folder needs no conversion: layouts read every dialect."""
    embedding, head = torch.randn(V, D), torch.randn(V, D)
    folder = write(tmp_path / "sgl", *publish("specforge/eagle3", embedding, head))
    assert EAGLE3.read(folder, target_layers=8).model.config.taps == (2, 4, 6)
    folder = write(tmp_path / "vllm", *publish("vllm/eagle3", embedding, head))
    assert EAGLE3.read(folder, target_layers=8).model.config.taps == (1, 2, 4, 5, 6)


def test_a_path_table_is_drafted_with_but_not_trained(tmp_path):
    embedding, head = torch.randn(V, D), torch.randn(V, D)
    folder = write(tmp_path / "made", *publish("deepspec/dspark", embedding, head))
    read = DFLASH.read(folder, target_layers=8)
    recipe = recipes.get("dspark")
    with pytest.raises(CheckpointError, match="neither trained nor examined"):
        recipe.objective(read, recipe.settings())
