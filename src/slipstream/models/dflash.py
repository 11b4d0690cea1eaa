"""DFlash's draft network: a block of masked tokens over target features, denoised in one pass.

Paper: Chen et al. 2026, DFlash, arXiv:2602.06036, section 4; the shifted read-out is DSpark's,
arXiv:2607.05147, section 3.
Differs: attention is the caller's (`attend`), so one network serves drafting and training; the
head may be restricted to a draft vocabulary, outside which q is zero.
Also: z-lab/dflash fixes the parameter names used here; its `target_layer_ids` are outputs of
layers, our taps are indices into the target's hidden states (id + 1).

A block of width W starts at the anchor, the last known token, at position s:

    slots      anchor  mask  mask  ...  mask        positions s, s+1, ..., s+W-1
    context    fused features of positions 0..s-1   keys and values of every layer
    read-out   slot j says token s+j                (same position; the anchor's slot says nothing)
               slot j says token s+j+1              (shifted; the anchor's slot is used)

Every slot sees the whole context and the whole block. The context never passes through queries,
residuals or MLPs: its keys and values are computed once and stay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from slipstream.errors import CheckpointError, SettingError
from slipstream.models.blocks import (
    Attend,
    GatedMLP,
    RMSNorm,
    attention_factor,
    inverse_frequencies,
    rotation,
    turn,
)
from slipstream.models.path_head import PathHead, PathTable


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Shape of the network.

    Args:
        hidden_size: D, equal to the target's embedding width.
        intermediate_size: width of the MLPs.
        num_heads: H.
        num_kv_heads: key and value heads, a divisor of H.
        head_size: C.
        num_layers: draft layers.
        vocab_size: rows of the target's embedding.
        draft_vocab_size: U, ids the drafter can say.
        taps: indices into the target's hidden states, low to high.
        target_hidden_size: D of the target.
        width: W, slots of the widest block it was trained on, anchor included.
        mask_token: target id that stands for a token to be drafted.
        is_shifted: which read-out, see the module's text.
        rms_norm_eps: epsilon of all norms.
        rope_theta: RoPE base the network was trained with.
        rope_scaling: None, or as in Hugging Face configs.
        max_length: positions seen in training; informative, nothing is clamped to it.
        path_rank: rank of the path head; 0 for a network without one.
        has_path_table: the path head is DSpark's own, two tables over the vocabulary.

    Raises:
        CheckpointError: sizes that cannot belong together.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    target_hidden_size: int
    width: int
    mask_token: int
    is_shifted: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    max_length: int = 2048
    path_rank: int = 0
    has_path_table: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} heads do not divide into {self.num_kv_heads} key-value heads"
            )
        if not 0 <= self.mask_token < self.vocab_size:
            raise CheckpointError(
                f"mask token {self.mask_token} has no row in an embedding of {self.vocab_size}"
            )
        if self.num_layers < 1 or self.num_drafts(self.width) < 1:
            raise CheckpointError(
                f"{self.num_layers} layers over blocks of {self.width} slots draft nothing"
            )

    def num_drafts(self, width: int) -> int:
        """Tokens that a block of this many slots drafts."""
        return width if self.is_shifted else width - 1

    def width_for(self, num_drafts: int) -> int:
        """Slots of the block that drafts this many tokens."""
        return num_drafts if self.is_shifted else num_drafts + 1


class _Attention(nn.Module):
    """Projections and the norms of single heads; the names are the checkpoint's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        d, c = config.hidden_size, config.head_size
        self.head_size = c
        self.q_proj = nn.Linear(d, config.num_heads * c, bias=False)
        self.k_proj = nn.Linear(d, config.num_kv_heads * c, bias=False)
        self.v_proj = nn.Linear(d, config.num_kv_heads * c, bias=False)
        self.o_proj = nn.Linear(config.num_heads * c, d, bias=False)
        self.q_norm = RMSNorm(c, config.rms_norm_eps)
        self.k_norm = RMSNorm(c, config.rms_norm_eps)

    def queries(self, x: Tensor) -> Tensor:
        """[B, H, N, C] of [B, N, D], not rotated yet."""
        return self.q_norm(self._heads(self.q_proj(x)))

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, not rotated yet, and values [B, Hkv, N, C] of [B, N, D]."""
        return self.k_norm(self._heads(self.k_proj(x))), self._heads(self.v_proj(x))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, N, h*C] to [B, h, N, C]."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class _Layer(nn.Module):
    """A pre-norm decoder layer of the Qwen3 kind."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DFlash(nn.Module):
    """The network. `fuse` and `context` once a position, `denoise` once a block."""

    frequencies: Tensor

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        features = len(config.taps) * config.target_hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        frequencies = inverse_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.path: PathHead | PathTable | None = None
        if config.path_rank and config.has_path_table:
            sizes = config.vocab_size, config.draft_vocab_size
            self.path = PathTable(*sizes, config.path_rank)
        elif config.path_rank:
            self.path = PathHead(config.hidden_size, config.path_rank)

    def add_path(self, rank: int) -> None:
        """Put a fresh path head on a network that has none; it changes nothing until trained."""
        self.config = replace(self.config, path_rank=rank)
        self.path = PathHead(self.config.hidden_size, rank)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, N, C/2] of positions [B, N]."""
        return rotation(positions, self.frequencies, attention_factor(self.config.rope_scaling))

    def fuse(self, features: Tensor) -> Tensor:
        """[..., K*D] features of the target to [..., D]."""
        return self.hidden_norm(self.fc(features))

    def context(self, fused: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the context, for every layer.

        Args:
            fused: [B, S, D] of `fuse`.
            positions: [B, S] int64.

        Returns:
            Per layer, keys and values [B, Hkv, S, C].
        """
        by = self.rotation(positions)
        kept = []
        for layer in self.layers:
            keys, values = layer.self_attn.keys_values(fused)
            kept.append((turn(keys, by), values))
        return kept

    def block(self, anchors: Tensor, width: int) -> Tensor:
        """[B, W] int64: each anchor [B] and the masks after it."""
        masks = anchors.new_full((anchors.shape[0], width - 1), self.config.mask_token)
        return torch.cat([anchors[:, None], masks], dim=1)

    def denoise(self, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass over block slots.

        Args:
            embedded: [B, N, D], embeddings of anchors and masks.
            positions: [B, N] int64.
            attend: which keys each slot sees; called once a layer, from the first to the last.

        Returns:
            [B, N, D] after the final norm: input of the target's head.
        """
        states, num_heads = embedded, self.config.num_heads
        cos, sin = self.rotation(positions)
        by = (cos.to(embedded.dtype), sin.to(embedded.dtype))
        for layer in self.layers:
            attention = layer.self_attn
            normed = layer.input_layernorm(states)
            keys, v = attention.keys_values(normed)
            both = turn(torch.cat([attention.queries(normed), keys], 1), by)  # in one go
            q, k = both[:, :num_heads], both[:, num_heads:]
            attended = attend(q, k, v).transpose(1, 2).flatten(2)  # [B, N, H*C]
            states = states + attention.o_proj(attended)
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        return self.norm(states)

    def read_out(self, states: Tensor) -> Tensor:
        """[B, W, D] states of whole blocks to [B, drafts, D], one a drafted token in order."""
        return states if self.config.is_shifted else states[:, 1:]


def default_taps(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """The paper's evenly spaced layers, from the second to the third last, as taps.

    A rounding tie goes to the even layer; checkpoints store the list and never compute it again.

    Example:
        >>> default_taps(30), default_taps(36)
        ((2, 9, 15, 21, 28), (2, 10, 18, 26, 34))
        >>> default_taps(4)
        (1, 2, 3)
    """
    if num_layers < count + 3:
        return tuple(range(1, max(2, num_layers)))[-count:]
    step = (num_layers - 4) / (count - 1)
    return tuple(round(1 + i * step) + 1 for i in range(count))


def choose_mask_token(
    spare_ids: tuple[int, ...], *, vocab_size: int, num_rows: int, name: str
) -> int:
    """An id that has an embedding but never occurs in text.

    The first row that only pads the embedding, else the last special token that neither chats nor
    ends of answers use: of a tokenizer's spare tokens the last are the least likely to have been
    trained on.

    Args:
        spare_ids: special tokens without a use in chats, ascending.
        vocab_size: V, ids that can be emitted.
        num_rows: rows of the embedding.
        name: the target's, for the message.

    Raises:
        SettingError: there is none.

    Example:
        >>> choose_mask_token((3, 4), vocab_size=10, num_rows=16, name="a")
        10
        >>> choose_mask_token((3, 4), vocab_size=10, num_rows=10, name="a")
        4
    """
    if num_rows > vocab_size:
        return vocab_size
    if not spare_ids:
        raise SettingError(
            "mask token",
            f"missing: every one of the {num_rows} ids of {name} may occur in text",
            "an id with an embedding that never occurs",
            "name one that your texts never hold with --set mask_token=ID",
        )
    return spare_ids[-1]
