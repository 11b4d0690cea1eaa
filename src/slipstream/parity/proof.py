"""Proof of a conversion: a drafter says the same before and after, on real features of its target.

What is compared is logits. Where they part, the two readings are laid beside each other and the
cause is named: layer ids, vocabulary map, RoPE base, a norm, a tensor. A conversion cannot know
whether its source said the truth about itself; `doubts` asks that separately: another reading of
the same weights that predicts the target clearly better is the likelier truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from slipstream.errors import CheckpointError
from slipstream.formats.checkpoint import Checkpoint
from slipstream.models.readout import Readout
from slipstream.parity.drafted import drafted
from slipstream.parity.texts import Text
from slipstream.parity.variants import variants

TOLERANCE = 1e-5
"""Largest difference of logits, relative to the largest logit where that is above 1."""
CLEARLY = 0.02
"""Nats by which another reading must predict the target better."""
NUM_ERRORS = 4.0
"""Standard errors of that gain over positions, besides."""
_CAUSES = {
    "taps": "layer ids",
    "rope_theta": "RoPE base",
    "rope_scaling": "RoPE scaling",
    "norm_features": "norm flags",
    "norm_each_tap": "norm flags",
    "norm_before_residual": "norm flags",
    "norm_output": "norm flags",
    "is_shifted": "read-out",
    "mask_token": "mask token",
    "rms_norm_eps": "epsilon of the norms",
}
_IGNORED = {"max_length", "borrows_head", "draft_vocab_size", "has_path_table", "path_rank"}
"""Fields that may differ between dialects without changing a logit."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared, and how closely it agrees.

    Args:
        max_logit_difference: largest absolute difference of two logits.
        largest_logit: for scale.
        num_positions: rows of logits compared.
        num_ids: draft ids compared, those of the source.
    """

    max_logit_difference: float
    largest_logit: float
    num_positions: int
    num_ids: int


def prove(before: Checkpoint, after: Checkpoint, texts: Sequence[Text], readout: Readout) -> Proof:
    """Compare a drafter before and after a conversion.

    Args:
        before: as read from the source.
        after: as read back from what was written.
        texts: with the target's hidden states.
        readout: the target's embedding and head, float32.

    Raises:
        CheckpointError: the logits differ, with the cause.
    """
    largest, difference, count, num_ids = 0.0, 0.0, 0, 0
    for text in texts:
        if max(_taps(after), default=0) >= text.hidden.shape[1]:
            raise CheckpointError(_told(before, after, "it reads a layer the target lacks"))
        ours, theirs = drafted(before, text, readout), drafted(after, text, readout)
        at = torch.searchsorted(theirs.ids, ours.ids).clamp_max(len(theirs.ids) - 1)
        is_same = ours.logits.shape[0] == theirs.logits.shape[0]
        if not is_same or not torch.equal(theirs.ids[at], ours.ids):
            raise CheckpointError(_told(before, after, "it drafts other ids or positions"))
        largest = max(largest, float(ours.logits.abs().max()))
        difference = max(difference, float((ours.logits - theirs.logits[:, at]).abs().max()))
        count, num_ids = count + len(ours.logits), len(ours.ids)
    if not difference <= TOLERANCE * max(1.0, largest):
        raise CheckpointError(_told(before, after, f"logits differ by {difference:.3g}"))
    return Proof(difference, largest, count, num_ids)


def causes(before: Checkpoint, after: Checkpoint) -> list[str]:
    """What two readings of one drafter disagree in, in words."""
    found = []
    ours, theirs = asdict(before.model.config), asdict(after.model.config)
    for name in ours.keys() & theirs.keys() - _IGNORED:
        if ours[name] != theirs[name]:
            found.append(f"{_CAUSES.get(name, name)}: {theirs[name]} in place of {ours[name]}")
    if before.vocabulary is not None and after.vocabulary is not None:
        mapped, also = before.vocabulary.target_ids, after.vocabulary.target_ids
        if not after.vocabulary.is_full and not torch.equal(mapped, also):
            found.append(f"vocabulary map: {len(mapped)} draft ids mean other tokens")
    ours, theirs = before.model.state_dict(), after.model.state_dict()
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if a.shape != b.shape or not torch.equal(a, b):
            kind = "norm" if "norm" in name else "tensor"
            found.append(f"{kind} {name} has other values")
    return sorted(found)


def doubts(checkpoint: Checkpoint, texts: Sequence[Text], readout: Readout) -> list[str]:
    """Readings of the same weights that predict the target clearly better, best first.

    Args:
        checkpoint: as read from the source.
        texts: with the target's hidden states and choices.
        readout: the target's embedding and head, float32.
    """
    if not hasattr(checkpoint.model.config, "rope_theta"):
        return []  # heads read one hidden state and no positions
    num_layers = texts[0].hidden.shape[1] - 1
    ours = torch.cat([drafted(checkpoint, t, readout).likelihood(t.best) for t in texts])
    found = []
    for variant in variants(checkpoint, num_layers=num_layers, target_base=None):
        if variant.check == "vocabulary map":
            continue  # other ids are judged on other tokens
        read = [drafted(variant.checkpoint, text, readout, variant.taps) for text in texts]
        theirs = [one.likelihood(text.best) for one, text in zip(read, texts, strict=True)]
        gain = torch.cat(theirs) - ours
        mean, error = float(gain.mean()), float(gain.std() / len(gain) ** 0.5)
        if mean > max(CLEARLY, NUM_ERRORS * error):
            found.append((mean, f"{variant.check}: {variant.what} predicts the target better"))
    return [text for _, text in sorted(found, reverse=True)]


def _taps(checkpoint: Checkpoint) -> tuple[int, ...]:
    return getattr(checkpoint.model.config, "taps", ())


def _told(before: Checkpoint, after: Checkpoint, what: str) -> str:
    """The failure with its causes."""
    named = "; ".join(causes(before, after)) or "no cause found in config or tensors"
    return f"the converted drafter is another one: {what}. {named}"
