"""Two OpenAI-compatible servers against each other: do they say the same, greedily?

Nothing is known of either but what it answers, so texts are compared, token by token where both
name their tokens. A difference is a tie when the reference's own log-probabilities of the two
tokens are closer than rounding in reduced precision parts; and the reference is asked once more
with the same request several times at once, because batching alone may change what it says.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from slipstream.bench.equality import first_difference
from slipstream.data.server import headers
from slipstream.errors import DataError

TIE = 0.1  # nats between two tokens that reduced precision may swap
CROWD = 4  # equal requests at once
SECONDS = 600.0
FEWEST_TOKENS = 50

Prompt: TypeAlias = str | Sequence[dict[str, str]]
"""A user turn (plain text when raw), or the messages of a chat."""


@dataclass(frozen=True, slots=True)
class Said:
    """One answer.

    Args:
        text: as served.
        tokens: their texts, or None where the server names none.
        tops: per token, the likeliest tokens and their log-probabilities; None likewise.
    """

    text: str
    tokens: tuple[str, ...] | None
    tops: tuple[dict[str, float], ...] | None

    @property
    def pieces(self) -> Sequence[str]:
        """Tokens, or characters where there are none."""
        return self.text if self.tokens is None else self.tokens


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two answers part.

    Args:
        prompt_index: which prompt.
        position: index of the token, or of the character where tokens are not named.
        margin: nats between the two tokens by the reference's own numbers; None where unknown.
        target_token: the reference's, None where its answer had ended.
        emitted_token: the other one's, likewise.
        is_tie: the margin is within what rounding explains.
        without_drafting: the reference contradicts itself when asked several times at once.
    """

    prompt_index: int
    position: int
    margin: float | None
    target_token: str | None
    emitted_token: str | None
    is_tie: bool
    without_drafting: bool


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What the comparison found; the names are `LosslessReport`'s."""

    verdict: str
    mode: str
    num_prompts: int
    num_tokens: int
    num_divergent: int
    divergences: tuple[Parting, ...]

    @property
    def is_lossless(self) -> bool:
        """True for the verdicts that exit with 0."""
        return self.verdict in ("lossless", "ties")

    def to_dict(self) -> dict[str, object]:
        """The JSON value."""
        return asdict(self) | {"tau": None}


class Server:
    """Asks one server.

    Args:
        url: with or without `/v1`.

    Raises:
        DataError: the server does not answer, or serves no model.
    """

    def __init__(self, url: str) -> None:
        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else f"{base}/v1"
        try:
            self.model = self._call("/models")["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise DataError(
                f"{self.url}/models names no model, expected an OpenAI-compatible server",
                "check the address",
            ) from None

    def ask(self, prompt: Prompt, *, max_new_tokens: int, raw: bool = False) -> Said:
        """The greedy answer to a user turn, to a chat, or to plain text.

        Raises:
            DataError: the server answers in another form, or not at all.
        """
        request: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
        }
        if raw:
            request |= {"prompt": prompt, "logprobs": 2}
        else:
            chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            request |= {"messages": chat, "logprobs": True, "top_logprobs": 2}
        reply = self._call("/completions" if raw else "/chat/completions", request)
        try:
            choice = reply["choices"][0]
            return _of_text(choice) if raw else _of_chat(choice)
        except (KeyError, IndexError, TypeError) as error:
            raise DataError(
                f"{self.url} answers without {error}, expected an OpenAI-compatible reply"
            ) from error

    def _call(self, path: str, request: dict[str, Any] | None = None) -> Any:
        body = None if request is None else json.dumps(request).encode()
        try:
            asked = urllib.request.Request(self.url + path, body, headers())
            with urllib.request.urlopen(asked, timeout=SECONDS) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            problem = f"says {error.code}: {error.read().decode('utf-8', 'replace')[:200]}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            said = str(getattr(error, "reason", error)) or type(error).__name__
            problem = f"does not answer: {said}"
        raise DataError(
            f"{self.url}{path} {problem}",
            "check that the server runs and that the address is right",
        )


def _of_chat(choice: dict[str, Any]) -> Said:
    text = choice["message"]["content"] or ""
    entries = (choice.get("logprobs") or {}).get("content")
    if not entries:
        return Said(text, None, None)
    tops = tuple(
        {top["token"]: top["logprob"] for top in entry.get("top_logprobs") or ()}
        for entry in entries
    )
    return Said(text, tuple(entry["token"] for entry in entries), tops)


def _of_text(choice: dict[str, Any]) -> Said:
    found = choice.get("logprobs") or {}
    tokens, tops = found.get("tokens"), found.get("top_logprobs")
    if not tokens:
        return Said(choice["text"], None, None)
    return Said(choice["text"], tuple(tokens), tuple(top or {} for top in tops) if tops else None)


def compare(
    server: Server,
    reference: Server,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    raw: bool = False,
    on_done: Callable[[int], None] = lambda count: None,
) -> ServerReport:
    """Ask both the same and compare.

    Args:
        server: under test.
        reference: believed.
        prompts: user turns or chats, or texts when raw.
        max_new_tokens: per answer.
        raw: prompts are plain text, not user turns.
        on_done: told how many prompts were finished.
    """
    found, num_tokens = [], 0
    for index, prompt in enumerate(prompts):
        ask = {"max_new_tokens": max_new_tokens, "raw": raw}
        mine, theirs = server.ask(prompt, **ask), reference.ask(prompt, **ask)
        if mine.tokens is None or theirs.tokens is None:
            mine, theirs = (Said(each.text, None, None) for each in (mine, theirs))
        position = first_difference(theirs.pieces, mine.pieces)
        num_tokens += len(theirs.pieces) if position is None else position + 1
        if position is not None:
            again = _crowd(reference, prompt, ask)
            found.append(_parting(index, position, mine, theirs, again))
        on_done(1)
    is_tie = all(each.is_tie or each.without_drafting for each in found)
    word = "different" if found and not is_tie else "ties" if found else "lossless"
    if word == "lossless" and num_tokens < FEWEST_TOKENS:
        word = "inconclusive"
    return ServerReport(word, "servers", len(prompts), num_tokens, len(found), tuple(found))


def _crowd(reference: Server, prompt: Prompt, ask: dict[str, Any]) -> list[Said]:
    """The same request several times at once, so that the server batches it."""
    with ThreadPoolExecutor(CROWD) as pool:
        return list(pool.map(lambda _: reference.ask(prompt, **ask), range(CROWD)))


def _parting(index: int, position: int, mine: Said, theirs: Said, again: Sequence[Said]) -> Parting:
    """The difference with what explains it."""
    tokens = [
        said.pieces[position] if position < len(said.pieces) else None for said in (theirs, mine)
    ]
    margin = None
    if theirs.tops is not None and position < len(theirs.tops):
        top = theirs.tops[position]
        if tokens[0] in top and tokens[1] in top:
            margin = abs(top[tokens[0]] - top[tokens[1]])
    wavers = any(list(one.pieces[: position + 1]) != list(theirs.pieces[: position + 1])
                 for one in again if (one.tokens is None) == (theirs.tokens is None))  # fmt: skip
    is_tie = margin is not None and margin <= TIE
    return Parting(index, position, margin, tokens[0], tokens[1], is_tie, wavers)
