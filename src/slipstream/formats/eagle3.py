"""EAGLE-3 checkpoints: the layout of SafeAILab/EAGLE, which SGLang and vLLM read too.

Paper: Li et al. 2025, EAGLE-3, arXiv:2503.01840; layout: SafeAILab/EAGLE `cnets.py`.
Differs: our own files also carry `slipstream.taps`, the taps as indices into the target's hidden
states. Without it the paper's taps are assumed, and `eagle_aux_hidden_state_layer_ids` is read
as such indices (the convention of vLLM and speculators).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import CheckpointError, DrafterMismatchError, OutputError
from slipstream.models.eagle3 import Eagle3, Eagle3Config, default_taps
from slipstream.models.vocabulary import DraftVocabulary

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
OPTIONAL = {"embed_tokens.weight"}


@dataclass(frozen=True, slots=True)
class Eagle3Checkpoint:
    """A drafter as stored: the network and what its ids mean."""

    model: Eagle3
    vocabulary: DraftVocabulary


class _File(BaseModel):
    """The keys of config.json we rely on; others are other engines' business."""

    model_config = ConfigDict(extra="allow")

    architectures: list[str] = []
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_hidden_layers: int = 1
    vocab_size: int
    draft_vocab_size: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    target_hidden_size: int | None = None
    eagle_config: dict[str, Any] | None = None
    slipstream: dict[str, Any] | None = None


def read(folder: Path, *, target_layers: int | None = None) -> Eagle3Checkpoint:
    """Read a folder; every tensor must be known, present and of the size config.json says.

    Args:
        folder: holds config.json and model.safetensors.
        target_layers: L of the target, for the default taps of files that name none.

    Raises:
        CheckpointError: missing or truncated files, unknown or missing tensors, sizes that
            disagree.
    """
    folder = Path(folder)
    stored = _read_config(folder)
    tensors = {key.removeprefix("model."): t for key, t in _read_tensors(folder).items()}
    tensors = {
        ("midlayer." + k.removeprefix("layers.0.") if k.startswith("layers.0.") else k): t
        for k, t in tensors.items()
    }
    if "midlayer.self_attn.q_proj.weight" not in tensors:
        raise CheckpointError(
            f"{folder} has no midlayer.* tensors, so it is no EAGLE-3 drafter",
            hint="`slipstream zoo` lists drafters that ship; `slipstream train` makes one",
        )
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    config = _network_config(stored, tensors, folder, target_layers)
    if d2t is None and config.draft_vocab_size != config.vocab_size:
        raise CheckpointError(
            f"{folder}: the head says {config.draft_vocab_size} ids, the target has "
            f"{config.vocab_size}, and there is no d2t map",
            hint="the map is part of the training; take it from the folder the weights come from",
        )
    vocabulary = (
        DraftVocabulary.full(config.vocab_size)
        if d2t is None
        else DraftVocabulary.from_files(d2t, t2d, config.vocab_size)
    )
    for name in OPTIONAL:
        tensors.pop(name, None)  # the target's own embedding is used
    model = Eagle3(config)
    _check_tensors(model, tensors, folder)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return Eagle3Checkpoint(model.eval(), vocabulary)


def write(
    checkpoint: Eagle3Checkpoint,
    folder: Path,
    *,
    card: dict[str, Any] | None = None,
    overwrite: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json, model.safetensors and card.json; the folder appears whole or not.

    Raises:
        OutputError: the folder exists and `overwrite` is off, or cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise OutputError(f"{folder} exists", "choose another --output")
    config = checkpoint.model.config
    state = {
        name: tensor.detach().to(dtype).contiguous()
        for name, tensor in checkpoint.model.state_dict().items()
    }
    if not checkpoint.vocabulary.is_full:
        state["d2t"] = checkpoint.vocabulary.offsets()
        state["t2d"] = checkpoint.vocabulary.mask()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error}") from error
    try:
        save_file(state, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(
            json.dumps(_file_config(config, dtype), indent=2) + "\n"
        )
        if card is not None:
            (temporary / "card.json").write_text(json.dumps(card, indent=2) + "\n")
        temporary.chmod(0o755)
        (temporary / "model.safetensors").chmod(0o644)
        if folder.exists():
            _swap(temporary, folder)
        else:
            temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_target(
    config: Eagle3Config, *, vocab_size: int, hidden_size: int, num_layers: int, name: str
) -> None:
    """Refuse a drafter made for another target.

    Args:
        config: the drafter's.
        vocab_size: rows of the target's embedding.
        hidden_size: D of the target.
        num_layers: L of the target.
        name: the target's name, for the message.

    Raises:
        DrafterMismatchError: vocabulary, hidden size or layers differ.
    """
    hint = f"train one with `slipstream train --method eagle3 --model {name} ...`"
    facts = (
        ("vocabulary", config.vocab_size, vocab_size),
        ("hidden size", config.target_hidden_size, hidden_size),
    )
    for what, ours, theirs in facts:
        if ours != theirs:
            raise DrafterMismatchError(
                f"the drafter was made for a target with {what} {ours}, {name} has {theirs}", hint
            )
    if config.hidden_size != hidden_size:
        raise DrafterMismatchError(
            f"the drafter's hidden size {config.hidden_size} differs from the width {hidden_size} "
            f"of {name}'s embedding, which it borrows",
            hint,
        )
    if max(config.taps) > num_layers:
        raise DrafterMismatchError(
            f"the drafter reads layer {max(config.taps)}, {name} has {num_layers}", hint
        )


def _read_config(folder: Path) -> _File:
    path = folder / "config.json"
    if not path.is_file():
        state = "does not exist" if not folder.exists() else "has no config.json"
        raise CheckpointError(f"{folder} {state}", hint="`slipstream zoo` lists drafters that ship")
    try:
        return _File(**json.loads(path.read_text()))
    except (json.JSONDecodeError, ValidationError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {_first_line(error)}", "take the drafter from its source again"
        ) from error


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / "model.safetensors"
    if path.is_file():
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is truncated or damaged: {_first_line(error)}", hint="copy it again"
            ) from error
    path = folder / "pytorch_model.bin"
    if path.is_file():
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # unpickling fails in many ways
            raise CheckpointError(
                f"{path} cannot be read: {_first_line(error)}",
                "take the drafter from its source again",
            ) from error
    raise CheckpointError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


def _network_config(
    stored: _File, tensors: dict[str, Tensor], folder: Path, target_layers: int | None
) -> Eagle3Config:
    if stored.num_hidden_layers != 1:
        raise CheckpointError(f"{folder} has {stored.num_hidden_layers} draft layers, expected 1")
    target_hidden = stored.target_hidden_size or stored.hidden_size
    taps = (stored.slipstream or {}).get("taps")
    ids = (stored.eagle_config or {}).get("eagle_aux_hidden_state_layer_ids")
    if taps is None and ids is not None:
        taps = ids
    if taps is None:
        taps = default_taps(target_layers or 32)
    fc = tensors.get("fc.weight")
    if fc is not None and fc.shape[1] != len(taps) * target_hidden:
        raise CheckpointError(
            f"{folder}: fc.weight reads {fc.shape[1]} values, config.json says {len(taps)} taps "
            f"of {target_hidden}"
        )
    heads = stored.num_attention_heads
    rope = stored.rope_parameters or {}
    is_scaled = rope.get("rope_type", "default") != "default"
    scaling = stored.rope_scaling or (rope if is_scaled else None)
    return Eagle3Config(
        hidden_size=stored.hidden_size,
        intermediate_size=stored.intermediate_size,
        num_heads=heads,
        num_kv_heads=stored.num_key_value_heads or heads,
        head_size=stored.head_dim or stored.hidden_size // heads,
        vocab_size=stored.vocab_size,
        draft_vocab_size=stored.draft_vocab_size or stored.vocab_size,
        taps=tuple(taps),
        target_hidden_size=target_hidden,
        rms_norm_eps=stored.rms_norm_eps,
        rope_theta=stored.rope_theta or rope.get("rope_theta") or 10000.0,
        rope_scaling=scaling,
        max_length=stored.max_position_embeddings,
    )


def _check_tensors(model: Eagle3, tensors: dict[str, Tensor], folder: Path) -> None:
    expected = model.state_dict()
    missing = sorted(set(expected) - set(tensors))
    unknown = sorted(set(tensors) - set(expected))
    if missing or unknown:
        raise CheckpointError(
            f"{folder}: missing tensors {missing or 'none'}, unknown tensors {unknown or 'none'}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{folder}: {name} is {list(tensor.shape)}, config.json says "
                f"{list(expected[name].shape)}"
            )


def _file_config(config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_length,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.taps),
            "use_aux_hidden_state": True,
        },
        "slipstream": {"method": "eagle3", "taps": list(config.taps)},
    }


def _swap(new: Path, old: Path) -> None:
    """Replace a folder; the old one is moved aside first and restored on failure."""
    aside = old.with_name(f".{old.name}-old")
    shutil.rmtree(aside, ignore_errors=True)
    old.replace(aside)
    try:
        new.replace(old)
    except OSError:
        aside.replace(old)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
