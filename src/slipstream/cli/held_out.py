"""What a training run keeps apart: texts it is measured on, and prompts it is decoded with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream import assemble
from slipstream.data.batches import Batch, collate
from slipstream.data.online import OnlineStore
from slipstream.data.store import Store
from slipstream.models.readout import Readout
from slipstream.parity.checks import examine
from slipstream.parity.decoding import compare
from slipstream.train.loop import measure
from slipstream.train.objectives.protocol import Objective
from slipstream.train.recipes.recipe import Checkpoint, Recipe, Settings

PARITY_PROMPTS = 4  # decoded as chains beside teacher forcing
MOST_TOKENS = 32_768  # of held-out texts, so that evaluations stay short
GUARD = 0.005  # tokens a pass that a fine-tuned drafter may lose to rounding


class HeldOut:
    """The last texts of a store, and how drafters are judged on them.

    Args:
        target: loaded.
        method: of the drafters.
        recipe: how it is trained.
        settings: the method's own.
        store: features.
        items: which of its samples are kept apart.
        max_length: tokens of a text at most.
        num_prompts: prompts to decode.
        num_tokens: tokens to decode of each.
        say: prints a line for people.
    """

    def __init__(
        self,
        target: Any,
        method: str,
        recipe: Recipe,
        settings: Settings,
        store: Store | OnlineStore,
        items: Sequence[int],
        *,
        max_length: int,
        num_prompts: int,
        num_tokens: int,
        say: Callable[[str], None],
    ) -> None:
        self.target, self.method, self.recipe, self.settings = target, method, recipe, settings
        self.store, self.items, self.max_length, self.say = store, items, max_length, say
        self.num_tokens = num_tokens
        self.readout: Readout = store.readout()
        self.prompts = self._prompts(num_prompts)

    def batches(self) -> list[Batch]:
        """Held-out texts, each a batch of its own, up to a number of tokens."""
        batches, tokens = [], 0
        for item in self.items:
            sample = self.store[item]
            tokens += len(sample)
            if tokens > MOST_TOKENS:
                break
            batches.append(collate([[sample]], max_length=self.max_length, dtype=torch.float32))
        return batches

    def decode(self, drafter: Path) -> dict[str, Any]:
        """Decode the prompts greedily with a written drafter and its default tree.

        Returns:
            tau, alpha and reach; empty without prompts.
        """
        if not self.prompts:
            return {}
        from slipstream.bench import measures
        from slipstream.bench.runner import to_sample

        engine = assemble.load(self.target, self.method, drafter=drafter)
        results = engine.generate(self.prompts, max_new_tokens=self.num_tokens)
        samples = [to_sample(result, index) for index, result in enumerate(results)]
        reach = measures.reach(samples)
        tau = measures.tau(samples)
        return {
            "tau": None if tau is None else round(tau, 4),
            "reach": [round(value, 4) for value in reach],
            "alpha": [round(value, 4) for value in measures.alpha(reach)],
        }

    def parity(self, drafter: Path, checkpoint: Checkpoint, objective: Objective) -> dict[str, Any]:
        """Chains decoded by the engine beside what the objective says of the same steps."""
        if not self.prompts:
            return {}
        found = compare(
            self.target, self.method, drafter, checkpoint, objective, self.readout,
            self.prompts[:PARITY_PROMPTS], num_tokens=self.num_tokens,
        )  # fmt: skip
        if found is None:
            return {}
        if not found.is_kept:
            checks = examine(self.target, self.method, drafter, self._questions())
            causes = [f"{c.name}: {c.detail}" for c in checks if not c.ok and c.name != "decoding"]
            self.say(
                f"warning: decoding accepts {_listed(found.decoded)} of {found.num_starts} chains "
                f"by depth, training says {_listed(found.text)} at the same positions (tolerance "
                f"{found.tolerance:.2f}); "
                + ("; ".join(causes) or "no reading of the files explains it")
            )
        return {
            "decoded_accuracy": list(found.decoded),
            "text_accuracy": list(found.text),
            "is_parity_kept": found.is_kept,
        }

    def verdict(self, old: Path, new: Path) -> str | None:
        """Why a fine-tuned drafter is worse than the one it started from; None when it is not.

        Both are judged on the same held-out texts, or by decoding where there are none.
        """
        found = []
        for place in (old, new):
            read = self.recipe.layout.read(place, target_layers=self.target.spec.num_layers)
            objective = self.recipe.objective(read, self.settings)
            judged = measure(read.model, objective, self.readout, self.batches())
            judged = judged or self.decode(place)
            found.append(judged.get("chain_tau", judged.get("tau")))
        before, after = found
        if before is None or after >= before - GUARD:
            return None
        return (
            f"fine-tuning made held-out text worse: {after:.3f} tokens a pass, {before:.3f} before"
        )

    def _prompts(self, count: int) -> list[list[int]]:
        """Token ids before the first supervised token of held-out texts."""
        prompts = []
        for item in list(self.items)[:count]:
            sample = self.store[item]
            first = int(sample.loss_mask.nonzero()[0])
            if first:
                prompts.append(sample.tokens[:first].tolist())
        return prompts

    def _questions(self) -> list[str]:
        """User texts to examine the drafter with, as near to the prompts as text can be."""
        decode = self.target.tokenizer.decode
        return [text for text in (decode(ids).strip()[-400:] for ids in self.prompts[:4]) if text]


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
