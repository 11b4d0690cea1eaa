"""A stack of decoder layers as one call of compiled code (`native/`).

The target's decoder is one, and so are draft networks, which may read states beside tokens. This
module holds what the code is told: structures of addresses into tensors that a `Stack` keeps.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import UnsupportedTargetError
from slipstream.sampling import Compiled, use_compiled
from slipstream.target.hardware import num_threads
from slipstream.target.library import library
from slipstream.target.tiles import TileProduct, settle

HEAD_SIZES = (16, 32, 64, 96, 128, 160, 192, 256)
PARTS = ("projections", "attention", "mlp", "head", "other")  # in native/pass.cpp's order
_Address = ctypes.c_void_p


class _Weight(ctypes.Structure):
    _fields_ = (
        ("data", _Address),
        ("bias", _Address),
        *((name, ctypes.c_int32) for name in ("planes", "blocks", "strips", "outputs", "rounds")),
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
                "vocab_size", "keeps_normed",
            )
        ),
        ("eps", ctypes.c_float),
        ("layers", ctypes.POINTER(_Layer)),
        *((name, _Address) for name in ("final_norm", "token_norm", "state_norm")),
        ("join", _Weight),
        ("head", _Weight),
    )  # fmt: skip


class _Row(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("slot", "start", "first", "width", "earlier")),
        ("visible", _Address),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_int32) for n in ("num_nodes", "num_rows", "num_taps", "num_logits")),
        *((name, _Address) for name in ("embedded", "states", "positions", "cos", "sin", "rows")),
        *((name, _Address) for name in ("node_rows", "keys", "values")),
        *((n, ctypes.c_int64) for n in ("layer_stride", "row_stride", "head_stride")),
        *(
            (name, _Address)
            for name in ("taps", "features", "last_hidden", "streams", "logit_nodes", "logits")
        ),
    )


@dataclass(frozen=True, slots=True)
class StackLayer:
    """One decoder layer; q, k, v are one product, as are gate and up (`is_gated`).

    Args:
        qkv: of twice the hidden size where the first layer reads tokens and states side by side.
        output: of the attention.
        gate_up: both halves of the MLP.
        down: back to the stream.
        mlp_norm: [D].
        attention_norm: [D]; None where the stream is read as it is.
        query_norm: [C] or None.
        key_norm: [C] or None.
        window: positions that a node looks back; 0 for all.
    """

    qkv: TileProduct
    output: TileProduct
    gate_up: TileProduct
    down: TileProduct
    mlp_norm: Tensor
    attention_norm: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    window: int = 0

    def weights(self) -> tuple[TileProduct, ...]:
        """In the order in which a pass reads them."""
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the attention and the MLP of a stack's layers.

    Args:
        hidden: D.
        intermediate: width of the MLP.
        heads: H.
        kv_heads: key and value heads.
        head_size: C.
        eps: of all norms.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    eps: float

    def why_not(self) -> str | None:
        """Why the compiled code cannot run layers of these sizes; None where it can."""
        if self.head_size in HEAD_SIZES and not self.hidden % 16 and not self.intermediate % 16:
            return None
        return f"its sizes do not fit the tiles (heads of {self.head_size})"


@dataclass(frozen=True, slots=True)
class Rows:
    """Which nodes of a pass belong to which row of a cache, and what they see.

    Args:
        slots: cache row of each.
        starts: slots that all of a row's nodes see.
        widths: nodes of each row, which stand behind each other in the pass.
        earlier: slots between the start and the nodes that some of them see; zeros by default.
        visible: per row [width, earlier + width] bool, or None for a chain without earlier slots.
    """

    slots: Sequence[int]
    starts: Sequence[int]
    widths: Sequence[int]
    visible: Sequence[Tensor | None]
    earlier: Sequence[int] = ()

    def structures(self) -> Any:
        """What the compiled code reads; valid while this object lives."""
        rows, first = (_Row * len(self.slots))(), 0
        for index, (slot, start, width, sees) in enumerate(
            zip(self.slots, self.starts, self.widths, self.visible, strict=True)
        ):
            earlier = self.earlier[index] if self.earlier else 0
            at = None if sees is None else sees.data_ptr()
            rows[index] = _Row(slot, start, first, width, earlier, at)
            first += width
        return rows

    def of_nodes(self) -> Tensor:
        """[M] int32, the row of each node."""
        if len(self.widths) == 1:
            return torch.zeros(self.widths[0], dtype=torch.int32)
        rows = np.arange(len(self.widths), dtype=np.int32)
        return torch.from_numpy(rows.repeat(self.widths))  # torch would wake its threads for it


@dataclass(frozen=True, slots=True)
class StackOutput:
    """What a pass gives.

    Args:
        logits: [wanted, V] float32.
        last_hidden: [M, D] bfloat16, what the head reads.
        features: [M, K*D] bfloat16 of the taps, or None.
        streams: [M, D] bfloat16, what the final norm was given, where it was asked for.
        num_broken: rows with NaN in a node's last hidden state or in their first logits.
    """

    logits: Tensor
    last_hidden: Tensor
    features: Tensor | None
    streams: Tensor | None
    num_broken: int


class Stack:
    """Decoder layers, a final norm and a head.

    Args:
        layers: from the first to the last; none for a head alone.
        sizes: of the layers.
        angles: a number of positions to cosines and signed sines [P, C] of at least as many.
        head: reads the last hidden state.
        vocab_size: V; outputs of the head beyond it are left out.
        final_norm: [D], or None where what comes out is read as it is.
        join: a product of [tokens, states] that the stream begins as, or None.
        token_norm: [D]: with `state_norm`, the first layer's attention reads the norms of tokens
            and states side by side, and the stream begins as the states.
        state_norm: [D].
        keeps_normed: the stream begins as the states' norm instead.

    Raises:
        UnsupportedTargetError: there is no compiled code on this machine.
    """

    def __init__(
        self,
        layers: Sequence[StackLayer],
        sizes: Sizes,
        angles: Callable[[int], tuple[Tensor, Tensor]],
        *,
        head: TileProduct,
        vocab_size: int,
        final_norm: Tensor | None = None,
        join: TileProduct | None = None,
        token_norm: Tensor | None = None,
        state_norm: Tensor | None = None,
        keeps_normed: bool = False,
    ) -> None:
        self._code, self._angles = _code("pass"), angles
        use_compiled(Compiled(gumbel, first_argmax))
        self.vocab_size = vocab_size
        self._held: list[Tensor] = []  # what the structures point to
        products = [join, *(weight for layer in layers for weight in layer.weights()), head]
        settle([product for product in products if product is not None])
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        self._model = _Model(
            num_layers=len(layers),
            hidden=sizes.hidden,
            intermediate=sizes.intermediate,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_size=sizes.head_size,
            vocab_size=vocab_size,
            keeps_normed=keeps_normed,
            eps=sizes.eps,
            layers=self._layers,
            final_norm=self._floats(final_norm),
            token_norm=self._floats(token_norm),
            state_norm=self._floats(state_norm),
            join=_Weight() if join is None else self._weight(join),
            head=self._weight(head),
        )
        self._handle, self._num_threads = None, 0
        self._alone = threading.Lock()
        self._known = (torch.empty(0), torch.empty(0))  # cosines and sines so far

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._code.slipstream_close(self._handle)

    def run(
        self,
        embedded: Tensor,
        positions: Tensor,
        rows: Rows,
        keys: Tensor,
        values: Tensor,
        *,
        states: Tensor | None = None,
        strides: Sequence[int] | None = None,
        taps: tuple[int, ...] = (),
        wanted: Tensor | None = None,
        with_streams: bool = False,
    ) -> StackOutput:
        """One pass; the nodes' keys and values are written behind each row's earlier slots.

        Args:
            embedded: [M, D] bfloat16, tokens of all rows' nodes.
            positions: [M] int64.
            rows: whose nodes they are.
            keys: [L, rows, H, slots, C] bfloat16.
            values: the same.
            states: [M, D] bfloat16, where the stack reads any.
            strides: of layers, rows and heads in numbers; the keys' own by default.
            taps: indices into the hidden states to return.
            wanted: int32, nodes whose logits are computed; None for none.
            with_streams: return them.
        """
        cos, sin = self._upto(int(positions.max()) + 1)
        given, node_rows = rows.structures(), rows.of_nodes()
        layer, row, head = keys.stride()[:3] if strides is None else strides
        return self._call(
            embedded,
            states,
            taps,
            wanted,
            with_streams,
            num_rows=len(rows.widths),
            positions=positions.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            rows=ctypes.addressof(given),
            node_rows=node_rows.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            layer_stride=layer,
            row_stride=row,
            head_stride=head,
        )

    def read(self, states: Tensor) -> Tensor:
        """[M, V] float32 logits of states [M, D] bfloat16: the final norm and the head alone."""
        wanted = torch.arange(len(states), dtype=torch.int32)
        return self._call(None, states, (), wanted, False, num_rows=0).logits

    def seconds(self) -> dict[str, float]:
        """Where the time of the last pass went, by part."""
        with self._alone:
            found = self._code.slipstream_seconds(self._open())
            return {name: found[index] for index, name in enumerate(PARTS)}

    def _call(
        self,
        embedded: Tensor | None,
        states: Tensor | None,
        taps: tuple[int, ...],
        wanted: Tensor | None,
        with_streams: bool,
        **places: int,
    ) -> StackOutput:
        like = states if embedded is None else embedded
        assert like is not None
        count, hidden = like.shape
        tapped = torch.tensor(taps, dtype=torch.int32)
        features = like.new_empty(count, len(taps) * hidden) if taps else None
        last_hidden = like.new_empty(count, hidden)
        streams = like.new_empty(count, hidden) if with_streams else None
        logits = _room(0 if wanted is None else len(wanted), self.vocab_size)
        call = _Pass(
            num_nodes=count,
            num_taps=len(taps),
            num_logits=len(logits),
            embedded=_address(embedded),
            states=_address(states),
            taps=tapped.data_ptr(),
            features=_address(features),
            last_hidden=last_hidden.data_ptr(),
            streams=_address(streams),
            logit_nodes=_address(wanted),
            logits=logits.data_ptr(),
            **places,
        )
        with self._alone:  # nobody closes the handle meanwhile
            num_broken = self._code.slipstream_run(self._open(), ctypes.byref(call))
        return StackOutput(logits, last_hidden, features, streams, num_broken)

    def _open(self) -> int:
        """The compiled stack with as many threads as torch has."""
        threads = num_threads()
        if threads != self._num_threads:
            if self._handle:
                self._code.slipstream_close(self._handle)
            self._handle = self._code.slipstream_open(ctypes.byref(self._model), threads)
            self._num_threads = threads
        return self._handle

    def _upto(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [P, C] of at least the first `length` positions, float32."""
        known = self._known
        if known[0].shape[0] < length:
            cos, sin = self._angles(max(length, 2 * known[0].shape[0]))
            known = self._known = cos.float().contiguous(), sin.float().contiguous()
        return known

    def _layer(self, layer: StackLayer) -> _Layer:
        return _Layer(
            attention_norm=self._floats(layer.attention_norm),
            query_norm=self._floats(layer.query_norm),
            key_norm=self._floats(layer.key_norm),
            mlp_norm=self._floats(layer.mlp_norm),
            qkv=self._weight(layer.qkv),
            output=self._weight(layer.output),
            gate_up=self._weight(layer.gate_up),
            down=self._weight(layer.down),
            window=layer.window,
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
            rounds=product.rounds_inputs,
        )

    def _floats(self, values: Tensor | None) -> int | None:
        """Address of a float32 copy that lives as long as this object."""
        if values is None:
            return None
        self._held.append(values.detach().float().contiguous())
        return self._held[-1].data_ptr()


def rank(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest entries of every row, as `log_softmax` and `topk` say, in one pass.

    Args:
        scores: [F, U] float32 on the CPU.
        count: how many, at most U.

    Returns:
        Log-probabilities [F, count] and indices [F, count], descending, the first among equals.
        Where a row has fewer above -inf, -inf and index 0 follow.

    Raises:
        UnsupportedTargetError: there is no compiled code on this machine.
    """
    code = _code("ranking")
    scores = scores.contiguous()
    best = _room(len(scores), count)
    ids = _room(len(scores), count, dtype=torch.int64)
    code.slipstream_rank(
        scores.data_ptr(), len(scores), scores.shape[1], count, best.data_ptr(), ids.data_ptr()
    )
    return best, ids


def gumbel(key: int, count: int) -> Tensor:
    """[count] float32 noise of tokens 0..count-1; see `sampling.gumbel_noise`.

    Args:
        key: of the stream, in 0..2**64-1.
        count: V.

    Raises:
        UnsupportedTargetError: there is no compiled code on this machine.
    """
    code, noise = _code("noise"), _room(count)
    code.slipstream_noise(key, count, noise.data_ptr())
    return noise


def first_argmax(scores: Tensor) -> Tensor:
    """[N] int64, the lowest index of each row's maximum; -1 where a row holds NaN.

    Args:
        scores: [N, V] float32 on the CPU.

    Raises:
        UnsupportedTargetError: there is no compiled code on this machine.
    """
    code, scores = _code("argmax"), scores.contiguous()
    ids = _room(len(scores), dtype=torch.int64)
    code.slipstream_first(scores.data_ptr(), len(scores), scores.shape[1], ids.data_ptr())
    return ids


def _code(what: str) -> ctypes.CDLL:
    """The compiled code, or the reason why there is none of `what`."""
    found = library()
    if found.code is None:
        raise UnsupportedTargetError(f"no compiled {what}: {found.detail}")
    return found.code


def _room(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Where compiled code writes: on the CPU and of this type, whatever torch's defaults are."""
    return torch.empty(*sizes, dtype=dtype, device="cpu")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
