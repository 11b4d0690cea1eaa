"""From an HTTP request to the loop's thread and back: pieces of several requests, in order.

Whatever ends an exchange (the last piece, a deadline, a client that hung up, a shutdown), `stop`
frees every row that is still held.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress

from slipstream.engine.request import Piece, Request
from slipstream.engine.service import Listener, Service
from slipstream.errors import SlipstreamError

PATIENCE = 0.5  # seconds between looks at whether the client is still there


class DeadlineError(SlipstreamError):
    """An answer took longer than the server allows."""


class GoneError(SlipstreamError):
    """The client hung up."""


class Exchange:
    """The engine's requests that answer one HTTP request.

    Args:
        service: runs them.
        requests: one per choice.
        seconds: until they must be finished, from `begun` on.
        begun: of `time.monotonic`; now by default.
        is_gone: asks whether the client hung up.
        on_piece: told of every piece when it comes, also of those that nobody reads any more.
    """

    def __init__(
        self,
        service: Service,
        requests: Sequence[Request],
        *,
        seconds: float,
        begun: float | None = None,
        is_gone: Callable[[], Awaitable[bool]] | None = None,
        on_piece: Callable[[int, Piece], None] | None = None,
    ) -> None:
        self.requests = tuple(requests)
        self._service, self._seconds = service, seconds
        self._is_gone, self._on_piece = is_gone, on_piece
        self._news: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self._is_started = False
        self._looked = time.monotonic()
        self._until = (self._looked if begun is None else begun) + seconds

    @property
    def seconds_left(self) -> float:
        """Until everything must be finished."""
        return max(0.0, self._until - time.monotonic())

    def start(self) -> None:
        """Submit everything, or nothing.

        Raises:
            BusyError: the queue has no room for all.
        """
        loop = asyncio.get_running_loop()

        def listener(index: int) -> Listener:
            return lambda piece: loop.call_soon_threadsafe(self._hear, index, piece)

        self._service.submit_all(
            [(request, listener(index)) for index, request in enumerate(self.requests)]
        )
        self._is_started = True

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Choice and piece, until every choice has its result.

        Raises:
            DeadlineError: the time is over.
            GoneError: the client hung up.
        """
        left = len(self.requests)
        while left:
            index, piece = await self._next()
            left -= piece.result is not None
            yield index, piece

    def stop(self) -> None:
        """End whatever still runs."""
        for request in self.requests:
            self._service.abort(request)

    def _hear(self, index: int, piece: Piece) -> None:
        self._news.put_nowait((index, piece))
        if self._on_piece is not None and self._is_started:
            self._on_piece(index, piece)

    async def _next(self) -> tuple[int, Piece]:
        while True:
            await self._look()
            wait = self.seconds_left
            if wait <= 0:
                raise DeadlineError(f"the answer was not finished after {self._seconds:g} s")
            with suppress(TimeoutError):
                return await asyncio.wait_for(self._news.get(), min(wait, PATIENCE))

    async def _look(self) -> None:
        """See now and then whether the client is still there, however fast the pieces come."""
        if self._is_gone is None or time.monotonic() < self._looked + PATIENCE:
            return
        self._looked = time.monotonic()
        if await self._is_gone():
            raise GoneError("the client hung up")
