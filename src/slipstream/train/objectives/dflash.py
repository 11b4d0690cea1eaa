"""DFlash's objective: many masked blocks at random anchors of packed texts, in one pass.

Paper: Chen et al. 2026, DFlash, arXiv:2602.06036, section 4 (anchors, mask, decayed loss); D-PACE,
arXiv:2605.18810 (weights by expected acceptance).
Differs: labels are the target's distributions at the supervised positions, mixed with its own
choice as far as `hard` says, where the paper has the text's tokens; attention is computed group of
anchors by group, never over all blocks at once; anchors are keyed by the batch's number, so that
runs resume bit for bit; with more than one round, later anchors lie where the drafter would stop.

A network with a path head is judged with it, given the text's own token before each drafted one
(DSpark, arXiv:2607.05147: teacher forcing).

A block at anchor t sees the fused features of its own text strictly before t, which is what
exists when t is the last emitted token, and its own slots in both directions; nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.data.batches import Batch
from slipstream.models.dflash import DFlash
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.objectives.block_attention import BlockAttention
from slipstream.train.objectives.protocol import Loss
from slipstream.train.objectives.soft_cross_entropy import soft_cross_entropy

Weighting = Literal["decay", "pace"]


class BlockDiffusion:
    """Denoises blocks at random anchors and sums their position-weighted losses.

    Args:
        vocabulary: draft ids and what they mean.
        density: block slots per token of the batch; 1 makes blocks cost about what texts do.
        gamma: slot j weighs exp(-(j-1)/gamma); the paper has 4 for blocks of 8.
        weighting: `decay`, or `pace`: by how much a slot's acceptance adds to the accepted length.
        hard: share of the target's own choice in the labels, the rest is its distribution.
        rounds: simulated rounds; the anchors of each round after the first are the tokens that
            the drafter's blocks of the round before would have stopped at.
        narrow: share of training batches whose blocks are narrower than the widest, of a width
            drawn at random: more anchors for the first slots, on which all others hang, and
            practice for narrower blocks. Evaluations have the widest.
        only_path: the block network stays as it is, only its path head learns.
        seed: of the anchors.
    """

    def __init__(
        self,
        vocabulary: DraftVocabulary,
        *,
        density: float = 1.0,
        gamma: float = 4.0,
        weighting: Weighting = "decay",
        hard: float = 0.0,
        rounds: int = 1,
        narrow: float = 0.0,
        only_path: bool = False,
        seed: int = 0,
    ) -> None:
        self.vocabulary = vocabulary
        self.density, self.gamma, self.weighting = density, gamma, weighting
        self.hard, self.rounds, self.seed = hard, rounds, seed
        self.narrow, self.only_path = narrow, only_path
        self._draft_ids = vocabulary.draft_ids()

    def __call__(self, model: DFlash, batch: Batch, readout: Readout) -> Loss:
        """Loss of one packed batch; see `Loss`. Prefix hits are those of the first round."""
        text = Text.of(batch)
        labels = _Labels(batch, readout, self.vocabulary, self._draft_ids, self.hard)
        learns = torch.is_grad_enabled()
        with torch.set_grad_enabled(learns and not self.only_path):
            fused = model.fuse(batch.features.flatten(0, 1)[None])  # [1, P, D]
            context = model.context(fused, text.positions[None])
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + batch.number)
        width = self._width(model, generator)
        count = max(1, round(self.density * batch.num_tokens / width) // self.rounds)
        anchors = self._anchors(text, count, generator)
        losses, reach = [], None
        for index in range(self.rounds):
            if index:
                anchors = text.valid_among((anchors + reach + 1).unique())
            if not len(anchors):
                break
            with torch.set_grad_enabled(learns and not self.only_path):
                states = block_states(model, text, anchors, context, readout, width)
            if model.path is not None:  # the text's own token before each drafted one
                states = states + model.path(readout.embed(text.window(anchors, states.shape[1])))
            outcome = self._judge(states, text, anchors, labels)
            reach = outcome.hits.sum(1)
            losses.append(outcome)
        return self._sum(losses, model)

    def _width(self, model: DFlash, generator: torch.Generator) -> int:
        """Slots of this batch's blocks."""
        widest, least = model.config.width, model.config.width_for(1)
        is_narrow = float(torch.rand((), generator=generator)) < self.narrow
        if not (is_narrow and model.training and widest > least):
            return widest
        return int(torch.randint(least, widest, (), generator=generator))

    def _anchors(self, text: Text, count: int, generator: torch.Generator) -> Tensor:
        """[A] int64, ascending: flat positions, drawn without replacement."""
        valid = text.valid.nonzero()[:, 0]
        order = torch.randperm(len(valid), generator=generator)[:count]  # drawn alike everywhere
        return valid[order.to(valid.device)].sort().values

    def _judge(self, states: Tensor, text: Text, anchors: Tensor, labels: _Labels) -> _Outcome:
        """Loss and hits of the blocks of a round."""
        num_drafts = states.shape[1]
        slots = torch.arange(num_drafts, device=anchors.device)
        at = anchors[:, None] + slots  # [A, J] where each token's label lies
        supervised = text.follows(at)
        counted = supervised & (labels.choice_at(at) >= 0)  # [A, J]
        probs, rows = labels.probs_at(at[counted])
        weights = self._decay(num_drafts, at.device).expand_as(at)[counted]
        inside = states[counted]  # [M, D]
        if self.weighting == "pace":
            weights = self._pace(inside, counted, labels, at)[counted]
        said = soft_cross_entropy(inside, labels.head, probs, rows, weights)
        hit = torch.zeros_like(counted)
        hit[counted] = said.choice == labels.choice_at(at[counted])
        return _Outcome(
            said.loss, weights.sum(), hit.long().cumprod(1).bool(), supervised.all(1),
            counted.sum(),
        )  # fmt: skip

    def _decay(self, num_drafts: int, device: torch.device) -> Tensor:
        """[J] weights of the slots."""
        return torch.exp(-torch.arange(num_drafts, device=device) / self.gamma)

    @torch.no_grad()
    def _pace(self, inside: Tensor, counted: Tensor, labels: _Labels, at: Tensor) -> Tensor:
        """[A, J] weights: the expected accepted tokens that hang on each slot.

        With s = (1 + q) / 2 and q the drafter's probability of the target's choice, a slot weighs
        the sum over it and all later slots of the product of s up to there.
        """
        q = torch.zeros(at.shape, device=at.device)
        logits = F.linear(inside, labels.head.to(inside.dtype)).float()
        chosen = logits.gather(1, labels.choice_at(at[counted])[:, None])[:, 0]
        q[counted] = (chosen - logits.logsumexp(-1)).exp()
        survival = ((1 + q) / 2).cumprod(1) * counted
        return survival.flip(1).cumsum(1).flip(1)

    def _sum(self, outcomes: list[_Outcome], model: DFlash) -> Loss:
        """The rounds' losses as one; only blocks of the widest kind count as prefixes.

        The loop adds hits over batches and processes, so they have one length whatever was drawn.
        """
        num_drafts = model.config.num_drafts(model.config.width)
        if not outcomes:
            total = sum(parameter.sum() for parameter in model.parameters()) * 0
            nothing = total.detach().new_zeros(())
            return Loss(total, {}, nothing, nothing.new_zeros(num_drafts), nothing)
        weight = torch.stack([o.weight for o in outcomes])
        total = (torch.stack([o.loss for o in outcomes]) * weight).sum() / weight.sum()
        first = outcomes[0]
        whole = first.is_whole & (first.hits.shape[1] == num_drafts)
        parts = {f"loss_round_{i + 1}": o.loss.detach() for i, o in enumerate(outcomes)}
        hits = first.hits[whole].sum(0).float()
        return Loss(
            total=total,
            parts=parts,
            num_supervised=torch.stack([o.num_counted for o in outcomes]).sum(),
            prefix_hits=F.pad(hits, (0, num_drafts - len(hits))),
            prefix_count=whole.sum().float(),
        )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a round of blocks came to."""

    loss: Tensor  # [] nats
    weight: Tensor  # [] sum of the slots' weights
    hits: Tensor  # [A, J] bool, slot j and all before it are the target's choice
    is_whole: Tensor  # [A] bool, every slot is supervised
    num_counted: Tensor  # [] slots in the loss


@dataclass(frozen=True, slots=True)
class Text:
    """A packed batch laid end to end; a flat position is row * T + position in the row.

    Args:
        tokens: [P] int64.
        positions: [P] int64, position within the text.
        number: [P] int64, a number of its own for every text, -1 where padded.
        supervised: [P] bool.
        valid: [P] bool, where an anchor may lie: supervised, its successor too, and not a first
            token, which has no context.
    """

    tokens: Tensor
    positions: Tensor
    number: Tensor
    supervised: Tensor
    valid: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Text:
        """Lay a batch out."""
        rows, length = batch.tokens.shape
        row = torch.arange(rows, device=batch.documents.device)[:, None]
        number = batch.documents + (length + 1) * row
        number = number.masked_fill(batch.documents < 0, -1).flatten()
        supervised = batch.loss_mask.flatten() & (number >= 0)
        next_one = torch.zeros_like(supervised)
        next_one[:-1] = supervised[1:] & (number[1:] == number[:-1])
        positions = batch.positions.flatten()
        valid = supervised & next_one & (positions > 0)
        return cls(batch.tokens.flatten(), positions, number, supervised, valid)

    def follows(self, at: Tensor) -> Tensor:
        """[A, J] bool: the token after each place is supervised and of the anchor's text."""
        last = len(self.tokens) - 1
        after = (at + 1).clamp(max=last)
        same = self.number[after] == self.number[at[:, :1]]
        return (at < last) & same & self.supervised[after]

    def window(self, anchors: Tensor, length: int) -> Tensor:
        """[A, length] int64 tokens from each anchor on; past the end the last one."""
        at = anchors[:, None] + torch.arange(length, device=anchors.device)
        return self.tokens[at.clamp(max=len(self.tokens) - 1)]

    def valid_among(self, anchors: Tensor) -> Tensor:
        """Those of the flat positions where an anchor may lie."""
        anchors = anchors[anchors < len(self.tokens)]
        return anchors[self.valid[anchors]]


def block_states(
    model: DFlash,
    text: Text,
    anchors: Tensor,
    context: list[tuple[Tensor, Tensor]],
    readout: Readout,
    width: int,
) -> Tensor:
    """[A, J, D] inputs of the head for every drafted token of the blocks at [A] flat anchors."""
    tokens = model.block(text.tokens[anchors], width)  # [A, W]
    slots = torch.arange(width, device=anchors.device)
    positions = text.positions[anchors][:, None] + slots
    attend = BlockAttention(context, text.number, anchors, width)
    states = model.denoise(readout.embed(tokens.view(1, -1)), positions.view(1, -1), attend)
    return model.read_out(states.view(len(anchors), width, -1))


class _Labels:
    """What the target says after each place, over the draft vocabulary."""

    def __init__(
        self,
        batch: Batch,
        readout: Readout,
        vocabulary: DraftVocabulary,
        draft_ids: Tensor,
        hard: float,
    ) -> None:
        self.hard = hard
        self.choice = draft_ids[batch.best.flatten()]  # [P] int64, -1 outside the vocabulary
        self.hidden = batch.last_hidden.flatten(0, 1)
        self.head = readout.head[vocabulary.target_ids]  # [U, D]
        if torch.is_autocast_enabled(self.head.device.type):
            self.head = self.head.to(torch.get_autocast_dtype(self.head.device.type))

    def choice_at(self, at: Tensor) -> Tensor:
        """Draft ids of the target's choices after these places; those past the end say -1."""
        last = len(self.choice) - 1
        return self.choice[at.clamp(max=last)].masked_fill(at > last, -1)

    @torch.no_grad()
    def probs_at(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """[R, U] distributions of the distinct places among [M], and [M] the row of each."""
        places, rows = at.unique(return_inverse=True)
        hidden = self.hidden[places]
        logits = F.linear(hidden.to(self.head.dtype), self.head)
        wide = logits.float() if logits.dtype != torch.float64 else logits
        probs = wide.softmax(-1)
        if self.hard:
            probs *= 1 - self.hard
            index = self.choice[places].clamp(min=0)[:, None]
            probs.scatter_add_(1, index, torch.full_like(index, self.hard, dtype=probs.dtype))
        return probs, rows
