"""The target's tokenizer as the rest of the package sees it: ids in, ids out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.errors import SettingError, TemplateRefusalError


class TargetTokenizer:
    """Wraps a Hugging Face tokenizer.

    Args:
        inner: the wrapped tokenizer.
        eos_ids: ids that end an answer, from the model's generation settings.
        template_mode: extra variables of the chat template, such as `enable_thinking`.
    """

    def __init__(
        self,
        inner: Any,
        eos_ids: Iterable[int] = (),
        template_mode: Mapping[str, Any] | None = None,
    ) -> None:
        self.inner = inner
        self.eos_ids = tuple(eos_ids)
        self.template_mode = dict(template_mode or {})

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def has_template(self) -> bool:
        """True when the model defines how a chat is written."""
        return bool(getattr(self.inner, "chat_template", None))

    @property
    def template_text(self) -> str:
        """The chat template itself; empty where there is none."""
        template = getattr(self.inner, "chat_template", None) or ""
        return "\n".join(template.values()) if isinstance(template, Mapping) else template

    @property
    def fingerprint(self) -> str:
        """Short hash of the chat template, to tell whether it changed since a training."""
        return hashlib.sha256(self.template_text.encode()).hexdigest()[:12]

    def save(self, folder: Path) -> None:
        """Write its files, as `AutoTokenizer.from_pretrained` reads them."""
        self.inner.save_pretrained(folder)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of a chat under the model's template, ready for the assistant to answer.

        Args:
            messages: the turns.
            add_generation_prompt: open the assistant's turn.
            tools: what the model may call, as OpenAI describes functions.

        Raises:
            SettingError: the model has no chat template.
            TemplateRefusalError: it cannot write this chat; names `tools` where it could without
                them, else `messages`.
        """
        if not self.has_template:
            raise SettingError(
                "chat template", "missing from this model", "one", "use --raw for plain prompts"
            )
        try:
            ids = self.inner.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
                tools=None if tools is None else [dict(tool) for tool in tools],
                **self.template_mode,
            )
        except Exception as error:  # a template is a program: it raises anything, not only jinja's
            if tools:  # where it is the messages that it refuses, they are named
                self.encode_chat(messages, add_generation_prompt=add_generation_prompt)
            raise _refusal("tools" if tools else "messages", error) from error
        return [int(i) for i in ids]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens the model puts around it."""
        return [int(i) for i in self.inner(text)["input_ids"]]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; special tokens are left out unless asked for."""
        return self.inner.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    @cached_property
    def tokens(self) -> dict[int, str]:
        """The token of each id, as the vocabulary spells it."""
        return {int(id): token for token, id in self.inner.get_vocab().items()}

    @cached_property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of every special token and of those that end an answer, ascending."""
        return tuple(sorted({*map(int, self.inner.all_special_ids), *self.eos_ids}))

    @cached_property
    def spare_ids(self) -> tuple[int, ...]:
        """Ids of special tokens that neither chats nor the ends of answers use, ascending."""
        template = str(getattr(self.inner, "chat_template", None) or "")
        return tuple(
            sorted(
                int(number)
                for number, token in self.inner.added_tokens_decoder.items()
                if token.special
                and int(number) not in self.special_ids
                and token.content not in template
            )
        )

    @cached_property
    def byte_ids(self) -> tuple[int, ...]:
        """Ids of pieces that stand for one byte, ascending; empty where there are none."""
        vocabulary = self.inner.get_vocab()
        named = [f"<0x{byte:02X}>" for byte in range(256)]
        if all(name in vocabulary for name in named):  # SentencePiece with byte fallback
            return tuple(sorted(int(vocabulary[name]) for name in named))
        letters = [letter for letter in byte_letters() if letter in vocabulary]
        if len(letters) < 200:  # not a byte-level vocabulary
            return ()
        return tuple(sorted(int(vocabulary[letter]) for letter in letters))


def _refusal(name: str, error: Exception) -> TemplateRefusalError:
    """What a chat template raised, as an error that says where to look."""
    hints = {
        "tools": "look at each function's description and parameters, a JSON schema of an object",
        "messages": "most templates want user and assistant in turn, after at most one system turn",
    }
    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    found = f"refused by the model's chat template ({said})"
    return TemplateRefusalError(name, found, "what the template can write", hints[name])


def byte_letters() -> list[str]:
    """The character byte-level BPE writes for each byte (Radford et al. 2019, GPT-2)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, spare = [], 256
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters
