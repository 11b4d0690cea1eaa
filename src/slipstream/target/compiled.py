"""A whole pass as one call of compiled code, for bfloat16 CPUs with a C++ compiler at hand.

The sources in `native/` are compiled once per machine (see `library`). Every node's numbers come
out the same whatever else is in the pass, so drafting changes no token, not even where two are
nearly tied. Where there is no compiler, or no AVX-512, `fused` runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.cache import SlotCache
from slipstream.errors import NumericError
from slipstream.target.fused import FusedDecoder, FusedLayer
from slipstream.target.library import library
from slipstream.target.stack import Rows, Sizes, Stack, StackLayer
from slipstream.target.storage import HEAD, Storage
from slipstream.target.support import text_config
from slipstream.trees.mask import ancestors
from slipstream.types import DraftTree, TargetOutput

NODES_AT_ONCE = 1024  # of an extraction


def why_not_compiled(model: Any) -> str | None:
    """Why the compiled pass cannot run a model that `fused.why_not` has nothing against."""
    weight = model.get_input_embeddings().weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return f"it runs bfloat16 on CPUs, not {weight.dtype} on {weight.device.type}"
    reason = _sizes(text_config(model.config)).why_not()
    if reason is not None:
        return reason
    found = library()
    return None if found.code is not None else found.detail


def _sizes(config: Any) -> Sizes:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Sizes(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=size,
        eps=float(config.rms_norm_eps),
    )


class CompiledDecoder(FusedDecoder):
    """The decoder and the head of a dense model, run by compiled code.

    Args:
        model: as for `FusedDecoder`; its weights are moved out of it.
        storage: lays weights out in tiles.
        vocab_size: V; rows of the head beyond it are left out.

    Raises:
        UnsupportedTargetError: there is no compiled code on this machine.
    """

    def __init__(self, model: Any, storage: Storage, vocab_size: int) -> None:
        super().__init__(model, storage)
        config = text_config(model.config)
        head = model.get_output_embeddings()
        self.head: Any = storage({HEAD: head.weight.detach()}, head.bias)
        window = getattr(config, "sliding_window", None) or 0
        self._stack = Stack(
            [_stack_layer(layer, window) for layer in self.layers],
            _sizes(config),
            self._rotary.upto,
            head=self.head,
            vocab_size=vocab_size,
            final_norm=self.final_norm,
        )

    def score(
        self,
        trees: Sequence[DraftTree],
        cache: SlotCache,
        slots: Sequence[int],
        *,
        taps: tuple[int, ...],
        last_only: bool,
    ) -> TargetOutput:
        """One pass; see `Target.forward`.

        Raises:
            NumericError: a row's hidden states or its first logits hold NaN.
        """
        widths = [len(tree) for tree in trees]
        cache.begin(slots, widths)
        starts = [cache.lengths[slot] for slot in slots]
        firsts = [sum(widths[:row]) for row in range(len(trees))]
        seen = [None if _is_chain(tree) else ancestors(tree.parents.cpu()) for tree in trees]
        tokens = torch.cat([tree.tokens for tree in trees])
        positions = torch.cat(
            [tree.depths + start for tree, start in zip(trees, starts, strict=True)]
        )
        lasts = [first + width - 1 for first, width in zip(firsts, widths, strict=True)]
        found = self._stack.run(
            F.embedding(tokens, self._embedding),
            positions,
            Rows(slots, starts, widths, seen),
            cache.keys,
            cache.values,
            taps=taps,
            wanted=torch.tensor(lasts if last_only else range(len(tokens)), dtype=torch.int32),
        )
        if found.num_broken:
            raise NumericError.of_rows(found.num_broken, len(trees))
        shape, features = _Padding(firsts, widths), found.features
        return TargetOutput(
            found.logits[:, None] if last_only else shape.spread(found.logits),
            None if features is None else shape.spread(features),
            shape.spread(found.last_hidden),
        )

    def seconds(self) -> dict[str, float]:
        """Where the time of the last pass went, by part."""
        return self._stack.seconds()

    def extract(self, tokens: Tensor, taps: tuple[int, ...]) -> tuple[Tensor | None, Tensor]:
        """Causal passes without a cache over [B, T] tokens.

        Returns:
            Features [B, T, K*D] or None, and the last hidden state [B, T, D].
        """
        batch, width = tokens.shape
        at_once = max(1, NODES_AT_ONCE // width)
        keys = torch.zeros(
            2, min(at_once, batch), self._num_kv_heads, width, self._size, dtype=torch.bfloat16
        )
        found = []
        for start in range(0, batch, at_once):
            part = tokens[start : start + at_once]
            count = len(part)
            output = self._stack.run(
                F.embedding(part.flatten(), self._embedding),
                torch.arange(width).repeat(count),
                Rows(range(count), [0] * count, [width] * count, [None] * count),
                keys[0],
                keys[1],
                strides=(0, *keys.stride()[1:3]),  # every layer writes over the one before
                taps=taps,
            )
            found.append((output.features, output.last_hidden.view(count, width, -1)))
        features = None
        if taps:
            features = torch.cat([f for f, _ in found]).view(batch, width, -1)
        return features, torch.cat([hidden for _, hidden in found])


def _stack_layer(layer: FusedLayer, window: int) -> StackLayer:
    return StackLayer(
        qkv=layer.qkv,
        output=layer.output,
        gate_up=layer.gate_up,
        down=layer.down,
        mlp_norm=layer.mlp_norm,
        attention_norm=layer.attention_norm,
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        window=window if layer.kind == "sliding_attention" else 0,
    )


def _is_chain(tree: DraftTree) -> bool:
    return int(tree.depths[-1]) == len(tree) - 1


class _Padding:
    """From nodes side by side to rows padded to the widest; a padded node repeats the root."""

    def __init__(self, firsts: Sequence[int], widths: Sequence[int]) -> None:
        self._sizes = (len(widths), max(widths))
        self._index = None
        if len(set(widths)) > 1:
            places = torch.arange(self._sizes[1])
            inside = places < torch.tensor(widths)[:, None]
            self._index = torch.tensor(firsts)[:, None] + places * inside  # [B, N]

    def spread(self, flat: Tensor) -> Tensor:
        """[B, N, ...] from [M, ...]."""
        return flat.view(*self._sizes, -1) if self._index is None else flat[self._index]
