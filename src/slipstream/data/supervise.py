"""Which tokens of a chat a drafter learns to predict: the assistant's, end of turn included.

The row that is trained on must be the row that is served: the prompt's tokens are those that
generation would see, the answer's are those it would emit. Two ways lead there:

* a template with `{% generation %}` tags says itself which tokens are the assistant's;
* otherwise the prompt is rendered with its generation prompt, and a render with a probe in the
  answer's place shows what the template puts around an answer (prefix rendering).

A template that rewrites earlier turns (drops thoughts, adds empty thought blocks) shows history
as the model will see it, and those earlier answers, which nobody would emit after such a prompt,
are left out of the mask. A template that rewrites the last answer itself is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.errors import DataError

if TYPE_CHECKING:
    from slipstream.data.conversations import Conversation

PROBE = "slipstreamprobe"
EMPTY_BLOCK = re.compile(r"\s*<(\w+)>\s*</\1>\s*")
"""A thought block with nothing in it."""


@dataclass(frozen=True, slots=True)
class Supervised:
    """Tokens and which of them are to be predicted.

    Args:
        tokens: [T] ids.
        mask: [T], mask[t] is True where tokens[t] is to be predicted (from tokens before t).
        is_truncated: the row was longer than `max_length` and lost its end.
        num_skipped_turns: answers left out because the template rewrites them in history.
        template_mode: "generation tags", "prefix rendering" or "token ids".
    """

    tokens: list[int]
    mask: list[bool]
    is_truncated: bool = False
    num_skipped_turns: int = 0
    template_mode: str = "token ids"

    @property
    def num_supervised(self) -> int:
        """Tokens to be predicted."""
        return sum(self.mask)


def supervise(
    conversation: Conversation,
    tokenizer: Any,
    *,
    max_length: int,
    last_turn_only: bool = False,
) -> Supervised:
    """Tokenise a conversation and mark the assistant's tokens.

    Args:
        conversation: a chat with answers, or a row with its own token ids.
        tokenizer: the target's tokenizer (its own wrapper or the Hugging Face object); not
            used for rows with token ids.
        max_length: tokens to keep, at least 2; longer rows lose their end.
        last_turn_only: mark the last answer only.

    Raises:
        DataError: the conversation has no answer, or the chat template cannot show its answer as
            it would be served.
    """
    if max_length < 2:
        raise DataError(f"max length is {max_length}, expected 2 or more", "raise --max-length")
    if conversation.prompt_ids is not None:
        response = list(conversation.response_ids or ())
        tokens = list(conversation.prompt_ids) + response
        mask = [False] * len(conversation.prompt_ids) + [True] * len(response)
        return _cut(tokens, mask, max_length, skipped=0, mode="token ids")
    messages = [message.to_dict() for message in conversation.messages]
    while messages and messages[0]["role"] == "assistant":  # nothing asked for it
        messages.pop(0)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise DataError(
            f"row {conversation.id}: no user turn followed by an assistant turn, nothing to learn",
            "answer the prompts first: `slipstream data regenerate`",
        )
    _refuse_calls(conversation, messages[-1:] if last_turn_only else messages)
    chat = Chat(tokenizer, conversation.id)
    if chat.has_generation_tags:
        tagged = _by_tags(chat, messages, last_turn_only)
        if tagged is not None:
            tokens, mask, skipped = tagged
            return _cut(tokens, mask, max_length, skipped=skipped, mode="generation tags")
    tokens, mask, skipped = _by_prefixes(chat, messages, last_turn_only)
    return _cut(tokens, mask, max_length, skipped=skipped, mode="prefix rendering")


def _refuse_calls(conversation: Conversation, learned: Sequence[Mapping[str, Any]]) -> None:
    """An answer that calls tools is more than its content, which is all that is supervised."""
    if any(message["role"] == "assistant" and message.get("tool_calls") for message in learned):
        raise DataError(
            f"row {conversation.id} (line {conversation.line}): an answer has tool_calls, which "
            "would be left out of what is learned",
            "leave the row out, write calls into the content as the model emits them, or let the "
            "model answer with `slipstream data regenerate`",
        )


class Chat:
    """A tokenizer's chat template, with its failures told as `DataError`.

    Args:
        tokenizer: the target's wrapper (`inner`, `eos_ids`, `template_mode`) or a Hugging Face
            tokenizer.
        row: id of the row, for errors.
    """

    def __init__(self, tokenizer: Any, row: str) -> None:
        self.options = dict(getattr(tokenizer, "template_mode", None) or {})
        eos_ids = getattr(tokenizer, "eos_ids", ())
        self.tokenizer = getattr(tokenizer, "inner", tokenizer)
        self.row = row
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError(
                f"row {row}: the model's tokenizer has no chat template",
                "use a chat model, or rows with prompt_ids and response_ids",
            )
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        self._special = {*self.tokenizer.all_special_ids, *added, *eos_ids}

    @property
    def has_generation_tags(self) -> bool:
        """True where the template marks the assistant's part itself."""
        template = self.tokenizer.chat_template
        texts = template.values() if isinstance(template, Mapping) else [template]
        return any("generation %}" in text or "generation -%}" in text for text in texts)

    def render(self, messages: Sequence[Mapping[str, Any]], *, is_prompt: bool) -> str:
        """The template's text; `is_prompt` adds the generation prompt."""
        return self._apply(messages, tokenize=False, add_generation_prompt=is_prompt)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text: its special tokens are parsed, none are added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelled out."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def tagged(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """Ids and the template's own mask."""
        out = self._apply(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(out["input_ids"]), [bool(x) for x in out["assistant_masks"]]

    def is_special(self, token: int) -> bool:
        """True for the tokenizer's special ids, end of turn among them."""
        return token in self._special

    def fail(self, what: str, hint: str) -> DataError:
        """An error that names the row."""
        return DataError(f"row {self.row}: the chat template {what}", hint)

    def _apply(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                [dict(m) for m in messages], **self.options, **options
            )
        except DataError:
            raise
        except Exception as error:  # templates raise anything, jinja's own included
            roles = ", ".join(m["role"] for m in messages)
            raise self.fail(
                f"refuses the roles [{roles}]: {error}",
                "most templates want user and assistant in turn, after at most one system turn",
            ) from error


def _by_tags(
    chat: Chat, messages: list[dict[str, Any]], last_turn_only: bool
) -> tuple[list[int], list[bool], int] | None:
    """Tokens, mask and answers left out; None where the last answer does not follow its prompt.

    Tags may open before the prompt ends and close behind the end of turn: the template's mask
    counts from where the served prompt ends to the end-of-turn token.
    """
    tokens, tagged = chat.tagged(messages)
    mask = [False] * len(tokens)
    end_of_turn = _end_token(chat, messages)
    skipped = 0
    for k, message in enumerate(messages):
        is_last = k == len(messages) - 1
        if message["role"] != "assistant" or (last_turn_only and not is_last):
            continue
        prompt = chat.encode(chat.render(messages[:k], is_prompt=True))
        if tokens[: len(prompt)] != prompt:
            if is_last:
                return None
            skipped += 1
            continue
        for t in range(len(prompt), len(tokens)):
            is_end = tokens[t] == end_of_turn
            # tags often close before the end-of-turn token
            mask[t] = tagged[t] or (is_end and t > len(prompt) and tagged[t - 1])
            if is_end:
                break
        if is_last and not any(mask[len(prompt) :]):
            return None
    last = max(t for t in range(len(mask)) if mask[t])
    return tokens[: last + 1], mask[: last + 1], skipped


def _end_token(chat: Chat, messages: list[dict[str, Any]]) -> int | None:
    """The special token that ends the last answer; None where the template has none."""
    _, _, after = _around(chat, messages)
    return next((token for token in chat.encode(after) if chat.is_special(token)), None)


def _around(chat: Chat, messages: list[dict[str, Any]]) -> tuple[str, str, str]:
    """What the template puts before and after the last answer; the middle is empty without it."""
    probed = chat.render([*messages[:-1], {**messages[-1], "content": PROBE}], is_prompt=False)
    return probed.rpartition(PROBE)


def _by_prefixes(
    chat: Chat, messages: list[dict[str, Any]], last_turn_only: bool
) -> tuple[list[int], list[bool], int]:
    """Tokens, mask and the number of answers left out."""
    context = chat.render(messages[:-1], is_prompt=True)
    tokens: list[int] = []
    mask: list[bool] = []
    cursor = skipped = 0  # characters of `context` already tokenised
    for k in range(1, len(messages) - 1):
        if messages[k]["role"] != "assistant":
            continue
        if last_turn_only:
            break
        prompt = chat.render(messages[:k], is_prompt=True)
        answer = _answer(chat, messages[: k + 1], prompt)
        if len(prompt) < cursor or not context.startswith(prompt + answer):
            skipped += 1
            continue
        _extend(tokens, mask, chat.encode(context[cursor : len(prompt)]), False)
        _extend(tokens, mask, chat.encode(answer), True)
        cursor = len(prompt) + len(answer)
    _extend(tokens, mask, chat.encode(context[cursor:]), False)
    served = chat.encode(context)
    if tokens != served:  # a token spans a border: keep the served ids, learn the last answer
        skipped = sum(m["role"] == "assistant" for m in messages[:-1])
        tokens, mask = served, [False] * len(served)
    _extend(tokens, mask, chat.encode(_answer(chat, messages, context)), True)
    return tokens, mask, skipped


def _answer(chat: Chat, messages: list[dict[str, Any]], prompt: str) -> str:
    """What the model emits after `prompt` to say the last message, end of turn included."""
    content = messages[-1]["content"]
    whole = chat.render(messages, is_prompt=False)
    before, found, after = _around(chat, messages)
    if not found:
        raise chat.fail(
            "does not show the assistant's text at all",
            "check the template, or answer the prompts with `slipstream data regenerate`",
        )
    tail = _end_of_turn(chat, after)
    has_frame = whole.startswith(before) and whole.endswith(after)
    body = whole[len(before) : len(whole) - len(after)] if has_frame else ""
    bare = prompt.rstrip()  # some templates put other blanks before an answer
    if has_frame and body.strip() == content.strip() and before.startswith(bare):
        inserted = before[len(prompt) :] if before.startswith(prompt) else ""
        if EMPTY_BLOCK.fullmatch(inserted) and not messages[-1].get("reasoning_content"):
            inserted = ""  # which the served prompt does not have, and nobody would emit
        return inserted + body + tail
    if whole.startswith(prompt) and whole.endswith(after):
        body = whole[len(prompt) : len(whole) - len(after)]
        if "".join(body.split()) == "".join(content.split()):
            return body + tail
    raise chat.fail(
        "rewrites the last answer (drops its thoughts, or adds text), so that the training row "
        "would differ from what is served",
        "answer the prompts with `slipstream data regenerate`, which keeps token ids",
    )


def _end_of_turn(chat: Chat, after: str) -> str:
    """The text behind an answer up to its end-of-turn token; without one, all but blanks."""
    ids = chat.encode(after)
    for index, token in enumerate(ids):
        if chat.is_special(token):
            head = chat.decode(ids[: index + 1])
            return head if after.startswith(head) else after.rstrip()
    return after.rstrip()


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises DataError for an id that the model does not have."""
    if max(tokens, default=0) >= vocab_size:
        raise DataError(
            f"token id {max(tokens)} is outside the model's vocabulary of {vocab_size}",
            "the rows were tokenised for another model: regenerate them with this one",
        )


def _extend(tokens: list[int], mask: list[bool], ids: list[int], is_on: bool) -> None:
    tokens.extend(ids)
    mask.extend([is_on] * len(ids))


def _cut(
    tokens: list[int], mask: list[bool], max_length: int, *, skipped: int, mode: str
) -> Supervised:
    return Supervised(
        tokens[:max_length],
        mask[:max_length],
        is_truncated=len(tokens) > max_length,
        num_skipped_turns=skipped,
        template_mode=mode,
    )
