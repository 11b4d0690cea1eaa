"""A server in a thread over a tiny target that speaks printable text."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import uvicorn

from chats import PLAIN, byte_tokenizer
from fakes import TableTarget
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.serve.app import Limits, Server
from slipstream.target.tokens import TargetTokenizer
from slipstream.verify.walk import walk

LETTERS = 'abcdefgh ijklmnop,.{}[]":0123456789'


def tiny_engine(
    drafter: object = None,
    *,
    seconds: float = 0.0,
    max_length: int = 300,
    template: str = PLAIN,
    says: str | None = None,
) -> Engine:
    """A table that says letters, and its end token now and then.

    Args:
        drafter: None takes prompt lookup.
        seconds: that every pass takes longer.
        max_length: context, tokens.
        template: of chats.
        says: its answer to every chat, instead of letters.
    """
    inner = byte_tokenizer(template)
    end = inner.convert_tokens_to_ids("<|end|>")
    spoken = inner(LETTERS, add_special_tokens=False)["input_ids"]
    bonus = torch.full((len(inner),), -30.0)
    bonus[spoken] = 0.0
    bonus[end] = -4.0

    script = [*inner(says or "", add_special_tokens=False)["input_ids"], end]
    speaker = inner.convert_tokens_to_ids("<|assistant|>")

    def edit(context: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        if says is None or speaker not in context:
            return logits + bonus
        said = min(context[::-1].index(speaker), len(script) - 1)  # tokens since its turn began
        return torch.full_like(logits, -30.0).index_fill(0, torch.tensor(script[said]), 30.0)

    target = TableTarget(
        len(inner), order=1, eos_ids=(end,), max_length=max_length, edit=edit, scale=2.0,
        tokenizer=TargetTokenizer(inner, (end,)),
    )  # fmt: skip
    if seconds:
        forward = target.forward

        def slow(*args: object, **options: object) -> object:
            time.sleep(seconds)
            return forward(*args, **options)

        target.forward = slow
    return Engine(target, drafter or NgramDrafter(), walk, method="ngram", settings={"depth": 8})


def plain_twin(engine: Engine) -> Engine:
    """The same target without a drafter."""
    return Engine(engine.target, NoDrafter(), walk)


class Running:
    """A server that listens; `url` is where."""

    def __init__(self, server: Server, port: int, http: uvicorn.Server) -> None:
        self.server, self.http, self.port = server, http, port
        self.url = f"http://127.0.0.1:{port}"


@contextmanager
def running(
    engine: Engine, *, api_keys: tuple[str, ...] = (), **limits: float
) -> Iterator[Running]:
    """Serve until the block ends."""
    server = Server(engine, name="tiny", limits=Limits(**limits), api_keys=api_keys)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        server.app, log_level="warning", access_log=False, timeout_graceful_shutdown=10
    )
    http = uvicorn.Server(config)
    thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not http.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield Running(server, listener.getsockname()[1], http)
    finally:
        http.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
