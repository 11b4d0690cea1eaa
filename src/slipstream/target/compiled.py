"""A whole pass as one call of compiled code, for bfloat16 CPUs with a C++ compiler at hand.

The sources in `native/` are compiled once per machine (see `library`). Every node's numbers come
out the same whatever else is in the pass, so drafting changes no token, not even where two are
nearly tied. Where there is no compiler, or no AVX-512 with bfloat16, `fused` runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.cache import SlotCache
from slipstream.errors import UnsupportedTargetError
from slipstream.target.fused import FusedDecoder
from slipstream.target.library import library
from slipstream.target.storage import HEAD, Storage
from slipstream.target.support import layer_kinds, text_config
from slipstream.target.tiles import TileProduct
from slipstream.trees.mask import ancestors
from slipstream.types import DraftTree, TargetOutput

HEAD_SIZES = (16, 32, 64, 96, 128, 160, 192, 256)
NODES_AT_ONCE = 1024  # of an extraction
PARTS = ("projections", "attention", "mlp", "head", "other")  # in native/pass.cpp's order
_Address = ctypes.c_void_p


class _Weight(ctypes.Structure):
    _fields_ = (
        ("data", _Address),
        ("bias", _Address),
        *((name, ctypes.c_int32) for name in ("planes", "blocks", "strips", "outputs")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Address) for name in ("attention_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, _Weight) for name in ("qkv", "output", "gate_up", "down")),
        ("window", ctypes.c_int32),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                "num_layers", "hidden", "intermediate", "heads", "kv_heads", "head_size",
                "vocab_size",
            )
        ),
        ("eps", ctypes.c_float),
        ("layers", ctypes.POINTER(_Layer)),
        ("final_norm", _Address),
        ("head", _Weight),
    )  # fmt: skip


class _Row(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("slot", "start", "first", "width")),
        ("visible", _Address),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_int32) for n in ("num_nodes", "num_rows", "num_taps", "num_logits")),
        *((name, _Address) for name in ("embedded", "positions", "cos", "sin", "rows")),
        *((name, _Address) for name in ("node_rows", "keys", "values")),
        *((n, ctypes.c_int64) for n in ("layer_stride", "row_stride", "head_stride")),
        *(
            (name, _Address)
            for name in ("taps", "features", "last_hidden", "logit_nodes", "logits")
        ),
    )


def why_not_compiled(model: Any) -> str | None:
    """Why the compiled pass cannot run a model that `fused.why_not` has nothing against."""
    config, weight = text_config(model.config), model.get_input_embeddings().weight
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return f"it runs bfloat16 on CPUs, not {weight.dtype} on {weight.device.type}"
    if size not in HEAD_SIZES or config.hidden_size % 16 or config.intermediate_size % 16:
        return f"its sizes do not fit the tiles (heads of {size})"
    found = library()
    return None if found.code is not None else found.detail


class CompiledDecoder(FusedDecoder):
    """The decoder and the head of a dense model, run by compiled code.

    Args:
        model: as for `FusedDecoder`; its weights are moved out of it.
        storage: lays weights out in tiles.
        vocab_size: V; rows of the head beyond it are left out.
    """

    def __init__(self, model: Any, storage: Storage, vocab_size: int) -> None:
        found = library()
        if found.code is None:
            raise UnsupportedTargetError(f"no compiled pass: {found.detail}")
        super().__init__(model, storage)
        config = text_config(model.config)
        head = model.get_output_embeddings()
        self.head: Any = storage({HEAD: head.weight.detach()}, head.bias)
        self._code, self._vocab_size = found.code, vocab_size
        self._window = getattr(config, "sliding_window", None) or 0
        self._kinds = layer_kinds(model.config)
        self._held: list[Tensor] = []  # what the structures point to
        self._layers = (_Layer * len(self.layers))(*map(self._layer, self.layers))
        norm = self._floats(self.final_norm)
        self._model = _Model(
            num_layers=len(self.layers),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=self._num_heads,
            kv_heads=self._num_kv_heads,
            head_size=self._size,
            vocab_size=vocab_size,
            eps=self._eps,
            layers=self._layers,
            final_norm=norm,
            head=self._weight(self.head),
        )
        self._handle, self._num_threads = None, 0

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._code.slipstream_close(self._handle)

    def score(
        self,
        trees: Sequence[DraftTree],
        cache: SlotCache,
        slots: Sequence[int],
        *,
        taps: tuple[int, ...],
        last_only: bool,
    ) -> TargetOutput:
        """One pass; see `Target.forward`."""
        widths = [len(tree) for tree in trees]
        cache.begin(slots, widths)
        starts = [cache.lengths[slot] for slot in slots]
        firsts = [sum(widths[:row]) for row in range(len(trees))]
        seen = [None if _is_chain(tree) else ancestors(tree.parents.cpu()) for tree in trees]
        rows = (_Row * len(trees))(
            *(
                _Row(*sizes, None if sees is None else sees.data_ptr())
                for *sizes, sees in zip(slots, starts, firsts, widths, seen, strict=True)
            )
        )
        tokens = torch.cat([tree.tokens for tree in trees])
        positions = torch.cat(
            [tree.depths + start for tree, start in zip(trees, starts, strict=True)]
        )
        lasts = [first + width - 1 for first, width in zip(firsts, widths, strict=True)]
        nodes = torch.tensor(lasts if last_only else range(len(tokens)), dtype=torch.int32)
        strides = cache.keys.stride()
        features, last_hidden, logits = self._pass(
            tokens, positions, rows, widths, cache.keys, cache.values, strides[:3], taps, nodes
        )
        shape = _Padding(firsts, widths)
        if last_only:
            logits = logits[:, None]
        else:
            logits = shape.spread(logits)
        return TargetOutput(
            logits, None if features is None else shape.spread(features), shape.spread(last_hidden)
        )

    def seconds(self) -> dict[str, float]:
        """Where the time of the last pass went, by part."""
        found = self._code.slipstream_seconds(self._open())
        return {name: found[index] for index, name in enumerate(PARTS)}

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
        none = torch.empty(0, dtype=torch.int32)
        found = []
        for start in range(0, batch, at_once):
            part = tokens[start : start + at_once]
            count = len(part)
            rows = (_Row * count)(*(_Row(row, 0, row * width, width, None) for row in range(count)))
            positions = torch.arange(width).repeat(count)
            strides = (0, *keys.stride()[1:3])  # every layer writes over the one before
            features, hidden, _ = self._pass(
                part.flatten(),
                positions,
                rows,
                [width] * count,
                keys[0],
                keys[1],
                strides,
                taps,
                none,
            )
            found.append((features, hidden.view(count, width, -1)))
        features = None
        if taps:
            features = torch.cat([f for f, _ in found]).view(batch, width, -1)
        return features, torch.cat([hidden for _, hidden in found])

    def _pass(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Any,
        widths: Sequence[int],
        keys: Tensor,
        values: Tensor,
        strides: Sequence[int],
        taps: tuple[int, ...],
        wanted: Tensor,
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Features [M, K*D] or None, last hidden [M, D] and logits of the wanted nodes."""
        embedded = F.embedding(tokens, self._embedding)
        count, hidden = embedded.shape
        cos, sin = self._angles(int(positions.max()) + 1)
        node_rows = torch.repeat_interleave(
            torch.arange(len(widths), dtype=torch.int32), torch.tensor(widths)
        )
        tapped = torch.tensor(taps, dtype=torch.int32)
        features = embedded.new_empty(count, len(taps) * hidden)
        last_hidden = torch.empty_like(embedded)
        logits = torch.empty(len(wanted), self._vocab_size)
        call = _Pass(
            num_nodes=count,
            num_rows=len(widths),
            num_taps=len(taps),
            num_logits=len(wanted),
            embedded=embedded.data_ptr(),
            positions=positions.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            rows=ctypes.addressof(rows),
            node_rows=node_rows.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            layer_stride=strides[0],
            row_stride=strides[1],
            head_stride=strides[2],
            taps=tapped.data_ptr(),
            features=features.data_ptr(),
            last_hidden=last_hidden.data_ptr(),
            logit_nodes=wanted.data_ptr(),
            logits=logits.data_ptr(),
        )
        self._code.slipstream_run(self._open(), ctypes.byref(call))
        return features if taps else None, last_hidden, logits

    def _open(self) -> int:
        """The compiled decoder with as many threads as torch has."""
        threads = torch.get_num_threads()
        if threads != self._num_threads:
            if self._handle:
                self._code.slipstream_close(self._handle)
            self._handle = self._code.slipstream_open(ctypes.byref(self._model), threads)
            self._num_threads = threads
        return self._handle

    def _angles(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [P, C] of at least the first `length` positions, float32."""
        if self._cos.shape[0] < length:
            self._cos, self._sin = (table.float() for table in self._rotary.upto(length))
        return self._cos, self._sin

    _cos = _sin = torch.empty(0)

    def _layer(self, layer: Any) -> _Layer:
        return _Layer(
            attention_norm=self._floats(layer.attention_norm),
            query_norm=self._floats(layer.query_norm),
            key_norm=self._floats(layer.key_norm),
            mlp_norm=self._floats(layer.mlp_norm),
            qkv=self._weight(layer.qkv),
            output=self._weight(layer.output),
            gate_up=self._weight(layer.gate_up),
            down=self._weight(layer.down),
            window=self._window if layer.kind == "sliding_attention" else 0,
        )

    def _weight(self, product: TileProduct) -> _Weight:
        self._held.append(product.data)
        return _Weight(
            data=product.data.data_ptr(),
            bias=self._floats(product.bias),
            planes=product.planes,
            blocks=product.num_blocks,
            strips=product.num_strips,
            outputs=product.outputs,
        )

    def _floats(self, values: Tensor | None) -> int | None:
        """Address of a float32 copy that lives as long as this object."""
        if values is None:
            return None
        self._held.append(values.float().contiguous())
        return self._held[-1].data_ptr()


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
