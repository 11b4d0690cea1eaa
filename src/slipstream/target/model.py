"""A causal model as a target: its stock decoder over a slot cache, or a fast twin of it.

Nothing here knows transformers; `target/hf.py` loads the models.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.cache import SlotCache
from slipstream.errors import NumericError, SettingError, UnsupportedTargetError
from slipstream.target.attention import ATTENTION, fold_mask
from slipstream.target.compiled import CompiledDecoder, why_not_compiled
from slipstream.target.facts import cache_shape, logit_rule, spec_of
from slipstream.target.fused import FusedDecoder, why_not
from slipstream.target.graphs import GraphedPasses, why_not_graphed
from slipstream.target.hardware import return_memory
from slipstream.target.packed import PackedLinear, can_pack, pack_linears
from slipstream.target.probe import check_same, probe, sample
from slipstream.target.products import PackedProduct, PlainProduct
from slipstream.target.storage import ROUNDS_INPUTS, Storage
from slipstream.target.support import check_supported, check_whole, layer_kinds, text_config
from slipstream.target.tiles import Quantised, TileProduct
from slipstream.target.tokens import TargetTokenizer
from slipstream.trees.mask import Layout
from slipstream.types import DraftTree, TargetOutput

DECODERS = ("stock", "fused", "compiled", "graphed")
_PROVEN = ("llama", "mistral", "qwen2", "qwen3")  # held by the tests; others are probed


class HFTarget:
    """A stock causal model that scores batches of trees over a `SlotCache`.

    Args:
        model: a transformers causal model; it is taken over (frozen, its attention function
            set, its linear layers packed or its weights moved out).
        tokenizer: its tokenizer, or None.
        name: how the user named it.
        packed: lay weights out for narrow passes; None does so where the CPU can.
        decoder: `stock` is transformers' own, `fused` its fast twin, `compiled` the twin in
            compiled code, `graphed` the fused one replayed from CUDA graphs; a twin takes over
            once it agrees with the stock one on a small tree.
        weights: how a twin stores weights: `int8`, `int4`, `w8a8`, `w4a8`, or "" as they are
            multiplied.
        blocks: quantised blocks of the file the model was read from; see `gguf_blocks`.

    Raises:
        UnsupportedTargetError: the model cannot be a target, or has no such decoder, with
            the reason.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        name: str = "",
        packed: bool | None = None,
        decoder: str = "stock",
        weights: str = "",
        blocks: Mapping[str, Quantised] | None = None,
    ) -> None:
        check_supported(model.config)
        check_whole(model)
        if model.get_output_embeddings() is None:
            raise UnsupportedTargetError(f"{type(model).__name__} has no language-model head")
        self.model = model.eval().requires_grad_(False)
        self.spec = spec_of(model, tokenizer, name)
        self.tokenizer = (
            TargetTokenizer(tokenizer, self.spec.eos_ids) if tokenizer is not None else None
        )
        self._base = model.get_decoder()
        self._shape = cache_shape(model.config)
        self._rule = logit_rule(model.config)
        self._kinds = tuple(dict.fromkeys(layer_kinds(model.config)))
        self._window = getattr(text_config(model.config), "sliding_window", None)
        self._embedding = model.get_input_embeddings().weight.detach()
        self._head = model.get_output_embeddings().weight.detach()
        self._cache_name = _cache_argument(self._base)
        self._fused: FusedDecoder | None = None
        self._compiled: CompiledDecoder | None = None
        self._graphs: GraphedPasses | None = None
        self._captured: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._hooked: tuple[int, ...] = ()
        self._project: Any = model.get_output_embeddings()
        model.set_attn_implementation(ATTENTION)
        if model.config.model_type not in _PROVEN:
            probe(self)
        can = can_pack(self.spec.dtype, self.spec.device)
        is_packed = can if packed is None else packed and can
        if decoder != "stock":
            self._fuse(decoder, is_packed, weights, blocks or {})
        elif weights:
            raise UnsupportedTargetError(f"the stock decoder has no {weights} weights")
        elif is_packed:
            pack_linears(self._base)
        if is_packed and decoder != "compiled":
            weight = self._project.weight.detach()  # not `_head`, where it was rounded
            self._project = PackedLinear(weight, getattr(self._project, "bias", None))

    def embedding(self) -> Tensor:
        """[V', D] the input embedding's weight."""
        return self._embedding

    def head(self) -> Tensor:
        """[V', D] the head's weight; the embedding's when tied."""
        return self._head

    def attach(self) -> None:
        """Give the model our attention again, after it ran elsewhere."""
        self.model.set_attn_implementation(ATTENTION)

    def detach(self) -> None:
        """Take our hooks off the model, before it runs elsewhere."""
        self._hook(())
        self._captured.clear()

    @property
    def twin(self) -> FusedDecoder | None:
        """The fast twin that runs in the stock decoder's place, if one does."""
        return self._fused

    def draft_shape(self) -> dict[str, Any]:
        """Sizes a draft layer of the target's own kind has, by `Eagle3Config`'s names."""
        config = text_config(self.model.config)
        rope = getattr(config, "rope_parameters", None) or {}
        return {
            "hidden_size": self.spec.hidden_size,
            "target_hidden_size": self.spec.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": self._shape.num_heads,
            "head_size": self._shape.head_size,
            "vocab_size": self._embedding.shape[0],
            "rms_norm_eps": float(getattr(config, "rms_norm_eps", 1e-6)),
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
        }

    def layer_weights(self, index: int) -> dict[str, Tensor]:
        """Weights of a decoder layer by their Hugging Face names, e.g. `mlp.up_proj.weight`."""
        if self._fused is not None:
            return self._fused.weights(index)
        layer = self._base.layers[index]
        return {
            f"{name}.weight": module.weight.detach()
            for name, module in layer.named_modules()
            if isinstance(getattr(module, "weight", None), Tensor)
        }

    def final_norm(self) -> Tensor | None:
        """[D] weight of the norm before the head, where there is one."""
        norm = getattr(self._base, "norm", None)
        return None if norm is None else norm.weight.detach()

    def new_cache(self, num_rows: int, max_length: int) -> SlotCache:
        """An empty cache for rows of up to `max_length` slots, tree nodes included."""
        shape = self._shape
        return SlotCache(
            shape.num_layers,
            num_rows,
            shape.num_heads,
            shape.head_size,
            max_length,
            self.spec.dtype,
            self.spec.device,
        )

    @torch.no_grad()
    def forward(
        self,
        trees: Sequence[DraftTree],
        cache: SlotCache,
        slots: Sequence[int],
        *,
        taps: tuple[int, ...] = (),
        last_only: bool = False,
    ) -> TargetOutput:
        """Score every node of one tree per cache row in one pass; see `Target.forward`.

        Raises:
            CacheFullError: a row has no room for its tree.
            NumericError: a logit is NaN.
            SettingError: a tap is outside 0..L.
        """
        if self._compiled is not None:
            self._check_taps(taps)
            return self._compiled.score(trees, cache, slots, taps=taps, last_only=last_only)
        if self._graphs is not None and not last_only:
            self._check_taps(taps)
            replayed = self._graphs.score(trees, cache, slots, taps)
            if replayed is not None:
                _check_finite(replayed.last_hidden, replayed.logits)
                return replayed
        used = cache.begin(slots, [len(tree) for tree in trees])
        layout = Layout.of(trees, [cache.lengths[slot] for slot in slots])
        features, last_hidden = self._run(
            layout.tokens, layout.positions, self._masks(layout, used), cache, taps
        )
        hidden = last_hidden
        if last_only:
            last = torch.tensor([len(tree) - 1 for tree in trees], device=hidden.device)
            hidden = hidden[torch.arange(len(trees), device=hidden.device), last][:, None]
        logits = self._read_out(hidden)
        _check_finite(last_hidden, logits)
        return TargetOutput(logits, features, last_hidden)

    def _read_out(self, hidden: Tensor) -> Tensor:
        """[..., V] logits of last hidden states."""
        return self._rule(self._project(hidden)[..., : self.spec.vocab_size])

    @torch.no_grad()
    def extract(
        self,
        tokens: Tensor,
        taps: Sequence[int],
        lengths: Sequence[int] | Tensor | None = None,
    ) -> TargetOutput:
        """One causal pass without a cache, for training data.

        Args:
            tokens: [B, T] int64, padded on the right with any ids.
            taps: indices into the hidden states.
            lengths: real tokens of each row. Causality keeps padding on the right from being
                seen, so what is returned before a row's length does not depend on it.

        Returns:
            Features [B, T, K*D] and last hidden [B, T, D], arbitrary past a row's length;
            logits are not computed: [B, 0, V].
        """
        tokens = tokens.to(self.spec.device)
        batch, width = tokens.shape
        if self._compiled is not None:
            self._check_taps(tuple(taps))
            features, last_hidden = self._compiled.extract(tokens, tuple(taps))
            return TargetOutput(torch.empty(batch, 0, self.spec.vocab_size), features, last_hidden)
        row = Layout.of([DraftTree.chain([0] * width)], [0])  # one mask serves every row
        features, last_hidden = self._run(
            tokens, row.positions.expand(batch, width), self._masks(row, width), None, tuple(taps)
        )
        logits = last_hidden.new_empty(batch, 0, self.spec.vocab_size)
        return TargetOutput(logits, features, last_hidden)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: dict[str, Tensor | None],
        cache: SlotCache | None,
        taps: tuple[int, ...],
    ) -> tuple[Tensor | None, Tensor]:
        """The decoder: features at the taps (or None) and the last hidden state."""
        if self._fused is not None:
            self._check_taps(taps)
            return self._fused.run(tokens, positions, masks, cache, taps)
        device = self.spec.device
        tokens, positions = tokens.to(device), positions.to(device)
        self._hook(taps)
        last_hidden = self._base(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=masks if len(masks) > 1 else masks[self._kinds[0]],
            use_cache=cache is not None,
            **{self._cache_name: cache},
        ).last_hidden_state
        if not taps:
            return None, last_hidden
        self._captured[self.spec.num_layers] = last_hidden
        features = torch.cat([self._captured[tap] for tap in taps], dim=-1)
        self._captured.clear()
        return features, last_hidden

    def _hook(self, taps: tuple[int, ...]) -> None:
        """Keep the inputs of the tapped layers during passes; tap L is the decoder's output."""
        wanted = tuple(sorted(set(taps)))
        if wanted == self._hooked:
            return
        self._check_taps(wanted)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for tap in wanted:
            if tap < self.spec.num_layers:

                def keep(_layer: Any, args: Any, kwargs: Any, tap: int = tap) -> None:
                    self._captured[tap] = args[0] if args else kwargs["hidden_states"]

                layer = self._base.layers[tap]
                self._hooks.append(layer.register_forward_pre_hook(keep, with_kwargs=True))
        self._hooked = wanted

    def _check_taps(self, taps: tuple[int, ...]) -> None:
        for tap in taps:
            if not 0 <= tap <= self.spec.num_layers:
                raise SettingError("tap", tap, f"0..{self.spec.num_layers}")

    def _fuse(
        self, decoder: str, is_packed: bool, weights: str, blocks: Mapping[str, Quantised]
    ) -> None:
        """Put a fast twin in the stock decoder's place, if both say the same."""
        reason = why_not(self.model)
        if reason is None and decoder == "compiled":
            reason = why_not_compiled(self.model)
        if reason is None and decoder != "compiled" and weights in ROUNDS_INPUTS:
            reason = "it does not round activations, the compiled one does"
        if reason is None and decoder == "graphed":
            reason = why_not_graphed(self.spec.device)
        if reason is not None:
            raise UnsupportedTargetError(f"{self.spec.name} has no {decoder} decoder: {reason}")
        kind: Any = PackedProduct if is_packed else PlainProduct
        kind = TileProduct if decoder == "compiled" else kind
        storage = Storage(weights, kind, blocks, self._shape.head_size)
        if weights:
            storage.round(self.model)
        expected = sample(self)
        if decoder == "compiled":
            self._compiled = CompiledDecoder(self.model, storage, self.spec.vocab_size)
            self._fused = self._compiled
        else:
            self._fused = FusedDecoder(self.model, storage)
        if decoder == "graphed":
            self._graphs = GraphedPasses(
                self._fused, self._read_out, windows={k: self._window_of(k) for k in self._kinds},
                groups=self._shape.groups, dtype=self.spec.dtype, device=self.spec.device,
            )  # fmt: skip
        check_same(self, expected, rounds_inputs=weights in ROUNDS_INPUTS)
        return_memory()  # the stock weights', laid out anew
        self.spec = replace(self.spec, decoder=decoder, weights=storage.describe())

    def _window_of(self, kind: str) -> int | None:
        """Positions a node looks back in such a layer; None for all."""
        return self._window if kind == "sliding_attention" else None

    def _masks(self, layout: Layout, used: int) -> dict[str, Tensor | None]:
        """The attention mask of each kind of layer."""
        masks: dict[str, Tensor | None] = {}
        for kind in self._kinds:
            window = self._window_of(kind)
            if layout.is_plain(window):
                masks[kind] = None
            else:
                mask = layout.mask(used, self.spec.dtype, window).to(self.spec.device)
                masks[kind] = fold_mask(mask, self._shape.groups)
        return masks


def _check_finite(last_hidden: Tensor, logits: Tensor) -> None:
    """Raise for rows with NaN, from sums: a NaN anywhere survives into them."""
    sums = last_hidden.sum(dim=(1, 2), dtype=torch.float32)
    roots = logits[:, 0].float()
    if roots.device.type == "cpu":  # in one thread: to wake others takes longer than to add
        with np.errstate(invalid="ignore"):
            sums = sums + torch.from_numpy(roots.numpy().sum(axis=-1))
    else:
        sums = sums + roots.sum(dim=-1)
    if not bool(torch.isnan(sums.sum())):
        return
    count = int(torch.isnan(sums).sum())
    raise NumericError.of_rows(count, len(sums))


def _cache_argument(base: Any) -> str:
    """The name transformers gives the cache: `cache` in newer versions."""
    names = inspect.signature(type(base).forward).parameters
    return "cache" if "cache" in names else "past_key_values"
