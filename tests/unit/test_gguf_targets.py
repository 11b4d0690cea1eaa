"""Any GGUF file of a supported architecture is a target: it says what the model itself says."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from chats import PLAIN, byte_tokenizer
from fakes import tiny_model
from slipstream.errors import CheckpointError, UnsupportedTargetError
from slipstream.target import gguf_rope
from slipstream.target.hf import load_target
from slipstream.types import DraftTree
from tiny_gguf import ARCHITECTURES, MERGES, write_gguf

pytest.importorskip("gguf")
SIZES = {"vocab_size": 264, "hidden_size": 96, "max_position_embeddings": 128}
PROMPT = list(range(40, 60))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_file_is_a_target(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer(PLAIN, MERGES)
    # transformers takes 128, which every published Qwen3 has, whatever the file says
    sizes = SIZES | ({"head_dim": 128} if kind == "qwen3" else {})
    model = tiny_model(kind, **sizes)
    path = write_gguf(model, tokenizer, tmp_path / f"{kind}.gguf")
    target = load_target(str(path), dtype="float32", device="cpu")
    assert target.spec.architecture == type(model).__name__
    assert target.tokenizer.encode("a cab") == tokenizer.encode("a cab", add_special_tokens=False)
    said = target.forward([DraftTree.chain(PROMPT)], target.new_cache(1, 32), [0]).logits[0]
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert (said - expected[:, : said.shape[1]]).abs().max() < 1e-3 * expected.abs().max()


SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
             "beta_fast": 16.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A model and its file, both with what is asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer(PLAIN, MERGES)

    def write(rope=None, **options):
        rope = {} if rope is None else {"rope_parameters": rope | {"rope_theta": 20.0}}
        model = tiny_model("llama", **SIZES, **rope)
        return model, write_gguf(model, tokenizer, tmp_path / "llama.gguf", **options)

    return write


@pytest.mark.parametrize("name", SCALINGS)
def test_a_scaled_rope_is_read(name, written):
    """Transformers leaves it out, and the model would be another one past a few tokens."""
    model, path = written(SCALINGS[name])
    target = load_target(str(path), dtype="float32", device="cpu")
    rope = target.model.config.rope_parameters
    assert rope == model.config.rope_parameters
    prompt = [40 + place % 40 for place in range(100)]
    said = target.forward([DraftTree.chain(prompt)], target.new_cache(1, 112), [0]).logits[0]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    assert (said - expected[:, : said.shape[1]]).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("size", [64, 96, 128])
@pytest.mark.parametrize(("factor", "length"), [(8.0, 8192), (32.0, 8192), (16.0, 4096)])
def test_the_numbers_of_published_llamas_are_found_again(size, factor, length):
    """Llama 3.1's, 3.2's: from nothing but the divisors, in float32."""
    scaling = SCALINGS["llama3"] | {"factor": factor, "original_max_position_embeddings": length}
    divisors = gguf_rope.divisors_of(scaling, 5e5, size // 2).float().double()
    assert gguf_rope._of_divisors(divisors, 5e5) == scaling


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 4.0},
         "longrope by 4"),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0,
          "llama__rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier 0.1"),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0,
          "llama__rope__scaling__odd": 4.0}, "linear by 4 with odd"),
    ],
)  # fmt: skip
def test_a_scaling_that_cannot_be_read_is_refused(metadata, says, written, tmp_path):
    _, path = written(**metadata)
    with pytest.raises(UnsupportedTargetError, match=says):
        load_target(str(path))
    assert not any((tmp_path / "cache" / "slipstream").iterdir())


def test_a_scaling_that_was_tuned_for_is_read(written):
    said = {"type": "linear", "factor": 4.0, "finetuned": True}
    _, path = written(**{f"llama__rope__scaling__{key}": value for key, value in said.items()})
    rope = load_target(str(path), dtype="float32", device="cpu").model.config.rope_parameters
    assert rope["rope_type"] == "linear" and rope["factor"] == 4.0


@pytest.mark.parametrize("factor", [1.0, 0.0])
def test_a_factor_that_changes_nothing_is_none(factor, written):
    model, path = written(llama__rope__scale_linear=factor)
    rope = load_target(str(path), dtype="float32", device="cpu").model.config.rope_parameters
    assert rope == model.config.rope_parameters


def test_gemmas_scaling_is_that_of_its_full_layers(written):
    import gguf
    from transformers import Gemma3TextConfig

    _, path = written(SCALINGS["linear"])
    config = Gemma3TextConfig()
    before = dict(config.rope_parameters["sliding_attention"])
    gguf_rope.add_scaling(config, gguf.GGUFReader(path), "gemma")
    assert config.rope_parameters["full_attention"]["factor"] == 4.0
    assert config.rope_parameters["sliding_attention"] == before
    _, path = written(SCALINGS["yarn"])
    with pytest.raises(UnsupportedTargetError, match="yarn for some layers"):
        gguf_rope.add_scaling(Gemma3TextConfig(), gguf.GGUFReader(path), "gemma")


def test_a_part_of_a_model_is_refused(written, tmp_path):
    """Its other tensors were made up at random, and the model kept for good."""
    _, path = written(without="blk.1.", split__count=3, split__no=0)
    with pytest.raises(UnsupportedTargetError, match="one of 3 parts") as caught:
        load_target(str(path))
    assert "--merge" in caught.value.hint
    assert not any((tmp_path / "cache" / "slipstream").iterdir())


def test_missing_tensors_are_not_made_up(written, tmp_path):
    _, path = written(without="blk.1.ffn_up")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"):
        load_target(str(path))
    assert not any((tmp_path / "cache" / "slipstream").iterdir())


def test_an_architecture_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    import gguf

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "oddity")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"cannot read model .*oddity"):
        load_target(str(path))


def test_weights_lie_in_the_type_they_are_loaded_in(written, tmp_path):
    """What needs no conversion is not copied: the folder of a narrow type holds that type."""
    _, path = written()
    target = load_target(str(path), dtype="bfloat16", device="cpu", decoder="stock")
    (folder,) = (tmp_path / "cache" / "slipstream").glob("llama-bfloat16-*")
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    for name, weight in target.model.state_dict().items():
        if name in stored:
            assert torch.equal(weight, stored[name]), name
    wide = load_target(str(path), dtype="float32", device="cpu", decoder="stock")
    for name, weight in wide.model.state_dict().items():
        if name in stored:
            assert torch.equal(weight.bfloat16(), stored[name]), name
    assert len([*(tmp_path / "cache" / "slipstream").glob("llama-*")]) == 2
