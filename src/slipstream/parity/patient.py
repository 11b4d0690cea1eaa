"""A drafter under examination: answers of its target, and how well it predicts them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream import assemble
from slipstream.models.readout import Readout
from slipstream.parity.decoding import judged, taps_of
from slipstream.parity.texts import Text, batch_of, look
from slipstream.parity.variants import Variant
from slipstream.train.recipes.recipe import Recipe, Settings


@dataclass(slots=True)
class Patient:
    """A drafter with what is needed to judge it.

    Args:
        target: loaded.
        method: the drafter's.
        folder: its files.
        checkpoint: as read.
        recipe: how its method is trained.
        settings: the method's own, from the card where there is one.
        readout: the target's embedding and head, float32.
        questions: user texts.
        num_tokens: tokens of an answer.
        card: the drafter's `card.json`, or empty.
        texts: the target's answers under its chat template.
        scores: of the drafter as configured, by text.
    """

    target: Any
    method: str
    folder: Path
    checkpoint: Any
    recipe: Recipe
    settings: Settings
    readout: Readout
    questions: Sequence[str]
    num_tokens: int
    card: dict[str, Any]
    texts: list[Text] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Text]:
        """The target's greedy answers to some prompts, as it sees them."""
        engine = assemble.load(self.target, "none")
        results = engine.generate(
            [list(p) for p in prompts], max_new_tokens=self.num_tokens, num_rows=len(prompts)
        )
        return [look(self.target, self.readout, r.prompt_ids, r.token_ids) for r in results]

    def score(
        self, variant: Variant | None, texts: Sequence[Text], *, on_prompt: bool = False
    ) -> list[float]:
        """Drafted tokens of a chain that the target would accept, mean over each text's starts.

        Args:
            variant: another reading, or None for the configured one.
            texts: to judge on.
            on_prompt: judge the prompt's tokens, not the answer's.
        """
        checkpoint = self.checkpoint if variant is None else variant.checkpoint
        taps = taps_of(checkpoint) if variant is None else variant.taps
        objective = self.recipe.objective(checkpoint, self.settings)
        found = []
        for text in texts:
            mask = ~text.answer_mask() if on_prompt else text.answer_mask()
            batch = batch_of([text.sample(taps, mask)])
            loss = judged(checkpoint.model, objective, batch, self.readout)
            if float(loss.prefix_count):
                found.append(float(loss.prefix_hits.sum() / loss.prefix_count))
        return found

    def prompts(self, mode: Mapping[str, Any] | None = None) -> list[list[int]]:
        """The questions under the target's chat template, or raw where it has none.

        Args:
            mode: variables of the template in place of the target's own.
        """
        tokenizer = self.target.tokenizer
        if not tokenizer.has_template:
            return self.raw_prompts()
        before = tokenizer.template_mode
        tokenizer.template_mode = before if mode is None else dict(mode)
        try:
            chats = [[{"role": "user", "content": question}] for question in self.questions]
            return [tokenizer.encode_chat(chat) for chat in chats]
        finally:
            tokenizer.template_mode = before

    def raw_prompts(self) -> list[list[int]]:
        """The questions without the chat template."""
        return [self.target.tokenizer.encode(question) for question in self.questions]


def mean(values: Sequence[float]) -> float:
    """The mean, 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def error(values: Sequence[float]) -> float:
    """The standard error of the mean; infinite for fewer than two values."""
    if len(values) < 2:
        return math.inf
    middle = mean(values)
    spread = sum((value - middle) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(spread / len(values))


def read_card(folder: Path) -> dict[str, Any]:
    """The drafter's `card.json`, empty where it has none that can be read."""
    try:
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return card if isinstance(card, dict) else {}
