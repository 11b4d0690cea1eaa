"""Load Hugging Face causal models as targets. The only file that calls transformers."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from slipstream.errors import SlipstreamError, UnknownNameError, UnsupportedTargetError
from slipstream.target.attention import ATTENTION, attend
from slipstream.target.compiled import why_not_compiled
from slipstream.target.fused import why_not
from slipstream.target.gguf_blocks import check_one_file, read_blocks
from slipstream.target.gguf_rope import add_scaling
from slipstream.target.hardware import pick_device, pick_dtype, use_threads
from slipstream.target.model import DECODERS, HFTarget
from slipstream.target.source import check_complete, gguf_of, pinned, resolve, unreadable
from slipstream.target.storage import BITS, ROUNDS_INPUTS
from slipstream.target.support import check_quantised, check_supported, text_config
from slipstream.target.tokens import TargetTokenizer

__all__ = ["HFTarget", "load_target", "write_dequantised"]

AttentionInterface.register(ATTENTION, attend)


def load_target(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    threads: int | None = None,
    packed: bool | None = None,
    decoder: str = "auto",
    revision: str | None = None,
    token: str | None = None,
) -> HFTarget:
    """Load a target with its tokenizer.

    Args:
        name: an embedded name, a folder, a `.gguf` file, or a Hugging Face id.
        dtype: `auto` is bfloat16 where the hardware has it, else float32; `int8` and `int4` are
            weights of so many bits, multiplied as bfloat16; `w8a8` and `w4a8` the same weights,
            multiplied by activations that are rounded to 8 bits, as llama.cpp does.
        device: `auto` is the first CUDA device, or the CPU.
        threads: CPU threads; None takes OMP_NUM_THREADS or the physical cores.
        packed: see `HFTarget`.
        decoder: see `HFTarget`; `auto` is the fastest that this model and machine have.
        revision: branch, tag or commit of a Hugging Face id; ORG/MODEL@REVISION says the same.
        token: for private and gated models; None takes HF_TOKEN or the login of `hf auth`.

    Raises:
        UnknownNameError: no such embedded model, dtype, or decoder.
        CheckpointError: the folder is missing, damaged, or does not agree with itself.
        UnsupportedTargetError: the model cannot be a target, with the reason.
        SettingError: the device is not there, or threads is below 1.
    """
    if decoder not in ("auto", *DECODERS):
        raise UnknownNameError("decoder", decoder, ["auto", *DECODERS])
    place = pick_device(device)
    number_type = pick_dtype(dtype, place)
    if place.type == "cpu":
        use_threads(threads)
    source, revision = pinned(_source(name, number_type), revision)
    hub = {"revision": revision or "main", "token": token}
    model, tokenizer = _read(name, source, number_type, place, hub)
    options: dict[str, Any] = {"name": name, "packed": packed}
    if dtype in BITS:
        file = gguf_of(name)
        options |= {"weights": dtype, "blocks": read_blocks(file) if file else None}
    if decoder != "auto":
        return HFTarget(model, tokenizer, **options, decoder=decoder)
    reason = why_not(model)
    slow = why_not_compiled(model) if reason is None else None
    if dtype in ROUNDS_INPUTS:
        reason = reason or slow
    if reason is not None and dtype in BITS:
        raise UnsupportedTargetError(f"{name} cannot run with {dtype} weights: {reason}")
    fastest = "stock" if reason else "fused" if slow else "compiled"
    try:
        return HFTarget(model, tokenizer, **options, decoder=fastest)
    except UnsupportedTargetError as error:
        if fastest == "stock" or dtype in BITS:
            raise
        warnings.warn(f"{error}; the stock decoder runs, more slowly", stacklevel=2)
    model, tokenizer = _read(name, source, number_type, place, hub)  # the twin took the weights
    return HFTarget(model, tokenizer, **options)


def _read(
    name: str, source: str, dtype: torch.dtype, device: torch.device, hub: dict[str, Any]
) -> tuple[PreTrainedModel, Any]:
    """A stock model and its tokenizer."""
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(source, **hub)
        check_supported(config)
        check_quantised(config, device.type)
        model, report = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True, **hub
        )
        tokenizer = AutoTokenizer.from_pretrained(source, **hub)
    except SlipstreamError:
        raise
    except Exception as error:  # whatever the loader met in the files
        raise unreadable(name, error) from error
    check_complete(name, report, text_config(config).num_hidden_layers)
    return model.to(device), tokenizer


def load_tokenizer(name: str) -> tuple[TargetTokenizer, int]:
    """A model's tokenizer and its context in tokens, without reading the weights.

    Raises:
        UnknownNameError: no such embedded model.
        CheckpointError: the model cannot be read.
    """
    source, revision = pinned(_source(name, pick_dtype("auto", pick_device("auto"))), None)
    try:
        config = text_config(AutoConfig.from_pretrained(source, revision=revision or "main"))
        inner = AutoTokenizer.from_pretrained(source, revision=revision or "main")
    except Exception as error:  # whatever the loader met in the files
        raise unreadable(name, error) from error
    found = (config.eos_token_id, inner.eos_token_id)
    ids = {i for one in found for i in (one if isinstance(one, list | tuple) else [one])}
    eos_ids = sorted(int(i) for i in ids if i is not None)
    return TargetTokenizer(inner, eos_ids), int(config.max_position_embeddings)


def _source(name: str, dtype: torch.dtype) -> str:
    """The folder or id that a model is read from.

    A GGUF file's weights lie there in the number type they are loaded in where that is a narrow
    one: what needs no conversion stays the file's pages, which the system takes back when it needs
    them, and only what runs in another layout takes memory of its own.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return resolve(name, write_dequantised)
    variant = str(dtype).removeprefix("torch.")
    return resolve(name, partial(write_dequantised, dtype=dtype), variant=variant)


def write_dequantised(gguf: Path, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Read a GGUF file and write an ordinary model folder.

    Args:
        gguf: the file.
        folder: that is filled.
        dtype: of the weights in it.

    Raises:
        CheckpointError: the file cannot be read, or lacks tensors.
        UnsupportedTargetError: it is a part of a model, or scales RoPE in a way we cannot read.
    """
    try:
        from gguf import GGUFReader

        reader = GGUFReader(gguf)
        check_one_file(reader, gguf)
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        check_supported(config)
        add_scaling(text_config(config), reader, str(gguf))
        model, report = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except SlipstreamError:
        raise
    except Exception as error:  # whatever the loader met in the file
        raise unreadable(str(gguf), error) from error
    check_complete(str(gguf), report, text_config(config).num_hidden_layers)
    # A model read from GGUF calls itself quantised and refuses to be saved, though it is not.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    saved.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(saved, indent=2) + "\n")
