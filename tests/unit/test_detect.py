"""Which dialect a folder is of, pickles, shards, and relatives that are refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from published import LLAMA, D, V, dflash, eagle, eagle3, markov, publish, speculators, write
from slipstream.errors import CheckpointError
from slipstream.formats import detect, medusa
from slipstream.formats import dflash as blocks
from slipstream.formats import eagle3 as layout
from slipstream.formats.checkpoint import TargetFacts
from slipstream.train import recipes

REDUCED = LLAMA | {"draft_vocab_size": 40, "architectures": ["LlamaForCausalLMEagle3"]}
BLOCKS = LLAMA | {"num_hidden_layers": 2, "block_size": 4}
IDS = {"mask_token_id": 96, "target_layer_ids": [1, 2, 3, 4, 5]}


def test_a_pickle_is_read_as_tensors_only_and_a_conversion_offered(tmp_path):
    folder = write(tmp_path / "old", REDUCED, eagle3(), "pytorch_model.bin")
    with pytest.warns(UserWarning, match="slipstream convert --from"):
        layout.read(folder, target_layers=8)


def test_a_pickle_of_something_else_is_refused(tmp_path):
    folder = write(tmp_path / "old", REDUCED, {})
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": {"nested": 1}}, folder / "pytorch_model.bin")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="no state dict"):
        detect.detect(folder)


def test_shards_are_read_together(tmp_path):
    tensors = eagle3()
    folder = write(tmp_path / "one", REDUCED, tensors)
    expected = layout.read(folder, target_layers=8)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for part, held in parts.items():
        save_file({n: tensors[n].contiguous() for n in held}, folder / part)
    index = {"weight_map": {n: part for part, held in parts.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    read = layout.read(folder, target_layers=8)
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(read.model.state_dict()[name], tensor)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        layout.read(folder)


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        (REDUCED, lambda: eagle3() | {"mask_hidden": torch.zeros(1, 1, 3 * D)}, "P-EAGLE"),
        (REDUCED | {"eagle_config": {"use_aux_hidden_state": False}}, eagle3, "without taps"),
        (REDUCED | {"num_hidden_layers": 2}, eagle3, "several draft layers"),
        (REDUCED | {"hidden_act": "gelu"}, eagle3, "gelu MLP"),
        (REDUCED | {"mlp_bias": True}, eagle3, "biases in the MLP"),
        (REDUCED | {"quantization_config": {"bits": 8}}, eagle3, "quantised"),
        (REDUCED | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, eagle3, "'yarn'"),
        (REDUCED | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, eagle3, "RoPE"),
        (REDUCED, lambda: eagle3("midlayer.", 5), "3 taps"),
        (LLAMA | {"add_para_norm": True}, eagle, "add_para_norm"),
        (speculators("eagle", "llama") | {"layernorms": True}, eagle, "layernorms"),
        (speculators("peagle", "llama"), eagle3, "speculators peagle"),
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


def test_another_methods_drafter_is_told(tmp_path):
    folder = write(tmp_path / "made", REDUCED, eagle3())
    with pytest.raises(CheckpointError, match=r"holds an EAGLE-3 .*no Medusa") as caught:
        medusa.read(folder)
    assert "--method eagle3" in caught.value.hint


def test_a_published_folder_drafts_at_once(tmp_path):
    """A foreign folder needs no conversion: layouts read every dialect."""
    embedding, head = torch.randn(V, D), torch.randn(V, D)
    folder = write(tmp_path / "sgl", *publish("specforge/eagle3", embedding, head))
    assert layout.read(folder, target_layers=8).model.config.taps == (2, 4, 6)
    folder = write(tmp_path / "vllm", *publish("vllm/eagle3", embedding, head))
    assert layout.read(folder, target_layers=8).model.config.taps == (1, 2, 4, 5, 6)


def test_a_path_table_is_drafted_with_but_not_trained(tmp_path):
    embedding, head = torch.randn(V, D), torch.randn(V, D)
    folder = write(tmp_path / "made", *publish("deepspec/dspark", embedding, head))
    read = blocks.read(folder, target_layers=8)
    recipe = recipes.get("dspark")
    with pytest.raises(CheckpointError, match="neither trained nor examined"):
        recipe.objective(read, recipe.settings())
