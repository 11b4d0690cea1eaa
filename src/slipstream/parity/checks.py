"""The doctor's look at a drafter: one line a check, each naming what is wrong and what to do.

The drafter gets real features of a few answers; its score, the drafted tokens of a chain that the
target would accept, is compared with the score of every other reading of the same files
(`variants.py`) and on other texts: without the chat template, with thinking turned over, on the
user's own words. A reading that is clearly better than the configured one, by three standard
errors over the texts and by `CLEARLY`, is the fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import CheckpointError, DrafterMismatchError
from slipstream.formats.checkpoint import facts_of
from slipstream.models.readout import Readout
from slipstream.parity.decoding import compare, taps_of
from slipstream.parity.patient import Patient, error, mean, read_card
from slipstream.parity.variants import Variant, variants
from slipstream.train import recipes

CLEARLY = 0.04
"""Drafted tokens by which another reading of the files must beat the configured one."""
OTHER_TEXT = 0.2
"""The same on other texts, which are not the same tokens and so compare less exactly."""
NUM_ERRORS = 3.0
COVERED = 0.8
"""Share of the target's choices that a reduced vocabulary should at least hold."""
NAMES = (
    "files", "template", "mask", "layer ids", "norms", "RoPE base", "vocabulary map", "dtype",
    "thinking mode", "context length", "decoding",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at.

    Args:
        name: one of `NAMES`.
        ok: False when it explains a bad drafter.
        detail: what was found, and what to do about it.
    """

    name: str
    ok: bool
    detail: str


def examine(
    target: Any, method: str, folder: Path, questions: Sequence[str], *, num_tokens: int = 96
) -> list[Check]:
    """Every check of a drafter, in the order of `NAMES`; unreadable files end it early.

    Args:
        target: a loaded target.
        method: the drafter's method.
        folder: its files.
        questions: user texts to let the target answer.
        num_tokens: tokens of an answer.
    """
    recipe = recipes.get(method)
    readout = Readout(target.embedding().float().cpu(), target.head().float().cpu())
    try:
        checkpoint = recipe.layout.read(folder, target=facts_of(target))
        recipe.layout.check_target(checkpoint, target)
    except (CheckpointError, DrafterMismatchError) as failure:
        return [_unreadable(failure)]
    broken = [n for n, t in checkpoint.model.state_dict().items() if not bool(t.isfinite().all())]
    if broken:
        return [
            Check(
                "dtype", False,
                f"{broken[0]} holds NaN or infinity ({len(broken)} tensors do): overflowed when it "
                "was converted; write it anew from the trained weights, in bfloat16 or float32",
            )
        ]  # fmt: skip
    card = read_card(folder)
    wishes = {k: v for k, v in card.get("config", {}).items() if k in recipe.settings.model_fields}
    settings = recipe.settings(**wishes)
    try:
        recipe.objective(checkpoint, settings)
    except CheckpointError as failure:
        return [_unreadable(failure)]
    patient = Patient(
        target, method, folder, checkpoint, recipe, settings, readout, questions, num_tokens, card,
    )  # fmt: skip
    patient.texts = patient.answers(patient.prompts())
    patient.scores = patient.score(None, patient.texts)
    checks = [
        _files(patient), *_readings(patient), _template(patient), _mask(patient), _dtype(patient),
        _thinking(patient), _context(patient), _decoding(patient),
    ]  # fmt: skip
    found = {check.name: check for check in checks}
    return [found[name] for name in NAMES if name in found]


def _unreadable(failure: CheckpointError | DrafterMismatchError) -> Check:
    """Files that cannot be read; a vocabulary map that contradicts itself is called so."""
    text = f"{failure}; {failure.hint}" if failure.hint else str(failure)
    is_map = "d2t" in text or "t2d" in text or "draft vocabulary" in text
    return Check("vocabulary map" if is_map else "files", False, text)


def _files(patient: Patient) -> Check:
    """The files are there; how good the drafter is on the target's answers."""
    score = mean(patient.scores)
    tokens = sum(len(text.tokens) - text.num_prompt for text in patient.texts)
    said = f"{patient.method}: a chain has {score:.2f} of its tokens accepted on {tokens} of text"
    if score < 0.1:
        return Check("files", False, f"{said}: untrained, or trained for another target")
    return Check("files", True, said)


def _readings(patient: Patient) -> list[Check]:
    """Layer ids, norms, RoPE base and vocabulary map: the configured reading against others."""
    rope = patient.target.draft_shape().get("rope_theta")
    ours = mean(patient.scores)
    better: dict[str, tuple[float, Variant]] = {}
    for variant in variants(
        patient.checkpoint, num_layers=patient.target.spec.num_layers, target_base=rope
    ):
        theirs = patient.score(variant, patient.texts)
        gains = [b - a for a, b in zip(patient.scores, theirs, strict=False)]
        gain = mean(gains)
        if gain > max(CLEARLY, NUM_ERRORS * error(gains)):
            before = better.get(variant.check)
            if before is None or gain > before[0]:
                better[variant.check] = gain, variant
    cause = max(better, key=lambda name: better[name][0], default=None)
    checks = []
    config = patient.checkpoint.model.config
    configured = {
        "layer ids": f"taps {', '.join(map(str, taps_of(patient.checkpoint)))}",
        "norms": "as stored",
        "RoPE base": f"{getattr(config, 'rope_theta', 'none')}",
        "vocabulary map": _covered(patient)[0],
    }
    for name, what in configured.items():
        if name == cause:
            gain, variant = better[name]
            detail = (
                f"{variant.what} predicts clearly better ({ours + gain:.2f} of a chain accepted, "
                f"{ours:.2f} as configured): the files say it wrong"
            )
            checks.append(Check(name, False, detail))
        elif name == "vocabulary map" and not _covered(patient)[1]:
            checks.append(Check(name, False, f"{what}: the map is not the one of the training"))
        else:
            checks.append(Check(name, True, f"{what}: no other reading is better"))
    return checks


def _covered(patient: Patient) -> tuple[str, bool]:
    """What share of the target's choices the vocabulary holds, and whether that will do."""
    vocabulary = getattr(patient.checkpoint, "vocabulary", None)
    if vocabulary is None or vocabulary.is_full:
        return "the target's whole vocabulary", True
    known = vocabulary.mask()
    said = torch.cat([text.best[text.num_prompt - 1 : -1] for text in patient.texts])
    share = float(known[said].float().mean())
    return f"{len(vocabulary)} ids hold {share:.0%} of the target's choices", share >= COVERED


def _template(patient: Patient) -> Check:
    """The chat template of the training is the one that is served."""
    tokenizer = patient.target.tokenizer
    trained = patient.card.get("template")
    if trained is not None and trained != tokenizer.fingerprint:
        return Check(
            "template", False,
            f"trained under template {trained}, the model now has {tokenizer.fingerprint}: restore "
            "that template, or extract and train again",
        )  # fmt: skip
    if not tokenizer.has_template:
        return Check("template", True, "the model has none: prompts are plain text")
    texts = patient.answers(patient.raw_prompts())
    raw, ours = mean(patient.score(None, texts)), mean(patient.scores)
    if raw > ours + OTHER_TEXT:
        return Check(
            "template", False,
            f"predicts better without the chat template ({raw:.2f} against {ours:.2f} of a chain): "
            "trained on other text than is served; extract from chats and train again",
        )  # fmt: skip
    return Check("template", True, f"{ours:.2f} of a chain with it, {raw:.2f} without")


def _mask(patient: Patient) -> Check:
    """The training learned the assistant's words, not the user's."""
    asked = mean(patient.score(None, patient.texts, on_prompt=True))
    ours = mean(patient.scores)
    if asked > 2 * ours + OTHER_TEXT:
        return Check(
            "mask", False,
            f"predicts prompts ({asked:.2f} of a chain) better than answers ({ours:.2f}): the loss "
            "mask covered the wrong side; look with `slipstream data inspect`, and train again",
        )  # fmt: skip
    return Check("mask", True, f"{ours:.2f} of a chain on answers, {asked:.2f} on prompts")


def _dtype(patient: Patient) -> Check:
    """The served number type does not spoil the weights."""
    dtype = patient.target.spec.dtype
    name = str(dtype).removeprefix("torch.")
    model = patient.checkpoint.model
    exact = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        model.load_state_dict({key: value.to(dtype).float() for key, value in exact.items()})
        is_finite = all(bool(value.isfinite().all()) for value in model.state_dict().values())
        rounded = mean(patient.score(None, patient.texts)) if is_finite else 0.0
    finally:
        model.load_state_dict(exact)
    ours = mean(patient.scores)
    if ours - rounded > CLEARLY:
        return Check(
            "dtype", False,
            f"in {name}, as it is served, {rounded:.2f} of a chain, in float32 {ours:.2f}: serve "
            "with --dtype float32",
        )  # fmt: skip
    return Check("dtype", True, f"{name} as served: {rounded:.2f} of a chain, float32 {ours:.2f}")


def _thinking(patient: Patient) -> Check:
    """The thinking mode of the training is the one that is served."""
    tokenizer = patient.target.tokenizer
    if not tokenizer.has_template or "enable_thinking" not in tokenizer.template_text:
        return Check("thinking mode", True, "the chat template has none")
    is_on = bool(tokenizer.template_mode.get("enable_thinking", True))
    here, there = ("on", "off") if is_on else ("off", "on")
    trained = patient.card.get("template_mode", {}).get("enable_thinking")
    if trained is not None and bool(trained) != is_on:
        return Check(
            "thinking mode", False,
            f"trained with thinking {there}, served with thinking {here}: use the same mode",
        )  # fmt: skip
    mode = {**tokenizer.template_mode, "enable_thinking": not is_on}
    other = mean(patient.score(None, patient.answers(patient.prompts(mode))))
    ours = mean(patient.scores)
    detail = f"{ours:.2f} of a chain with thinking {here} (as served), {other:.2f} with it {there}"
    if other > ours + OTHER_TEXT:
        return Check("thinking mode", False, f"{detail}: trained in the other mode")
    return Check("thinking mode", True, detail)


def _context(patient: Patient) -> Check:
    """The drafter was trained as far as it is used."""
    trained = getattr(patient.checkpoint.model.config, "max_length", None)
    serves = patient.target.spec.max_length
    longest = max(len(text.tokens) for text in patient.texts)
    if trained is None:
        return Check("context length", True, f"no limit of its own, the target has {serves}")
    if trained < longest:
        return Check(
            "context length", False,
            f"made for {trained} positions, these texts have {longest} and the target {serves}: "
            "the configuration is wrong, or train with longer rows (--max-length)",
        )  # fmt: skip
    return Check("context length", True, f"made for {trained} positions, the target has {serves}")


def _decoding(patient: Patient) -> Check:
    """The engine accepts what teacher forcing says, at the same positions."""
    found = compare(
        patient.target,
        patient.method,
        patient.folder,
        patient.checkpoint,
        patient.recipe.objective(patient.checkpoint, patient.settings),
        patient.readout,
        patient.prompts(),
        num_tokens=patient.num_tokens,
    )
    if found is None:
        return Check("decoding", True, "no chain to compare with teacher forcing")
    said = (
        f"first drafts right at {found.decoded[0]:.2f} of {found.num_starts} steps, "
        f"{found.text[0]:.2f} by teacher forcing (tolerance {found.tolerance:.2f})"
    )
    return Check("decoding", found.is_kept, said)
