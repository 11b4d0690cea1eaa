"""Rules that change the target's logits by what came before: penalties, bias, min-p, grammars.

In a draft tree "before" differs from node to node, so a shaper is given the whole tree and treats
each node by its own prefix: the row's tokens and the path down to the node. A node's logits then
are what plain decoding would see after the same tokens, which keeps every answer plain decoding's.

The order is vLLM's: repetition, frequency and presence, bias, a grammar's mask, min-p; temperature,
top-k and top-p come after, in `sampling`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from slipstream.errors import SettingError, SlipstreamError
from slipstream.types import DraftTree


class FormError(SlipstreamError):
    """An answer that cannot be held to its form any further; it ends that answer alone."""


class Shaper(Protocol):
    """Changes logits, node by node. It belongs to one request and may keep state for it.

    One that cannot tell what may follow a drafted node names the node in an attribute `lost`, a set
    that each call makes anew: the accepted path then ends with that node's token as the next root.
    """

    def __call__(self, logits: Tensor, tree: DraftTree, tokens: Sequence[int]) -> Tensor:
        """The changed logits.

        Args:
            logits: [N, V], not to be written to.
            tree: the nodes they follow; the root is the row's last token.
            tokens: the row's tokens, prompt and root included.

        Returns:
            [N, V]; forbidden tokens are -inf. Every row keeps a finite one.

        Raises:
            FormError: what may come next cannot be told.
        """


@dataclass(frozen=True, slots=True)
class Penalties:
    """How a request wishes its logits changed. The defaults change nothing.

    Args:
        repetition: above 1 discourages tokens of the prompt and the answer (logits are divided
            by it where positive, multiplied where negative).
        presence: taken off the logits of tokens the answer has.
        frequency: taken off once for every time the answer has the token.
        bias: added to the logits of these ids.
        min_p: tokens less likely than this share of the likeliest are dropped, in [0, 1].

    Raises:
        SettingError: a value is outside its range.

    Example:
        >>> Penalties(presence=0.5).is_none
        False
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0.01 <= self.repetition <= 100:  # logits stay finite
            raise SettingError("repetition-penalty", self.repetition, "in [0.01, 100]", "1 is off")
        for name in ("presence", "frequency"):
            if not -2 <= getattr(self, name) <= 2:
                raise SettingError(f"{name}-penalty", getattr(self, name), "in [-2, 2]", "0 is off")
        if not 0 <= self.min_p <= 1:
            raise SettingError("min-p", self.min_p, "in [0, 1]", "0 is off")
        for token, value in self.bias.items():
            if token < 0 or not -100 <= value <= 100:
                raise SettingError(f"bias of token {token}", value, "an id's bias in [-100, 100]")

    @property
    def is_none(self) -> bool:
        """True when nothing changes."""
        return self == Penalties()


def shapers(
    penalties: Penalties, num_prompt: int, temperature: float, grammar: Shaper | None = None
) -> tuple[Shaper, ...]:
    """The shapers of a request, in the order they apply.

    Args:
        penalties: the request's.
        num_prompt: tokens of its prompt.
        temperature: min-p compares probabilities at this temperature; 0 needs no min-p.
        grammar: a further shaper that only forbids.
    """
    found: list[Shaper] = []
    if penalties.repetition != 1 or penalties.presence or penalties.frequency:
        found.append(RepetitionShaper(penalties, num_prompt))
    if penalties.bias:
        found.append(BiasShaper(penalties.bias))
    if grammar is not None:
        found.append(grammar)
    if penalties.min_p and temperature:
        found.append(MinPShaper(penalties.min_p, temperature))
    return tuple(found)


class RepetitionShaper:
    """Repetition, frequency and presence penalties.

    Args:
        penalties: how strong.
        num_prompt: tokens of the prompt; they count for repetition alone.
    """

    def __init__(self, penalties: Penalties, num_prompt: int) -> None:
        self._penalties, self._num_prompt = penalties, num_prompt

    def __call__(self, logits: Tensor, tree: DraftTree, tokens: Sequence[int]) -> Tensor:
        """Penalise each node's own history."""
        shaped = logits.clone()
        answered = Counter(tokens[self._num_prompt :])
        seen = set(tokens)
        for node, path in enumerate(paths(tree)):
            counts = answered + Counter(path)
            ids = sorted(seen.union(path)) if self._penalties.repetition != 1 else sorted(counts)
            if ids:
                at = torch.tensor(ids, device=logits.device)
                times = torch.tensor([counts[i] for i in ids], device=logits.device)
                shaped[node, at] = self._penalised(logits[node, at], times)
        return shaped

    def _penalised(self, values: Tensor, times: Tensor) -> Tensor:
        """Logits [M] of tokens that the answer has `times` [M] int64 times."""
        strength = self._penalties.repetition
        values = torch.where(values > 0, values / strength, values * strength)
        values = values - self._penalties.frequency * times
        return values - self._penalties.presence * (times > 0)


class BiasShaper:
    """Adds a constant to some tokens' logits."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids, self._values = torch.tensor(list(bias)), torch.tensor(list(bias.values()))

    def __call__(self, logits: Tensor, tree: DraftTree, tokens: Sequence[int]) -> Tensor:
        """The same at every node."""
        shaped = logits.clone()
        shaped[:, self._ids.to(logits.device)] += self._values.to(logits)
        return shaped


class MinPShaper:
    """Drops tokens whose probability is below a share of the likeliest one's."""

    def __init__(self, min_p: float, temperature: float) -> None:
        self._distance = -temperature * math.log(min_p)  # nats below the best, before temperature

    def __call__(self, logits: Tensor, tree: DraftTree, tokens: Sequence[int]) -> Tensor:
        """The same rule at every node."""
        least = logits.amax(dim=-1, keepdim=True) - self._distance
        return logits.masked_fill(logits < least, float("-inf"))


def paths(tree: DraftTree) -> list[list[int]]:
    """The drafted tokens from below the root down to each node.

    Example:
        >>> paths(DraftTree.chain([5, 6, 7]))
        [[], [6], [6, 7]]
    """
    found: list[list[int]] = [[]]
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append([*found[parent], token])
    return found
