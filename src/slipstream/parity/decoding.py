"""Decoding against teacher forcing, at the same positions.

Training reports the joint prefix accuracy over every position of a text; decoding starts its
steps only where the one before ended, which is where drafting is harder. So the two part for an
honest reason, and a leak, a wrong layer or a wrong template hides behind it. Here each step of a
decoded chain is put beside what the objective says at exactly that step's root: what is left
between the two is rounding, or a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream import assemble, methods
from slipstream.data.batches import Batch
from slipstream.models.readout import Readout
from slipstream.parity.texts import Text, batch_of, look
from slipstream.train.objectives.protocol import Loss, Objective

TOLERANCE = 0.05
"""Share of steps that rounding may turn: the drafter is served in the target's number type."""
MAX_STARTS = 48
ROWS = 8


@dataclass(frozen=True, slots=True)
class Parity:
    """Joint prefix accuracy by depth, decoded and teacher-forced at the same roots.

    Args:
        decoded: [K] shares of steps whose first 1..K drafts were all accepted.
        text: [K] the same according to the objective.
        num_starts: steps compared.
        texts: the decoded answers as the target sees them.
    """

    decoded: tuple[float, ...]
    text: tuple[float, ...]
    num_starts: int
    texts: tuple[Text, ...]

    @property
    def tolerance(self) -> float:
        """Largest difference that is not called a fault: 5 points and two steps."""
        return TOLERANCE + 2 / self.num_starts

    @property
    def gap(self) -> float:
        """Largest difference of any depth."""
        return max(abs(a - b) for a, b in zip(self.decoded, self.text, strict=True))

    @property
    def is_kept(self) -> bool:
        """Whether decoding does what training says."""
        return self.gap <= self.tolerance


@torch.no_grad()
def compare(
    target: Any,
    method: str,
    drafter: Path,
    checkpoint: Any,
    objective: Objective,
    readout: Readout,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
) -> Parity | None:
    """Decode prompts with chains and ask the objective about every step.

    Args:
        target: a loaded target.
        method: the drafter's method.
        drafter: its folder, as it is served.
        checkpoint: the same drafter as training sees it.
        objective: what it is trained with.
        readout: the target's embedding and head, float32.
        prompts: token ids.
        num_tokens: tokens to decode of each prompt.

    Returns:
        None where there is nothing to compare: the method drafts no chains, the answers are too
        short, or the objective counts other positions than chains start at.
    """
    record = methods.get(method)
    if "chain" not in record.trees or "walk" not in record.verifiers:
        return None
    model, taps = checkpoint.model, taps_of(checkpoint)
    near = readout.to(next(model.parameters()).device)  # once, not for every batch
    depth = _depth(model, objective, near, taps, look(target, readout, prompts[0], ()))
    engine = assemble.load(
        target, method, drafter=drafter, tree="chain", verifier="walk", depth=depth
    )
    texts: list[Text] = []
    starts: list[tuple[Text, int, int]] = []  # text, root, accepted
    for result in engine.generate(
        [list(prompt) for prompt in prompts], max_new_tokens=num_tokens, trace=True
    ):
        text = look(target, readout, result.prompt_ids, result.token_ids)
        texts.append(text)
        root = text.num_prompt
        for step in result.steps:
            is_whole = step.tree.num_drafted == depth
            if is_whole and root + depth < len(text.tokens):
                starts.append((text, root, step.verdict.num_accepted))
            root += len(step.emitted)
    starts = starts[:: max(1, len(starts) // MAX_STARTS)][:MAX_STARTS]
    if not starts:
        return None
    depths = torch.arange(1, depth + 1)
    accepted = torch.tensor([count for _, _, count in starts])
    decoded = (accepted[:, None] >= depths).float().mean(0)
    hits = _teacher_forced(model, objective, near, taps, starts, depth)
    if hits is None:
        return None
    return Parity(
        tuple(round(x, 4) for x in decoded.tolist()),
        tuple(round(x, 4) for x in hits),
        len(starts),
        tuple(texts),
    )


def _teacher_forced(
    model: Any,
    objective: Objective,
    readout: Readout,
    taps: tuple[int, ...],
    starts: Sequence[tuple[Text, int, int]],
    depth: int,
) -> list[float] | None:
    """Joint prefix accuracy at the starts: each in a row that supervises its successors alone."""
    hits, count = torch.zeros(1), 0.0
    for first in range(0, len(starts), ROWS):
        samples = []
        for text, root, _ in starts[first : first + ROWS]:
            places = torch.arange(len(text.tokens))
            mask = (places > root) & (places <= root + depth)
            samples.append(text.sample(taps, mask, end=root + depth + 1))
        loss = judged(model, objective, batch_of(samples), readout)
        hits, count = hits + loss.prefix_hits.float().cpu(), count + float(loss.prefix_count)
    return (hits / count).tolist() if round(count) == len(starts) else None


def _depth(
    model: Any, objective: Objective, readout: Readout, taps: tuple[int, ...], text: Text
) -> int:
    """How many drafted tokens the objective's prefix accuracy covers."""
    every = torch.ones(len(text.tokens), dtype=torch.bool)
    loss = judged(model, objective, batch_of([text.sample(taps, every)]), readout)
    return loss.prefix_hits.shape[0]


def judged(model: Any, objective: Objective, batch: Batch, readout: Readout) -> Loss:
    """The objective's loss in evaluation mode, the network left as it was and where it is."""
    was_training, device = model.training, next(model.parameters()).device
    batch, readout = batch.to(device), readout.to(device)
    model.eval()
    with torch.no_grad():
        loss = objective(model, batch, readout)
    model.train(was_training)
    return loss


def taps_of(checkpoint: Any) -> tuple[int, ...]:
    """The hidden states a drafter reads."""
    return tuple(getattr(checkpoint.model.config, "taps", ()))
