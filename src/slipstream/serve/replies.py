"""Answers in OpenAI's shapes: whole, in chunks, with log-probabilities, and errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from slipstream.engine.prompts import Tokenizer
from slipstream.engine.request import Result, TokenScore
from slipstream.engine.text import Detokenizer

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


class ChatScores:
    """Log-probabilities in the chat endpoint's shape."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

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
        text = self._tokenizer.decode([token])
        is_whole = "\ufffd" not in text
        return {
            "token": text,
            "logprob": _finite(log_prob),
            "bytes": list(text.encode()) if is_whole else None,
        }


class CompletionScores:
    """Log-probabilities in the completion endpoint's shape; offsets count on over calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._offset = tokenizer, 0

    def __call__(self, ids: Sequence[int], scores: Sequence[TokenScore]) -> dict[str, Any]:
        """The `logprobs` object of some tokens."""
        texts = [self._tokenizer.decode([token]) for token in ids]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(score.log_prob) for score in scores],
            "top_logprobs": [
                {self._tokenizer.decode([i]): _finite(value) for i, value in score.top}
                for score in scores
            ],
            "text_offset": offsets,
        }


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
