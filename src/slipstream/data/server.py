"""Answers from an OpenAI-compatible server: a cluster's engine feeds our training.

Prompts go out as token ids to `/v1/completions`, so that the row that is trained on is the row
that is served. vLLM and SGLang give the answer's ids back (`return_token_ids`); a server that gives
only text has it tokenised again, which is counted, because the ids may differ from those emitted.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from http.client import HTTPException
from types import SimpleNamespace
from typing import Any

from slipstream.errors import DataError

API_KEY = "SLIPSTREAM_API_KEY"
RETRIES = 3
SECONDS = 600.0  # for one answer


def headers() -> dict[str, str]:
    """Of a request to an OpenAI-compatible server; with the key that the environment holds."""
    key = os.environ.get(API_KEY)
    return {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """One answer, with the names of `engine.Result`."""

    prompt_index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    error: str | None = None
    is_retokenised: bool = False


class ServerAnswerer:
    """Stands where `regenerate` expects an engine.

    Args:
        url: of the server, with or without `/v1`.
        tokenizer: of the model that it serves.
        name: the model as the user calls it; stored with the answers.
        max_length: context, tokens.
        served_name: the server's name for it; None asks the server.

    Raises:
        DataError: the server does not answer, or serves no model.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Any,
        *,
        name: str,
        max_length: int,
        served_name: str | None = None,
    ) -> None:
        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else f"{base}/v1"
        self.max_length = max_length
        self.target = SimpleNamespace(tokenizer=tokenizer, spec=SimpleNamespace(name=name))
        self.served_name = served_name or self._only_model()
        self.num_retokenised = 0

    def describe(self) -> dict[str, object]:
        """What answers here, for reports."""
        return {"model": self.target.spec.name, "method": "server", "server": self.url}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_rows: int = 8,
        on_result: Callable[[ServedAnswer], None] | None = None,
        **settings: Any,
    ) -> list[ServedAnswer]:
        """Answer token lists, `num_rows` requests at a time.

        Args:
            prompts: ids of each.
            num_rows: requests in flight.
            on_result: called with each answer as it ends, in this thread.
            **settings: max_new_tokens, temperature, top_p, top_k, seed.
        """
        answers: dict[int, ServedAnswer] = {}
        with ThreadPoolExecutor(num_rows) as pool:
            waiting = [
                pool.submit(self._answer, index, tuple(prompt), settings)
                for index, prompt in enumerate(prompts)
            ]
            try:
                for done in as_completed(waiting):
                    answer = done.result()
                    answers[answer.prompt_index] = answer
                    self.num_retokenised += answer.is_retokenised
                    if on_result:
                        on_result(answer)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [answers[index] for index in range(len(prompts))]

    def _answer(
        self, index: int, prompt: tuple[int, ...], settings: dict[str, Any]
    ) -> ServedAnswer:
        request = {
            "model": self.served_name,
            "prompt": list(prompt),
            "max_tokens": min(settings["max_new_tokens"], self.max_length - len(prompt)),
            "temperature": settings.get("temperature", 0.0),
            "top_p": settings.get("top_p", 1.0),
            "seed": settings.get("seed", 0),
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        if settings.get("top_k"):
            request["top_k"] = settings["top_k"]
        try:
            choice = self._call("/completions", request)["choices"][0]
        except (DataError, KeyError, IndexError, TypeError) as error:
            return ServedAnswer(index, prompt, (), "", "error", error=str(error))
        finish = "stop" if choice.get("finish_reason") == "stop" else "length"
        ids = choice.get("token_ids")
        is_text = ids is None
        if is_text:
            ids = self._tokenise(choice.get("text", ""), is_ended=finish == "stop")
        shown = self.target.tokenizer.decode(ids)
        ids = tuple(map(int, ids))
        return ServedAnswer(index, prompt, ids, shown, finish, is_retokenised=is_text)

    def _tokenise(self, text: str, *, is_ended: bool) -> list[int]:
        """Ids of a text that came without; an ended answer gets its end-of-turn token."""
        inner = self.target.tokenizer.inner
        ids = list(inner.encode(text, add_special_tokens=False))
        end = inner.eos_token_id
        return [*ids, end] if is_ended and ids[-1:] != [end] else ids

    def _only_model(self) -> str:
        """The name of the model that the server serves."""
        try:
            return self._call("/models")["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise DataError(
                f"{self.url}/models names no model, expected an OpenAI-compatible server",
                "name the model with --server-model",
            ) from None

    def _call(self, path: str, request: dict[str, Any] | None = None) -> Any:
        """One exchange; a busy or restarting server is asked again a few times."""
        body = None if request is None else json.dumps(request).encode()
        for attempt in range(RETRIES):
            try:
                asked = urllib.request.Request(self.url + path, body, headers())
                with urllib.request.urlopen(asked, timeout=SECONDS) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                problem = f"{self.url}{path} says {error.code}: {_said(error)}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, ValueError, HTTPException) as error:
                problem = f"{self.url}{path} does not answer: {getattr(error, 'reason', error)}"
            if attempt + 1 < RETRIES:
                time.sleep(2.0**attempt)
        raise DataError(problem, "check that the server runs and that the address is right")


def _said(error: urllib.error.HTTPError) -> str:
    """What came with a refusal, as much of it as arrived."""
    try:
        return error.read().decode("utf-8", "replace")[:200]
    except (OSError, HTTPException):
        return "nothing more"
