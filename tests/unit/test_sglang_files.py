"""Our exports against what SGLang 0.5.23 reads: every tensor lands, every parameter is filled.

SGLang is silent about both, so its rules are written down here: which parameters a draft class has
for a config.json, how tensors find them, and which hidden states ids mean.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from fakes import tiny_target
from made import TAPS, L, U, V, a_dflash, a_dspark, an_eagle, an_eagle3, stored
from slipstream.errors import CheckpointError
from slipstream.parity.convert import convert

PROMPTS = [list(range(3, 33)), list(range(60, 90))]
STACKED = {
    ".q_proj": ".qkv_proj", ".k_proj": ".qkv_proj", ".v_proj": ".qkv_proj",
    ".gate_proj": ".gate_up_proj", ".up_proj": ".gate_up_proj",
}  # fmt: skip
SKIPPED = ("d2t", "t2d")  # read otherwise, or not needed


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=L)


@pytest.fixture
def sglang(target, tmp_path):
    """config.json and tensors of a drafter in a dialect that SGLang serves."""

    def export(made, dialect="specforge"):
        folder = stored(made, tmp_path / "ours")
        out = tmp_path / "out"
        convert(folder, dialect, target, out, prompts=PROMPTS)
        return json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")

    return export


def attention(config, prefix, *, qkv_bias):
    """Parameters of SGLang's Llama attention: two keys of config.json give it biases."""
    names = {f"{prefix}qkv_proj.weight", f"{prefix}o_proj.weight"}
    has_bias = config.get("attention_bias") or config.get("bias")
    names |= {f"{prefix}o_proj.bias"} if has_bias else set()
    if has_bias if qkv_bias is None else qkv_bias:
        names.add(f"{prefix}qkv_proj.bias")
    return names


def mlp(prefix):
    return {f"{prefix}gate_up_proj.weight", f"{prefix}down_proj.weight"}


def eagle3_parameters(config):
    """Of `LlamaForCausalLMEagle3`, below `model.`; the embedding is the target's."""
    count = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    names = {"fc.weight", "norm.weight", "lm_head.weight"}
    names |= {"fc.bias"} if config.get("bias") else set()
    names |= {"input_norm.weight"} if config.get("norm_before_fc") else set()
    names |= {f"fc_norm.{i}.weight" for i in range(count)} if config.get("fc_norm") else set()
    names |= {f"layers.0.{norm}.weight" for norm in
              ("input_layernorm", "hidden_norm", "post_attention_layernorm")}  # fmt: skip
    return names | attention(config, "layers.0.self_attn.", qkv_bias=False) | mlp("layers.0.mlp.")


def eagle_parameters(config):
    """Of `LlamaForCausalLMEagle`; of `Qwen2ForCausalLMEagle`, whose qkv always has a bias."""
    is_qwen = config["architectures"] == ["Qwen2ForCausalLMEagle"]
    names = {"fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight"}
    if is_qwen:
        assert config["model_type"] == "qwen2"
        names |= {"layers.0.self_attn.qkv_proj.bias"}
        config = {}
    return names | attention(config, "layers.0.self_attn.", qkv_bias=None) | mlp("layers.0.mlp.")


def dflash_parameters(config):
    """Of `DFlashDraftModel`; of `DSparkDraftModel` also its head."""
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        names |= {f"{prefix}{norm}.weight" for norm in
                  ("input_layernorm", "post_attention_layernorm",
                   "self_attn.q_norm", "self_attn.k_norm")}  # fmt: skip
        names |= {f"{prefix}self_attn.{n}_proj.weight" for n in ("qkv", "o")} | mlp(f"{prefix}mlp.")
    if config["architectures"] == ["DSparkDraftModel"]:
        names |= {f"markov_head.markov_w{i}.weight" for i in (1, 2)}
    return names


def landed(tensors):
    """Where SGLang's loaders put tensors of these names."""
    found = set()
    for name in tensors:
        if name in SKIPPED:
            continue
        name = name.replace("midlayer", "layers.0")
        for old, new in STACKED.items():
            name = name.replace(old, new)
        found.add(name)
    return found


@pytest.mark.parametrize(
    "flags",
    [{}, {"norm_features": True}, {"norm_each_tap": True, "norm_output": True}],
    ids=["plain", "norm_before_fc", "fc_norm"],
)
def test_eagle3(flags, sglang):
    layout, made = an_eagle3(**flags)
    config, tensors = sglang((layout, made))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert landed(tensors) == eagle3_parameters(config)
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert tuple(i + 1 for i in ids) == TAPS  # SGLang captures what goes into layer id + 1
    hot = tensors["d2t"] + torch.arange(U)  # absolute, as SGLang's hot_token_id
    assert torch.equal(hot, made.vocabulary.target_ids)
    assert config["draft_vocab_size"] == U and config["vocab_size"] == V
    assert config["tie_word_embeddings"] is False  # else the head is the embedding
    assert config["num_hidden_layers"] == 1 and config["eagle_config"]["use_aux_hidden_state"]
    assert config["rope_theta"] == 5e5 and config["norm_output"] is flags.get("norm_output", False)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"attention_bias": True}, "biases in attention"),
        ({"fusion_bias": True}, "bias in the layer that fuses"),
        ({"norm_before_residual": True}, "norm_before_residual"),
    ],
)
def test_what_sglang_would_skip_is_refused(flags, says, sglang):
    with pytest.raises(CheckpointError, match=says):
        sglang(an_eagle3(**flags))


@pytest.mark.parametrize("bias", [True, False])
def test_eagle1_always_fills_the_joining_layers_bias(bias, sglang):
    config, tensors = sglang(an_eagle(bias=bias))
    assert landed(tensors) == eagle_parameters(config)
    assert not config["bias"]  # else attention has biases that no tensor fills
    assert bool(tensors["fc.bias"].any()) is bias


def test_eagle1_of_a_model_with_biases_is_qwens(sglang):
    config, tensors = sglang(an_eagle(qkv_bias=True))
    assert config["architectures"] == ["Qwen2ForCausalLMEagle"]
    assert landed(tensors) == eagle_parameters(config)


def test_dflash(sglang):
    config, tensors = sglang(a_dflash(), "dflash")
    assert config["architectures"] == ["DFlashDraftModel"]
    assert landed(tensors) == dflash_parameters(config)
    assert [i + 1 for i in config["dflash_config"]["target_layer_ids"]] == [1, 3, 5]
    assert config["num_target_layers"] == L and config["block_size"] == 5
    assert config["dflash_config"]["mask_token_id"] == 96 and not config["attention_bias"]


def test_dspark(sglang):
    config, tensors = sglang(a_dspark())
    assert config["architectures"] == ["DSparkDraftModel"]
    assert landed(tensors) == dflash_parameters(config)
    assert config["dflash_config"]["markov_rank"] == 8
    assert config["dflash_config"]["projector_type"] == "dspark"
