"""What hiding the draft behind the target's last layers would give: Mirror-SD, from its parts.

Paper: Bhendawade et al. 2025, Mirror Speculative Decoding, arXiv:2510.13161, section 3.1. An early
exit of the target names the likeliest next tokens at every drafted place; on a second device the
drafter writes a block after each of them while the target runs its remaining layers. Where the
target's own token was among them, the next block is there already; else it is drafted as ever. What
is verified does not change, so neither does what is said.
Differs: computed, not run, since it takes two devices. How often the exit is right, how long a pass
and a draft take and how much is accepted are measured here; the exchange between the devices and
the drafts after further candidates are free, so what comes out is the most there is to gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.engine.request import Result


@dataclass(frozen=True, slots=True)
class Parts:
    """What was measured of a drafter on one device.

    Args:
        plain_seconds: a step of plain decoding.
        draft_seconds: drafting, a step.
        target_seconds: the pass over the draft.
        other_seconds: the rest of a step.
        tau: mean accepted length, tokens/pass.
        num_layers: of the target.
    """

    plain_seconds: float
    draft_seconds: float
    target_seconds: float
    other_seconds: float
    tau: float
    num_layers: int

    @property
    def serial_seconds(self) -> float:
        """A step that drafts, then verifies."""
        return self.draft_seconds + self.target_seconds + self.other_seconds

    def mirrored_seconds(self, layer: int, hits: float) -> float:
        """A step whose draft began at the exit behind `layer` layers of the pass before.

        Args:
            layer: of the early exit, in 1..num_layers.
            hits: share of steps whose token was among the exit's candidates.
        """
        early = self.target_seconds * layer / self.num_layers
        hidden = early + max(self.target_seconds - early, self.draft_seconds)
        drafted_again = self.target_seconds + self.draft_seconds
        return hits * hidden + (1 - hits) * drafted_again + self.other_seconds

    def speedup(self, seconds: float) -> float:
        """Over plain decoding, of steps that take so long."""
        return self.tau * self.plain_seconds / seconds


def steps_end(result: Result) -> list[int]:
    """Places in prompt and answer of the tokens that the target itself said at its steps' ends.

    Args:
        result: of a request with a trace.
    """
    place, ends = len(result.prompt_ids), []
    for step in result.steps:
        place += len(step.emitted)
        if len(step.emitted) == step.verdict.num_emitted:  # no stopping rule cut it
            ends.append(place)
    return ends


@torch.no_grad()
def exit_hits(
    target: object, texts: Iterable[tuple[Sequence[int], Sequence[int]]], exits: Sequence[int],
    counts: Sequence[int],
) -> dict[tuple[int, int], float]:  # fmt: skip
    """How often a token is among the likeliest of an early exit: the head on an inner state.

    Args:
        target: loaded; its final norm stands before the head at every exit.
        texts: tokens, and the places of those that are looked for, each 1 or more.
        exits: layers that have run, each below the target's own number.
        counts: candidates.

    Returns:
        By exit and count, the share of the places.
    """
    norm, size = target.final_norm(), target.spec.hidden_size
    head = target.head()[: target.spec.vocab_size]
    eps = target.draft_shape()["rms_norm_eps"]
    ranks: dict[int, list[Tensor]] = {layer: [] for layer in exits}
    for tokens, places in texts:
        if not places:
            continue
        ids = torch.tensor([list(tokens)])
        features = target.extract(ids, tuple(exits)).features[0]  # [T, K*D]
        at = torch.tensor(places) - 1
        wanted = ids[0][torch.tensor(places)].to(features.device)
        for layer, state in zip(exits, features[at].split(size, -1), strict=True):
            logits = F.linear(_normed(state, norm, eps).to(head.dtype), head).float()
            own = logits.gather(-1, wanted[:, None])
            ranks[layer].append((logits > own).sum(-1))
    every = {layer: torch.cat(found) for layer, found in ranks.items()}
    return {
        (layer, count): float((rank < count).float().mean())
        for layer, rank in every.items()
        for count in counts
    }


def _normed(state: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return state
    return F.rms_norm(state.float(), state.shape[-1:], weight.float(), eps)
