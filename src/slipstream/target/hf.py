"""Stock Hugging Face causal models as targets. The only file that calls transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import CheckpointError, SettingError, UnknownNameError
from slipstream.target import embedded
from slipstream.target.hardware import pick_device, pick_dtype, use_threads
from slipstream.target.protocol import TargetSpec
from slipstream.target.support import check_supported, text_config
from slipstream.target.tokens import TargetTokenizer
from slipstream.types import TargetOutput


class HFTarget:
    def __init__(self, model: Any, tokenizer: Any = None, *, name: str = "") -> None:
        self.model = model.eval().requires_grad_(False)
        self.base = model.get_decoder()
        self.spec = _spec(model, tokenizer, name)
        self.tokenizer = (
            TargetTokenizer(tokenizer, self.spec.eos_ids) if tokenizer is not None else None
        )

    def embedding(self) -> Tensor:
        return self.model.get_input_embeddings().weight.detach()

    def head(self) -> Tensor:
        return self.model.get_output_embeddings().weight.detach()

    @torch.no_grad()
    def extract(
        self, tokens: Tensor, taps: Sequence[int], lengths: Sequence[int] | Tensor | None = None
    ) -> TargetOutput:
        """One causal pass without a cache: features and last hidden states, no logits.

        Args:
            tokens: [B, T] int64, padded on the right.
            taps: indices into the hidden states.
            lengths: real tokens of each row; what lies behind them is arbitrary.
        """
        tokens = tokens.to(self.spec.device)
        captured: dict[int, Tensor] = {}
        hooks = self._hook(taps, captured)
        try:
            last = self.base(input_ids=tokens, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        captured[self.spec.num_layers] = last
        features = torch.cat([captured[tap] for tap in taps], dim=-1) if taps else None
        logits = last.new_empty(tokens.shape[0], 0, self.spec.vocab_size)
        return TargetOutput(logits, features, last)

    def _hook(self, taps: Sequence[int], captured: dict[int, Tensor]) -> list[Any]:
        hooks = []
        layers = self.base.layers
        for tap in taps:
            if not 0 <= tap <= len(layers):
                raise SettingError("tap", tap, f"0..{len(layers)}")
            if tap < len(layers):

                def keep(_module: nn.Module, args: Any, kwargs: Any, tap: int = tap) -> None:
                    captured[tap] = args[0] if args else kwargs["hidden_states"]

                hooks.append(layers[tap].register_forward_pre_hook(keep, with_kwargs=True))
        return hooks


def load_target(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    threads: int | None = None,
) -> HFTarget:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    place = pick_device(device)
    number_type = pick_dtype(dtype, place)
    if place.type == "cpu":
        use_threads(threads)
    source = _source(name)
    config = AutoConfig.from_pretrained(source)
    check_supported(config)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=number_type)
    tokenizer = AutoTokenizer.from_pretrained(source)
    return HFTarget(model.to(place), tokenizer, name=name)


def _source(name: str) -> str:
    """A folder or hub id that from_pretrained reads."""
    if name in embedded.CATALOGUE:
        return str(embedded.dequantised(embedded.locate(name), name, write_dequantised))
    if Path(name).is_dir():
        return name
    if name.endswith(".gguf"):
        if not Path(name).is_file():
            raise CheckpointError(f"model file {name} does not exist")
        return str(embedded.dequantised(Path(name), Path(name).stem, write_dequantised))
    if name.count("/") != 1:
        raise UnknownNameError("model", name, embedded.CATALOGUE)
    return name


def write_dequantised(gguf: Path, folder: Path) -> None:
    """Read a GGUF file and write an ordinary float32 model folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    saved.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(saved, indent=2) + "\n")


def _spec(model: Any, tokenizer: Any, name: str) -> TargetSpec:
    config = text_config(model.config)
    head = model.get_output_embeddings().weight
    vocab_size = head.shape[0]
    if tokenizer is not None:
        known = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
        vocab_size = min(vocab_size, known)
    return TargetSpec(
        name=name or model.config.model_type,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        max_length=config.max_position_embeddings,
        eos_ids=_eos_ids(model, tokenizer, vocab_size),
        dtype=head.dtype,
        device=head.device,
        architecture=type(model).__name__,
    )


def _eos_ids(model: Any, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Ids that end an answer: generation settings (else the config's) and the tokenizer's."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = getattr(text_config(model.config), "eos_token_id", None)
    ids = set(found) if isinstance(found, list | tuple) else {found}
    if tokenizer is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(int(i) for i in ids if i is not None and 0 <= i < vocab_size))
