"""Answers in OpenAI's shapes: whole, in chunks, with log-probabilities, and errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from slipstream.engine.prompts import Tokenizer
from slipstream.engine.request import Result, TokenScore
from slipstream.engine.text import Decoder, Detokenizer
from slipstream.target.tokens import TargetTokenizer, byte_letters

LEAST = -9999.0  # JSON has no -infinity; vLLM's stand-in


def error_body(message: str, kind: str, *, param: str | None = None, code: int = 400) -> dict:
    """OpenAI's error object; the text is made safe to send."""
    message = message.encode("utf-8", "replace").decode()
    param = None if param is None else param.encode("utf-8", "replace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(num_prompt: int, num_completion: int) -> dict[str, int]:
    """Token counts; the prompt is counted once however many choices there are."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def speculation(results: Sequence[Result], depth: int) -> dict[str, Any] | None:
    """VLLM's `metrics.speculative_decoding` of one HTTP request; None when nothing was drafted.

    Args:
        results: of its choices.
        depth: deepest node the drafter drafts.
    """
    nodes = sum(result.num_draft_nodes for result in results)
    if not nodes:
        return None
    drafts = sum(result.num_draft_steps for result in results)  # passes without drafts are no steps
    accepted = sum(result.num_accepted for result in results)
    longest = max(len(result.reach) for result in results)
    reached = [drafts, *[0] * longest, 0]
    for result in results:
        for at, share in enumerate(result.reach, start=1):
            reached[at] += round(share * result.num_target_passes)
    return {
        "mean_acceptance_length": 1 + accepted / drafts,
        "draft_acceptance_rate": accepted / nodes,
        "acceptance_histogram": [reached[i] - reached[i + 1] for i in range(longest + 1)],
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": nodes,
        "num_spec_tokens": depth,
    }


class Spelling:
    """What each token stands for: its bytes, whether or not they are whole characters.

    Args:
        tokenizer: the target's.
    """

    def __init__(self, tokenizer: TargetTokenizer) -> None:
        self._tokens = tokenizer.tokens
        added = getattr(tokenizer.inner, "added_tokens_decoder", {})
        self._added = {int(id): token.content for id, token in added.items()}
        self._single = frozenset(tokenizer.byte_ids)  # spelled <0x0A>, or as one letter
        is_byte_level = any(len(self._tokens[id]) == 1 for id in tokenizer.byte_ids[:1])
        letters = enumerate(byte_letters()) if is_byte_level else ()
        self._bytes = {letter: byte for byte, letter in letters}

    def bytes(self, token: int) -> bytes:
        """The bytes of a token; of a special one, those of its name."""
        if token in self._added:
            return self._added[token].encode()
        spelled = self._tokens.get(token, "")
        if self._bytes and all(letter in self._bytes for letter in spelled):
            return bytes(self._bytes[letter] for letter in spelled)
        if token in self._single:
            return bytes([int(spelled[1:-1], 16)])
        return spelled.replace("\u2581", " ").encode()

    def text(self, token: int) -> str:
        """The text of a token; bytes that are no whole character show as U+FFFD, as in vLLM."""
        return self.bytes(token).decode("utf-8", "replace")


class ChatScores:
    """Log-probabilities in the chat endpoint's shape.

    Args:
        spelling: of the target's tokens.
    """

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling

    def __call__(self, ids: Sequence[int], scores: Sequence[TokenScore]) -> dict[str, Any]:
        """The `logprobs` object of some tokens."""
        return {
            "content": [
                {
                    **self._entry(token, score.log_prob),
                    "top_logprobs": [self._entry(i, value) for i, value in score.top],
                }
                for token, score in zip(ids, scores, strict=True)
            ],
            "refusal": None,
        }

    def _entry(self, token: int, log_prob: float) -> dict[str, Any]:
        return {
            "token": self._spelling.text(token),
            "logprob": _finite(log_prob),
            "bytes": list(self._spelling.bytes(token)),
        }


class CompletionScores:
    """Log-probabilities in the completion endpoint's shape; offsets count on over calls.

    Args:
        spelling: of the target's tokens.
        decoder: writes the answer's text, in which the offsets count.
    """

    def __init__(self, spelling: Spelling, decoder: Decoder) -> None:
        self._spelling, self._detokenizer = spelling, Detokenizer(decoder)
        self._offset = 0

    def __call__(self, ids: Sequence[int], scores: Sequence[TokenScore]) -> dict[str, Any]:
        """The `logprobs` object of some tokens."""
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([token]))
        return {
            "tokens": [self._spelling.text(token) for token in ids],
            "token_logprobs": [_finite(score.log_prob) for score in scores],
            "top_logprobs": [
                self._top(token, score) for token, score in zip(ids, scores, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token: int, score: TokenScore) -> dict[str, float]:
        """The likeliest by their texts, and the token itself; of equal texts the likelier."""
        found: dict[str, float] = {}
        for each, value in (*score.top, (token, score.log_prob)):
            found.setdefault(self._spelling.text(each), _finite(value))
        return found


class Marks:
    """Who wrote each part of a text: spans of text with whether the token was drafted."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer)

    def __call__(self, ids: Sequence[int], drafted: Sequence[bool], *, is_last: bool) -> list:
        """[text, is_drafted] of each token; a character belongs to the token that completes it."""
        spans = [
            [self._detokenizer.push([token]), flag]
            for token, flag in zip(ids, drafted, strict=True)
        ]
        if is_last and (rest := self._detokenizer.flush()):
            spans.append([rest, False])
        return spans


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST
