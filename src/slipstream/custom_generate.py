"""Speculation for a transformers user, switched on in one line.

    model.generate(**inputs, custom_generate=slipstream.speculate("eagle3", drafter=folder))

transformers prepares inputs and settings as ever and lets the returned object run the decoding
loop; greedy tokens are those of its own loop. Settings that would change the law in ways this loop
does not know are refused by name. The model is left as it was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream import assemble
from slipstream.engine.engine import Engine
from slipstream.errors import SettingError

_KNOWN_PROCESSORS = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper")
_KNOWN_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")


def speculate(
    method: str = "ngram", *, drafter: str | Path | None = None, **shape: Any
) -> Speculation:
    """What `model.generate` takes as `custom_generate`.

    Args:
        method: a name from `methods`.
        drafter: a checkpoint folder in any known dialect; None for methods without a network.
        **shape: tree, verifier, budget, depth, topk, width, lookup; see `load`.

    Example:
        >>> model.generate(**inputs, custom_generate=speculate())  # doctest: +SKIP
    """
    return Speculation(method, drafter=drafter, **shape)


class Speculation:
    """A decoding loop for `model.generate`; see the module's text.

    Args:
        method: a name from `methods`.
        drafter: a checkpoint folder, or None.
        **shape: as `load` takes it.

    The last call's answers are in `results`, with their accepted lengths.
    """

    def __init__(self, method: str, *, drafter: str | Path | None, **shape: Any) -> None:
        self._options = {"method": method, "drafter": drafter, **shape}
        self._engine: Engine | None = None
        self._model: Any = None
        self.results: list[Any] = []

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Tensor:
        """Decode, as transformers asks a decoding loop to.

        Args:
            model: a causal model of transformers.
            input_ids: [B, T] int64, padded where `attention_mask` of model_kwargs is 0.
            logits_processor: what transformers made of the settings.
            stopping_criteria: likewise.
            generation_config: the settings.
            **model_kwargs: inputs of the model besides the tokens.

        Returns:
            [B, T+N] int64: the inputs and what follows them, padded on the right.

        Raises:
            SettingError: a setting that this loop does not know.
            UnsupportedTargetError: the model cannot be a target, with the reason.
        """
        _check(logits_processor, stopping_criteria, generation_config)
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        prompts = [row[kept.bool()].tolist() for row, kept in zip(input_ids, mask, strict=True)]
        config, is_drawn = generation_config, bool(generation_config.do_sample)
        stop = config.eos_token_id
        with self._ready(model) as engine:
            self.results = engine.generate(
                prompts,
                num_rows=len(prompts),
                max_new_tokens=config.max_length - input_ids.shape[1],
                temperature=float(config.temperature or 1.0) if is_drawn else 0.0,
                top_k=(config.top_k or 0) if is_drawn else 0,
                top_p=(config.top_p or 1.0) if is_drawn else 1.0,
                seed=int(torch.randint(2**31, ())) if is_drawn else 0,
                stop=[] if stop is None else [stop] if isinstance(stop, int) else list(stop),
            )
        return _padded(input_ids, [r.token_ids for r in self.results], config.pad_token_id)

    @contextmanager
    def _ready(self, model: Any) -> Iterator[Engine]:
        """An engine over the model, which gets back its attention and its gradients."""
        before = model.config._attn_implementation
        learning = [each for each in model.parameters() if each.requires_grad]
        try:
            if self._engine is None or self._model is not model:
                from slipstream.target.hf import HFTarget

                name = getattr(model, "name_or_path", "")
                target = HFTarget(model, name=name, packed=False)
                self._engine, self._model = assemble.load(target, **self._options), model
            self._engine.target.attach()
            yield self._engine
        finally:
            if self._engine is not None and self._model is model:
                self._engine.target.detach()
            model.set_attn_implementation(before)
            for each in learning:
                each.requires_grad_(True)


def _check(logits_processor: Any, stopping_criteria: Any, config: Any) -> None:
    """Raises SettingError for a setting that this loop does not know."""
    for many, known, what in (
        (logits_processor, _KNOWN_PROCESSORS, "logits processor"),
        (stopping_criteria, _KNOWN_CRITERIA, "stopping criterion"),
    ):
        for one in many or ():
            if type(one).__name__ not in known:
                raise SettingError(
                    what,
                    type(one).__name__,
                    f"one of {', '.join(known)}",
                    "leave the setting out, or leave custom_generate out",
                )
    for name, neutral in (("num_beams", 1), ("num_return_sequences", 1)):
        found = getattr(config, name, None)
        if found not in (None, neutral):
            raise SettingError(name, found, str(neutral))
    if getattr(config, "return_dict_in_generate", False):
        raise SettingError("return_dict_in_generate", True, "False", "see `results` instead")


def _padded(input_ids: Tensor, answers: list[list[int]], pad: int | None) -> Tensor:
    """[B, T+N] inputs and answers."""
    longest = max(map(len, answers))
    full = input_ids.new_full((len(answers), longest), 0 if pad is None else pad)
    for row, answer in zip(full, answers, strict=True):
        row[: len(answer)] = torch.tensor(answer, device=full.device)
    return torch.cat([input_ids, full], dim=1)
