"""Which models can be targets, judged from their configuration, and why the others cannot."""

from __future__ import annotations

from typing import Any

from slipstream.errors import UnsupportedTargetError

KINDS = ("full_attention", "sliding_attention")
_STATEFUL = {
    "linear_attention": "linear attention",
    "mamba": "a state-space layer",
    "mamba2": "a state-space layer",
    "recurrent": "a recurrent layer",
    "conv": "a convolution over time",
    "hybrid": "a state-space layer beside attention",
}
_RECURRENT_MODELS = (
    "mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "bamba", "zamba", "zamba2", "xlstm",
    "recurrent_gemma", "qwen3_next", "falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h",
    "minimax", "kimi_linear",
)  # fmt: skip
_ENCODERS = (
    "bert", "roberta", "distilbert", "electra", "deberta", "deberta-v2", "albert", "xlm-roberta",
    "modernbert", "mpnet", "camembert", "esm", "vit", "clip",
)  # fmt: skip


def text_config(config: Any) -> Any:
    """The language model's part of a configuration."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def layer_kinds(config: Any) -> tuple[str, ...]:
    """One of `KINDS` per layer.

    Raises:
        UnsupportedTargetError: a layer keeps state that cannot be rolled back, or attends in
            a way a tree cannot be laid out for.
    """
    config = text_config(config)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        # Models with a switch (Qwen2) use the window only when it is on.
        is_on = window is not None and getattr(config, "use_sliding_window", True)
        kinds = [KINDS[1] if is_on else KINDS[0]] * config.num_hidden_layers
    for layer, kind in enumerate(kinds):
        _check_kind(config, layer, kind)
        if kind == "sliding_attention" and not window:
            raise UnsupportedTargetError(
                f"layer {layer} of {_name(config)} slides, but the config has no sliding_window"
            )
    return tuple(kinds)


def check_supported(config: Any) -> None:
    """Refuse what cannot be a target.

    Raises:
        UnsupportedTargetError: with the reason.
    """
    kind = getattr(config, "model_type", "")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedTargetError(
            f"{_name(config)} is an encoder-decoder; a target is a causal decoder"
        )
    if kind in _ENCODERS:
        raise UnsupportedTargetError(
            f"{_name(config)} is an encoder: it sees both sides of a token, so it cannot decode"
        )
    if kind in _RECURRENT_MODELS or text_config(config).model_type in _RECURRENT_MODELS:
        raise UnsupportedTargetError(
            f"{_name(config)} keeps a recurrent state, which cannot be rolled back over a tree"
        )
    if getattr(text_config(config), "attention_chunk_size", None):
        raise UnsupportedTargetError(
            f"{_name(config)} uses chunked attention, which has no rule for tree nodes"
        )
    rope = getattr(text_config(config), "rope_parameters", None) or {}
    if "dynamic" in (rope.get("rope_type"), rope.get("type")):
        raise UnsupportedTargetError(
            f"{_name(config)} uses dynamic RoPE, whose angles change with the longest position "
            "in a pass, so that drafted nodes would move the others"
        )
    layer_kinds(config)


def check_quantised(config: Any, device_type: str) -> None:
    """Refuse a model stored in a quantised format whose products this device has not.

    On a GPU such models run with the stock decoder, through transformers and the format's own
    package.

    Args:
        config: a transformers configuration.
        device_type: cpu or cuda.

    Raises:
        UnsupportedTargetError: the model is quantised and the device is the CPU.
    """
    found = getattr(config, "quantization_config", None)
    if found is None or device_type != "cpu":
        return
    read = found.get if isinstance(found, dict) else lambda key: getattr(found, key, None)
    method = getattr(read("quant_method"), "value", read("quant_method")) or "an unnamed method"
    raise UnsupportedTargetError(
        f"{_name(config)} is quantised with {method}, whose products run on GPUs",
        hint="give the unquantised model, or its GGUF file, with --dtype int8 or int4",
    )


def check_whole(model: Any) -> None:
    """Refuse a loaded model that is spread out, or carries adapters that are not merged.

    Raises:
        UnsupportedTargetError: with the reason.
    """
    name = _name(model.config)
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedTargetError(
            f"{name} carries adapters (LoRA) beside its weights",
            hint="merge them first: model = model.merge_and_unload()",
        )
    places = sorted(
        {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    )
    if len(places) > 1:
        raise UnsupportedTargetError(
            f"{name} is spread over {', '.join(places)} by its device_map; a target is on one "
            "device",
            hint="load it with device_map=None, or on a device that holds it whole",
        )


def _check_kind(config: Any, layer: int, kind: str) -> None:
    """Refuse a layer that is neither full nor sliding-window attention."""
    if kind in KINDS:
        return
    if kind in _STATEFUL:
        raise UnsupportedTargetError(
            f"layer {layer} of {_name(config)} uses {_STATEFUL[kind]}, whose state cannot be "
            "rolled back over a tree"
        )
    raise UnsupportedTargetError(
        f"layer {layer} of {_name(config)} uses {kind.replace('_', ' ')}; a target has "
        "full or sliding-window attention in every layer"
    )


def _name(config: Any) -> str:
    """How to call the model in an error."""
    return getattr(config, "_name_or_path", "") or getattr(config, "model_type", "the model")
