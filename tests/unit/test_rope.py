"""RoPE of drafters: both spellings, every scaling, the same numbers as transformers computes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fakes import tiny_target
from made import D, L, a_dflash, an_eagle, an_eagle3, stored
from published import LLAMA, write
from published import eagle3 as tensors
from slipstream.errors import CheckpointError
from slipstream.formats import detect
from slipstream.formats.layouts import EAGLE3
from slipstream.models.blocks import attention_factor, inverse_frequencies, rotate
from slipstream.parity.convert import convert

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "linear": LINEAR,
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, all told": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5},
    "yarn, DeepSeek's": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False},
    "yarn, narrow": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
}
REDUCED = LLAMA | {"draft_vocab_size": 40, "architectures": ["LlamaForCausalLMEagle3"]}


def of_transformers(scaling, theta=5e5, size=16):
    """Frequencies and factor."""
    config = LlamaConfig(
        hidden_size=6 * size, num_attention_heads=6, head_dim=size, max_position_embeddings=512,
        rope_parameters=scaling | {"rope_theta": theta},
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("size", [16, 64, 128])
def test_frequencies_are_those_of_transformers(name, size):
    scaling = SCALINGS[name]
    expected, factor = of_transformers(scaling, size=size)
    ours = inverse_frequencies(size, 5e5, scaling)
    assert torch.allclose(ours, expected, rtol=1e-6, atol=0)
    if "yarn" in name:
        assert torch.equal(ours, expected)
    assert attention_factor(scaling) == factor
    assert not torch.allclose(ours, inverse_frequencies(size, 5e5, None))


def test_yarn_turns_and_stretches():
    """Scores of queries and keys grow by the factor's square."""
    x, positions = torch.randn(1, 2, 5, 16), torch.arange(5)[None]
    frequencies = inverse_frequencies(16, 1e4, YARN)
    plain = rotate(x, positions, frequencies)
    assert torch.allclose(rotate(x, positions, frequencies, 1.5), 1.5 * plain, atol=1e-6)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("is_new", [True, False])
def test_both_spellings_are_read_the_same_to_the_last_bit(name, is_new, tmp_path):
    """B64, B67: theta and scaling at the top, or in one rope_parameters."""
    scaling = SCALINGS[name]
    said = (
        {"rope_parameters": scaling | {"rope_theta": 5e5}}
        if is_new
        else {"rope_theta": 5e5, "rope_scaling": scaling}
    )
    read = EAGLE3.read(write(tmp_path / "made", REDUCED | said, tensors()), target_layers=8)
    assert torch.equal(read.model.frequencies, inverse_frequencies(16, 5e5, scaling))
    EAGLE3.write(read, tmp_path / "again")
    again = EAGLE3.read(tmp_path / "again")
    assert torch.equal(again.model.frequencies, read.model.frequencies)
    assert again.model.config.rope_scaling == read.model.config.rope_scaling


@pytest.mark.parametrize("to", ["eagle", "specforge", "vllm", "speculators", "angelslim"])
@pytest.mark.parametrize("name", SCALINGS)
def test_a_scaling_travels(to, name, tmp_path):
    """B64: frequencies equal to the last bit, with proof on real features."""
    target = tiny_target(num_hidden_layers=L)
    folder = stored(an_eagle3(rope_scaling=SCALINGS[name]), tmp_path / "ours")
    convert(folder, to, target, tmp_path / "out", prompts=[list(range(3, 33))])
    before, after = (EAGLE3.read(tmp_path / at, target_layers=L) for at in ("ours", "out"))
    assert torch.equal(before.model.frequencies, after.model.frequencies)
    assert attention_factor(after.model.config.rope_scaling) == attention_factor(SCALINGS[name])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config = config.get("transformer_layer_config", config)
    assert config["rope_scaling"]["rope_type"] == SCALINGS[name]["rope_type"]


@pytest.mark.parametrize("make", [an_eagle3, an_eagle, a_dflash])
def test_yarns_factor_is_felt_by_every_network(make):
    """Its attention is that of a network whose queries and keys are longer by the factor."""
    _, made = make(rope_scaling=YARN | {"attention_factor": 1.0})
    _, other = make(rope_scaling=YARN | {"attention_factor": 2.0})
    other.model.load_state_dict(made.model.state_dict())
    positions, seen = torch.arange(3)[None], []

    def attend(q, k, v):
        seen.append((q, k))
        return torch.zeros_like(q)

    for model in (made.model, other.model):
        x = torch.ones(1, 3, D)
        if hasattr(model, "denoise"):
            model.denoise(x, positions, attend)
            assert torch.isfinite(model.context(x, positions)[0][0]).all()
        else:
            model.step(x, x, positions, attend)
    half = len(seen) // 2
    for one, two in zip(seen[:half], seen[half:], strict=True):
        assert all(torch.allclose(2 * a, b, rtol=1e-5) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "scales RoPE by 'longrope', expected one of"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' and says no factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
         "no low_freq_factor and no high_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None}}, "'yarn' and says no factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "part of a head"),
        ({"partial_rotary_factor": 0.5}, "part of a head"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differ by kind of layer"),
    ],
)  # fmt: skip
def test_what_cannot_be_turned_is_refused_by_name(config, says, tmp_path):
    folder = write(tmp_path / "made", REDUCED | config, tensors())
    with pytest.raises(CheckpointError, match=says):
        detect.detect(folder).load()


def test_the_original_length_may_stand_elsewhere(tmp_path):
    """As transformers: at the top, else the longest text of the config."""
    short = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    for name, more, length in (("top", {"original_max_position_embeddings": 128}, 128),
                               ("none", {}, 512)):  # fmt: skip
        folder = write(tmp_path / name, REDUCED | more | {"rope_scaling": short}, tensors())
        read = EAGLE3.read(folder, target_layers=8).model.config
        expected = replace(read, rope_scaling=short | {"original_max_position_embeddings": length})
        assert read == expected
