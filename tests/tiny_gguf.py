"""Tiny models as GGUF files, written with the format's own package."""

from __future__ import annotations

from pathlib import Path

import torch

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3"}
"""GGUF's name of an architecture by the model type that it is read as."""


MERGES = (("a", "b"),)  # readers ask for one at least


def write_gguf(
    model: object, tokenizer: object, path: Path, *, without: str = "", **metadata: object
) -> Path:
    """A file that holds a model of transformers as float32, with its byte-level tokenizer.

    Args:
        model: a causal model of one of `ARCHITECTURES`.
        tokenizer: with a vocabulary of bytes, `MERGES` and special tokens.
        path: to write.
        without: what the names of tensors begin with that are left out.
        **metadata: further keys of the file, dots spelled as two underscores.
    """
    import gguf

    config, name = model.config, ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(path, name)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_rope_scaling(writer, config)
    for key, value in metadata.items():
        add = {
            bool: writer.add_bool, int: writer.add_uint32,
            float: writer.add_float32, str: writer.add_string,
        }  # fmt: skip
        add[type(value)](key.replace("__", "."), value)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(
        {arch: key for key, arch in gguf.MODEL_ARCH_NAMES.items()}[name], config.num_hidden_layers
    )
    for key, tensor in model.state_dict().items():
        stem, _, kind = key.rpartition(".")
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        if name == "llama" and stem.endswith(("q_proj", "k_proj")):
            tensor = _halves_interleaved(tensor, size)
        place = f"{names.get_name(stem)}.{kind}"
        if not without or not place.startswith(without):
            writer.add_tensor(place, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope_scaling(writer: object, config: object) -> None:
    """As llama.cpp's converter: metadata, but a tensor of divisors for Llama 3's."""
    import gguf
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        plain = rope["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
        writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())
    elif kind != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])


def _add_tokenizer(writer: object, tokenizer: object, size: int) -> None:
    """Byte-level BPE as GGUF spells it."""
    ids = {i: token for token, i in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([ids.get(i, f"<|unused{i}|>") for i in range(size)])
    writer.add_token_types([3 if i in special or i not in ids else 1 for i in range(size)])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.eos_token_id)


def _halves_interleaved(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of each head as llama.cpp turns Llama's: the halves of a rotation beside each other."""
    return weight.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)
