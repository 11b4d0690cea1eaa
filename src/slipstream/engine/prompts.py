"""What may be a prompt: a user turn, a chat, or token ids; and lists of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Protocol

from slipstream.errors import SettingError

Message = Mapping[str, object]
Prompt = str | Sequence[Message] | Sequence[int]


class Tokenizer(Protocol):
    """The part of a target's tokenizer that the engine uses."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a chat under the model's template, ready for the answer."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """True for one prompt, False for a list of prompts (an empty list is a list of none)."""
    if isinstance(prompts, str):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], Integral | Mapping)


def encode(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int, *, raw: bool = False
) -> list[int]:
    """Token ids of one prompt.

    Args:
        prompt: a user turn, a chat or token ids.
        tokenizer: the target's; None allows token ids only.
        vocab_size: V, ids must be below.
        raw: a user turn is plain text: no chat template.

    Raises:
        SettingError: the prompt is empty, of another kind, or has ids outside the vocabulary.
    """
    if isinstance(prompt, str) and not prompt:
        raise SettingError("prompt", "empty", "at least one token")
    if not isinstance(prompt, str) and all(isinstance(part, Integral) for part in prompt):
        ids = [int(part) for part in prompt]
    elif tokenizer is None:
        raise SettingError("prompt", repr(prompt)[:40], "token ids: this target has no tokenizer")
    elif isinstance(prompt, str):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.encode(prompt) if raw else tokenizer.encode_chat(chat)
    elif all(isinstance(part, Mapping) for part in prompt):
        ids = tokenizer.encode_chat(list(prompt))
    else:
        raise SettingError("prompt", repr(prompt)[:40], "a str, a list of messages, or token ids")
    if not ids:
        raise SettingError("prompt", "empty", "at least one token")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise SettingError("prompt token", wrong, f"0..{vocab_size - 1}")
    return list(ids)
