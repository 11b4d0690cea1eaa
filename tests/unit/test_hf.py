"""`HFTarget`: taps, greedy decoding against transformers, vocabularies, refusals, loading.

Bug reports B03, B44, B50, B66, B77, B84, B86, B87, B137.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers

from fakes import tiny_model, tiny_target
from slipstream.errors import (
    CheckpointError,
    NumericError,
    SettingError,
    UnknownNameError,
    UnsupportedTargetError,
)
from slipstream.target.facts import LogitRule
from slipstream.target.hf import HFTarget, load_target
from slipstream.target.packed import PackedLinear, can_pack
from slipstream.target.support import check_supported
from slipstream.types import DraftTree

KINDS = ("llama", "qwen2", "qwen3", "mistral")
TOKENS = torch.randint(0, 97, (3, 21), generator=torch.Generator().manual_seed(5))


def decode(target: HFTarget, prompt: list[int], num_tokens: int) -> list[int]:
    """Plain greedy decoding over a slot cache."""
    cache, chunk, answer = target.new_cache(1, 128), prompt, []
    for _ in range(num_tokens):
        logits = target.forward([DraftTree.chain(chunk)], cache, [0], last_only=True).logits
        cache.commit(0, range(len(chunk)))
        chunk = [int(logits[0, -1].argmax())]
        answer += chunk
    return answer


@pytest.mark.parametrize("kind", [*KINDS, "window"])
def test_greedy_equals_transformers_generate(kind: str) -> None:
    changes = {"sliding_window": 8} if kind == "window" else {}
    model = tiny_model("mistral" if kind == "window" else kind, **changes)
    prompt = TOKENS[0, :12].tolist()
    expected = copy.deepcopy(model).generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0
    )
    assert decode(HFTarget(model), prompt, 40) == expected[0, 12:].tolist()


@pytest.mark.parametrize("kind", [*KINDS, "window"])
def test_features_are_hidden_states(kind: str) -> None:
    """In the order asked for, by the index of `hidden_states`; the last one is after the norm."""
    changes = {"sliding_window": 8} if kind == "window" else {}
    model = tiny_model("mistral" if kind == "window" else kind, **changes)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        states = plain(TOKENS, output_hidden_states=True, use_cache=False).hidden_states
    target = HFTarget(model)
    for taps in ((0, 1, 2, 3, 4), (3, 0), (4,), ()):
        output = target.extract(TOKENS, taps, [21, 9, 4])
        torch.testing.assert_close(output.last_hidden, states[-1], atol=1e-4, rtol=1e-4)
        if not taps:
            assert output.features is None
            continue
        expected = torch.cat([states[tap] for tap in taps], dim=-1)
        assert output.features.shape == (3, 21, 48 * len(taps))
        torch.testing.assert_close(output.features, expected, atol=1e-4, rtol=1e-4)
        cache = target.new_cache(3, 32)
        trees = [DraftTree.chain(row.tolist()) for row in TOKENS]
        again = target.forward(trees, cache, [0, 1, 2], taps=taps, last_only=True)
        torch.testing.assert_close(again.features, expected, atol=1e-4, rtol=1e-4)
        assert again.logits.shape == (3, 1, 97)


def test_a_tap_names_a_layers_input() -> None:
    """Layer i adds the value i + 1 to the stream: tap k has seen layers 0..k-1."""
    model = tiny_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _m, _a, out, i=i: out + i + 1)
    output = HFTarget(model).extract(TOKENS[:1], (0, 1, 2, 3), None)
    assert output.features[0, 0, ::48].tolist() == [0, 1, 3, 6]


def test_taps_outside_are_refused() -> None:
    target = tiny_target()
    for tap in (-1, 5):
        with pytest.raises(SettingError, match=r"tap is -?\d, expected 0..4"):
            target.extract(TOKENS, (tap,), None)
    assert target.extract(TOKENS, (4,), None).features.shape == (3, 21, 48)


def test_padding_on_the_right_is_not_seen() -> None:
    target = tiny_target()
    changed = TOKENS.clone()
    changed[1, 9:] = 0
    one, two = (target.extract(tokens, (2,), [21, 9, 21]) for tokens in (TOKENS, changed))
    assert torch.equal(one.features[1, :9], two.features[1, :9])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_layers_equal_plain_ones(kind: str) -> None:
    if not can_pack(torch.float32, torch.device("cpu")):
        pytest.skip("no oneDNN here")
    model = tiny_model(kind, **({"attention_bias": True} if kind == "llama" else {}))
    packed, plain = HFTarget(copy.deepcopy(model), packed=True), HFTarget(model, packed=False)
    assert any(isinstance(module, PackedLinear) for module in packed.model.modules())
    assert not any(isinstance(module, PackedLinear) for module in plain.model.modules())
    for width in (1, 7, 70):
        tree = DraftTree.chain([i % 97 for i in range(width)])
        one, two = (t.forward([tree], t.new_cache(1, 80), [0]) for t in (packed, plain))
        torch.testing.assert_close(one.logits, two.logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(packed.head(), plain.head())
    weight = packed.model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight, plain.model.model.layers[0].mlp.up_proj.weight)


def test_float64_runs_and_keeps_its_logits() -> None:
    target = tiny_target(dtype=torch.float64)
    output = target.forward([DraftTree.chain([1, 2, 3])], target.new_cache(1, 8), [0])
    assert output.logits.dtype == torch.float64
    low = tiny_target(dtype=torch.bfloat16)
    output = low.forward([DraftTree.chain([1, 2, 3])], low.new_cache(1, 8), [0])
    assert output.logits.dtype == torch.float32


class Names:
    """A tokenizer that knows the first `n` ids."""

    all_special_ids = (0,)
    eos_token_id = 2
    chat_template = None

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self.n)}


def test_padded_rows_of_the_head_cannot_be_emitted() -> None:
    model = tiny_model(vocab_size=128)
    with torch.no_grad():
        model.lm_head.weight[120] = 0
        model.lm_head.weight[110] = 50 * model.lm_head.weight[5]
    target = HFTarget(model, Names(100))
    assert target.spec.vocab_size == 100 and target.head().shape[0] == 128
    output = target.forward([DraftTree.chain([1, 2, 3])], target.new_cache(1, 8), [0])
    assert output.logits.shape == (1, 3, 100)
    assert target.spec.eos_ids == (2,)


def test_a_chat_without_template_is_refused_with_a_hint() -> None:
    target = HFTarget(tiny_model(), Names(97))
    with pytest.raises(SettingError, match="chat template") as caught:
        target.tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert "--raw" in caught.value.hint


def test_nan_is_an_error() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    target = HFTarget(model)
    with pytest.raises(NumericError, match="1 of 2 rows"):
        trees = [DraftTree.chain([1, 2]), DraftTree.chain([1, 2, 7])]
        target.forward(trees, target.new_cache(2, 8), [0, 1])
    good = target.forward([DraftTree.chain([1, 2])], target.new_cache(1, 8), [0])
    assert torch.isfinite(good.logits).all()


def test_another_model_does_not_move_the_rotary_angles() -> None:
    """Angles belong to a model: loading one with another base changes nothing (B66)."""
    target = tiny_target()
    tree = DraftTree.chain(TOKENS[0].tolist())
    before = target.forward([tree], target.new_cache(1, 32), [0]).logits
    rope = {"rope_type": "default", "rope_theta": 1e6}
    other = tiny_target("llama", rope_parameters=rope)
    other.forward([tree], other.new_cache(1, 32), [0])
    assert torch.equal(target.forward([tree], target.new_cache(1, 32), [0]).logits, before)


REFUSED = {
    "linear": (transformers.Qwen3NextConfig(), "recurrent state|linear attention"),
    "mamba": (transformers.MambaConfig(), "recurrent state"),
    "jamba": (transformers.JambaConfig(), "recurrent state"),
    "rwkv": (transformers.RwkvConfig(), "recurrent state"),
    "encoder": (transformers.BertConfig(), "is an encoder"),
    "encoder-decoder": (transformers.T5Config(), "encoder-decoder"),
    "chunked": (transformers.Llama4TextConfig(), "chunked attention"),
    "dynamic": (
        transformers.LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "dynamic RoPE",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_target_is_refused_with_the_reason(name: str) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(UnsupportedTargetError, match=reason):
        check_supported(config)


def test_a_layer_of_another_kind_is_named() -> None:
    config = transformers.Qwen3Config(num_hidden_layers=2)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedTargetError, match="layer 1 of qwen3 uses linear attention"):
        check_supported(config)


def test_other_architectures_are_probed() -> None:
    """Gemma 2: soft-capped scores and logits, alternating windows, scaled embeddings."""
    config = transformers.Gemma2Config(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=4, head_dim=16,
        num_attention_heads=6, num_key_value_heads=2, sliding_window=4, initializer_range=0.2,
        query_pre_attn_scalar=16, attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval()
    prompt = TOKENS[0, :12].tolist()
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    expected = plain.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert decode(HFTarget(model), prompt, 12) == expected[0, 12:].tolist()


def test_an_architecture_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.Gemma2Config(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=6, num_key_value_heads=2, final_logit_softcapping=3.0,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval()
    monkeypatch.setattr("slipstream.target.model.logit_rule", lambda _config: LogitRule(2.0))
    with pytest.raises(UnsupportedTargetError, match="differs from its own pass"):
        HFTarget(model)


# Loading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model on disk, with a byte-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    inner.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    path = tmp_path / "model"
    tiny_model(vocab_size=272).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_load_a_folder(folder: Path) -> None:
    target = load_target(str(folder), dtype="float32", device="cpu")
    tokenizer = target.tokenizer
    assert target.spec.vocab_size == 257 and target.spec.dtype == torch.float32
    text = "naïve 日本"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(chat) == "user: hi\nassistant: "
    assert len(tokenizer.byte_ids) == 256 and tokenizer.special_ids == (256,)


def test_damage_is_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"\xff" * 400):
        weights.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot read model"):
            load_target(str(folder))
    weights.unlink()
    with pytest.raises(CheckpointError, match="cannot read model"):
        load_target(str(folder))
    weights.write_bytes(whole)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read model"):
        load_target(str(folder))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 5}, "lacks"),
        ({"num_hidden_layers": 3}, "counts 3 layers"),
        ({"hidden_size": 64}, "cannot read model"),
        ({"intermediate_size": 80}, "cannot read model"),
        ({"model_type": "nonesuch"}, "cannot read model"),
        ({"model_type": "mamba"}, "recurrent state"),
    ],
)
def test_config_and_weights_that_disagree(folder: Path, changes: dict, reason: str) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))
    with pytest.raises((CheckpointError, UnsupportedTargetError), match=reason):
        load_target(str(folder))


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_quantised_models_are_refused_by_name(folder: Path, method: str) -> None:
    path = folder / "config.json"
    quantised = {"quant_method": method, "bits": 4, "load_in_4bit": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantised}))
    with pytest.raises(UnsupportedTargetError, match=f"quantised with {method}") as caught:
        load_target(str(folder), device="cpu")
    assert "int4" in caught.value.hint


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_weights_by_dtype(folder: Path, tmp_path: Path, dtype: str) -> None:
    wide = tmp_path / "wide"
    tiny_model(vocab_size=272, hidden_size=96).save_pretrained(wide)
    for file in folder.iterdir():
        if file.name.startswith("tokenizer"):
            (wide / file.name).write_bytes(file.read_bytes())
    target = load_target(str(wide), dtype=dtype, device="cpu")
    assert target.spec.dtype == torch.bfloat16 and target.spec.decoder != "stock"
    assert target.spec.weights == f"{dtype}, rounded when loaded"


def test_the_fastest_decoder_is_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_target(str(folder), dtype="float32", device="cpu").spec.decoder == "fused"
    assert load_target(str(folder), dtype="float32", decoder="stock").spec.decoder == "stock"
    with pytest.raises(UnknownNameError, match="no decoder 'fussed'"):
        load_target(str(folder), decoder="fussed")
    monkeypatch.setattr("slipstream.target.fused._turn", lambda x, cos, sin: x)
    with pytest.warns(UserWarning, match="the stock decoder runs"):
        assert load_target(str(folder), dtype="float32", device="cpu").spec.decoder == "stock"


def test_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean: smollm2-135m"):
        load_target("smollm2-135")
    for missing in (tmp_path / "nothing", tmp_path / "nothing.gguf"):
        with pytest.raises(CheckpointError, match="does not exist"):
            load_target(str(missing))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_target(str(tmp_path))
    with pytest.raises(UnknownNameError, match="Did you mean: float16"):
        load_target("smollm2-135m", dtype="flot16")
    with pytest.raises(SettingError, match="threads"):
        load_target("smollm2-135m", device="cpu", threads=0)
