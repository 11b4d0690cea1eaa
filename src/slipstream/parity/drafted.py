"""What a drafter says on a text it is shown: logits at many positions, for any method's network.

Teacher-forced and without a cache, in float32 and plain torch: the same function of a checkpoint
whatever file it came from, so that two readings of a drafter can be compared number by number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.formats.checkpoint import (
    Checkpoint,
    DFlashCheckpoint,
    Eagle3Checkpoint,
    EagleCheckpoint,
    LanguageCheckpoint,
    PEagleCheckpoint,
)
from slipstream.models.readout import Readout
from slipstream.parity.texts import Text

NUM_STEPS = 2  # the second reads states that were handed on, not features
NUM_SLOTS = 3  # masked ones behind the pairs of a P-EAGLE drafter
NUM_ANCHORS = 4

causal = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)


@dataclass(frozen=True, slots=True)
class Drafted:
    """Logits of a drafter on one text.

    Args:
        ids: [U] int64, the target id of each logit.
        logits: [P, U].
        places: [P] int64: what row p predicts is the target's choice after this position.
    """

    ids: Tensor
    logits: Tensor
    places: Tensor

    def likelihood(self, best: Tensor) -> Tensor:
        """[P'] log q of the target's choices, at the places whose choice has a draft id.

        Args:
            best: [T] int64, the target's choice after each position.
        """
        wanted = best[self.places]  # [P]
        at = torch.searchsorted(self.ids, wanted).clamp_max(len(self.ids) - 1)
        known = self.ids[at] == wanted
        log_q = self.logits.log_softmax(-1).gather(1, at[:, None])[:, 0]
        return log_q[known]


@torch.no_grad()
def drafted(
    checkpoint: Checkpoint, text: Text, readout: Readout, taps: tuple[int, ...] | None = None
) -> Drafted:
    """The logits of a drafter on a text.

    Args:
        checkpoint: of any method.
        text: tokens with all hidden states of the target.
        readout: the target's embedding and head, float32.
        taps: hidden states to read in place of the checkpoint's own.
    """
    if isinstance(checkpoint, Eagle3Checkpoint):
        model = checkpoint.model
        features = text.hidden[:, list(taps or model.config.taps)].flatten(1)
        return _pairs(checkpoint, model.fuse(features), model.logits, text, readout)
    if isinstance(checkpoint, PEagleCheckpoint):
        return _slots(checkpoint, taps or checkpoint.model.config.taps, text, readout)
    if isinstance(checkpoint, EagleCheckpoint):
        head = readout.head[checkpoint.vocabulary.target_ids]
        read = partial(F.linear, weight=head)
        return _pairs(checkpoint, text.last_hidden, read, text, readout)
    if isinstance(checkpoint, DFlashCheckpoint):
        return _blocks(checkpoint, taps or checkpoint.model.config.taps, text, readout)
    if isinstance(checkpoint, LanguageCheckpoint):
        return _language(checkpoint, text, readout)
    return _heads(checkpoint, text, readout)


def _language(checkpoint: LanguageCheckpoint, text: Text, readout: Readout) -> Drafted:
    """A language model: position t predicts x[t+1]."""
    model, places = checkpoint.model, torch.arange(len(text.tokens))
    states = model(readout.embed(text.tokens)[None], places[None], causal)
    return Drafted(checkpoint.vocabulary.target_ids, model.logits(states)[0], places)


def _pairs(checkpoint: Any, states: Tensor, read: Any, text: Text, readout: Readout) -> Drafted:
    """EAGLE's pairs: step s reads token x[i+1+s] and predicts x[i+2+s]."""
    model, count = checkpoint.model, len(text.tokens) - NUM_STEPS
    states, positions = states[None, :count], torch.arange(count)
    embed = _embed(model, readout)
    logits, places = [], []
    for step in range(NUM_STEPS):
        embedded = embed(text.tokens[1 + step : 1 + step + count])[None]
        states = model.step(states, embedded, positions[None] + step, causal)
        logits.append(read(states)[0])
        places.append(positions + 1 + step)
    return Drafted(checkpoint.vocabulary.target_ids, torch.cat(logits), torch.cat(places))


def _slots(
    checkpoint: PEagleCheckpoint, taps: tuple[int, ...], text: Text, readout: Readout
) -> Drafted:
    """P-EAGLE's pairs, which read a token and predict the one after it, and slots behind them."""
    model, count = checkpoint.model, len(text.tokens) - 1 - NUM_SLOTS
    features = text.hidden[:count, list(taps)].flatten(1)
    inputs = torch.cat([features, model.mask_hidden[0].expand(NUM_SLOTS, -1)])
    masked = torch.full((NUM_SLOTS,), model.config.mask_token)
    tokens = torch.cat([text.tokens[1 : 1 + count], masked])
    positions = torch.arange(len(tokens))
    embedded = _embed(model, readout)(tokens)
    states = model.step(model.fuse(inputs)[None], embedded[None], positions[None], causal)
    return Drafted(checkpoint.vocabulary.target_ids, model.logits(states)[0], positions + 1)


def _embed(model: Any, readout: Readout) -> Any:
    """The network's own embedding, else the target's."""
    own = getattr(model, "embed_tokens", None)
    return readout.embed if own is None else own


def _heads(checkpoint: Any, text: Text, readout: Readout) -> Drafted:
    """Medusa's heads: head h at position t predicts x[t+2+h]."""
    model, count = checkpoint.model, len(text.tokens)
    ids = torch.arange(len(readout.head))
    if checkpoint.vocabulary is not None:
        ids = checkpoint.vocabulary.target_ids
    project = None
    if model.config.borrows_head:
        project = partial(F.linear, weight=readout.head[ids])
    logits = model.logits(text.last_hidden, project)  # [heads, T, U]
    kept = [(logits[h, : count - 1 - h], torch.arange(1 + h, count)) for h in range(len(logits))]
    return Drafted(ids, torch.cat([k[0] for k in kept]), torch.cat([k[1] for k in kept]))


def _blocks(
    checkpoint: DFlashCheckpoint, taps: tuple[int, ...], text: Text, readout: Readout
) -> Drafted:
    """DFlash's blocks at a few anchors, each over the text before it."""
    model, ids = checkpoint.model, checkpoint.vocabulary.target_ids
    config, count = model.config, len(text.tokens)
    width = min(config.width, max(config.width_for(1), count - 1))
    drafts = config.num_drafts(width)
    head = readout.head[ids]
    last = count - drafts - 1
    anchors = sorted({max(1, round(last * (i + 1) / NUM_ANCHORS)) for i in range(NUM_ANCHORS)})
    logits, places = [], []
    for anchor in anchors:
        features = text.hidden[:anchor, list(taps)].flatten(1)[None]
        kept = iter(model.context(model.fuse(features), torch.arange(anchor)[None]))
        slots = readout.embed(model.block(text.tokens[anchor : anchor + 1], width))
        positions = torch.arange(anchor, anchor + width)[None]
        states = model.read_out(model.denoise(slots, positions, partial(_over_context, kept)))[0]
        said = F.linear(states, head)  # [drafts, U]
        before = text.tokens[anchor : anchor + drafts]  # the token before each drafted one
        if model.path is not None:
            codes = model.path.codes(readout.embedding)[before]
            said = said + codes @ model.path.rows(head).T
        logits.append(said[: len(before)])
        places.append(torch.arange(anchor, anchor + len(before)))
    return Drafted(ids, torch.cat(logits), torch.cat(places))


def _over_context(kept: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every slot sees the whole context and the whole block."""
    keys, values = next(kept)
    k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
