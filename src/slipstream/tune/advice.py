"""The limit in words: what speculation gains here, what holds it back, and what would help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.trees import sequoia
from slipstream.tune.optimum import PLAIN, WORTH, Plain, Prediction

MOST = 0.9  # share of the best gain from which lookup "already gives most of it"
ANSWER_TOKENS = 1_200_000
EPOCHS = 3
STEP_PASSES = 3.0  # forward and backward of a small drafter, against the target's forward alone
WIDE = 64  # tokens of the pass whose rate stands for wide passes
DRAFT_SHARE = 0.1  # of a target pass, of one level of a one-layer drafter
PARTS = {
    "draft": ("drafting", "a lighter or shallower drafter"),
    "pass": ("verification: wider passes take longer here", "a smaller budget, or faster hardware"),
    "other": ("overhead between the passes", "larger models, or a leaner loop"),
}


def explain(
    chosen: Prediction,
    by_method: Mapping[str, Prediction],
    plain: Plain,
    *,
    judged: Mapping[str, Mapping[str, Any]] | None = None,
    num_loops: int = 0,
) -> list[str]:
    """Sentences for people, the verdict first.

    Args:
        chosen: what is recommended.
        by_method: the best setting of every method.
        plain: plain decoding's costs.
        judged: setting's name to what it did on other prompts.
        num_loops: recorded answers left out because they end in a repetition loop.
    """
    said = [_verdict(chosen, by_method, judged or {})]
    fastest = max(by_method.values(), key=lambda one: one.speedup)
    if fastest.setting != PLAIN:
        said += _limits(fastest)
    said += _lookup(by_method, plain)
    if num_loops:
        said.append(
            f"{num_loops} recorded answers ended in a repetition loop and were left out: drafting "
            "a loop is easy and worth nothing."
        )
    return said


def _verdict(
    chosen: Prediction,
    by_method: Mapping[str, Prediction],
    judged: Mapping[str, Mapping[str, Any]],
) -> str:
    if chosen.setting != PLAIN:
        return (
            f"Use {chosen.setting.name}: {chosen.tau:.2f} tokens a pass should make decoding "
            f"{chosen.speedup:.2f} times as fast as plain decoding."
        )
    others = [one for one in by_method.values() if one.setting != PLAIN]
    if not others:
        return "Do not speculate here: nothing could be measured that drafts."
    near = max(others, key=lambda one: one.speedup)
    measured = judged.get(near.setting.name, {}).get("measured_speedup")
    if near.speedup >= WORTH and measured is not None:
        return (
            f"Do not speculate here: what looked best, {near.setting.name} (predicted "
            f"{near.speedup:.2f} times as fast as plain decoding), gave {measured:.2f} on the "
            "prompts that were kept aside."
        )
    return (
        f"Do not speculate here: the best setting, {near.setting.name}, would decode "
        f"{near.speedup:.2f} times as fast as plain decoding ({near.tau:.2f} tokens a pass), which "
        "is no gain."
    )


def _limits(one: Prediction) -> list[str]:
    """What holds a setting back, the largest first."""
    shares = (
        f"A step takes {1000 * one.step_seconds:.1f} ms: drafting {1000 * one.draft_seconds:.1f}, "
        f"the pass over {one.num_nodes + 1:.1f} tokens {1000 * one.pass_seconds:.1f} (over one "
        f"token {1000 * one.single_seconds:.1f}), the rest {1000 * one.other_seconds:.1f}."
    )
    free = {part: one.if_free(part) for part in PARTS}
    worst = max(free, key=lambda part: free[part])
    name, help_ = PARTS[worst]
    all_free = one.tau
    said = [shares]
    if free[worst] > 1.05 * one.speedup:
        said.append(
            f"The costliest part is {name}: without it the speed-up would be {free[worst]:.2f}; "
            f"{help_} would help."
        )
    if one.tau < 1 + one.setting.depth / 2:
        said.append(
            f"Acceptance limits the rest: {one.tau:.2f} tokens a pass of {one.setting.depth + 1} "
            f"possible, so that even free drafting and checking would give {all_free:.2f}."
        )
    return said


def _lookup(by_method: Mapping[str, Prediction], plain: Plain) -> list[str]:
    """What a trained drafter adds, or would add, to copying from the text."""
    lookup = by_method.get("ngram")
    trained = [
        one for name, one in by_method.items() if name not in ("none", "ngram", "ngram+lookup")
    ]
    if lookup is None:
        return []
    if trained:
        top = max(trained, key=lambda one: one.speedup)
        if lookup.speedup > 1 and lookup.speedup - 1 >= MOST * (top.speedup - 1):
            return [
                f"Prompt lookup alone already gives most of it ({lookup.speedup:.2f}), without a "
                "network."
            ]
        return []
    hours, gain = training(plain)
    said = f"training a drafter would take about {hours:.1f} hours here for about {gain:.2f}"
    if lookup.speedup >= max(1.0, 1 + MOST * (gain - 1)):
        return [f"Lookup already gives most of it ({lookup.speedup:.2f}); {said}."]
    return [f"Nothing trained was measured; {said}, where lookup gives {lookup.speedup:.2f}."]


def training(plain: Plain) -> tuple[float, float]:
    """Hours to train a one-layer drafter here, and the speed-up to expect of it.

    The hours are those of seeing a million answer tokens a few times at the rate of this
    machine's wide passes; the speed-up is Sequoia's best tree for the acceptance that a small
    EAGLE-3 drafter reached on the default model.
    """
    rate = WIDE / plain.cost(WIDE)
    hours = ANSWER_TOKENS * (1 + EPOCHS * STEP_PASSES / 3) / rate / 3600
    choice = sequoia.choose(
        sequoia.DEFAULT_ACCEPTANCE,
        plain.cost,
        draft_seconds=DRAFT_SHARE * plain.cost(1),
        other_seconds=plain.other_seconds,
        budget=32,
        depth=8,
    )
    return hours, max(1.0, choice.tokens * plain.seconds / choice.seconds)
