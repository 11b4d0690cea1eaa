"""The loop in a thread of its own: any thread submits and aborts, listeners hear each piece.

The queue is bounded: whoever comes when it is full is told so at once. A fault of the loop fails
the requests that were in it and spares the next ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from slipstream.engine.loop import Loop
from slipstream.engine.request import Piece, Request
from slipstream.errors import BusyError, SlipstreamError

log = logging.getLogger(__name__)

Listener: TypeAlias = Callable[[Piece], None]
"""Called in the loop's thread with each piece of a request; it must not block."""


class Service:
    """Runs a loop until it is closed.

    Args:
        loop: not to be touched by anyone else from now on.
        max_requests: running and waiting requests at most.
    """

    def __init__(self, loop: Loop, *, max_requests: int) -> None:
        self._loop, self._max_requests = loop, max_requests
        self._changed = threading.Condition()
        self._inbox: list[Request] = []
        self._unwanted: list[Request] = []
        self._listeners: dict[int, tuple[Request, Listener]] = {}
        self._is_draining = self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="slipstream-loop", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Requests that hold a cache row."""
        return len(self._loop.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return max(0, len(self._listeners) - self.num_running)

    @property
    def cache_usage(self) -> float:
        """Share of the cache's blocks that running requests hold; kept prefixes give way."""
        return self._loop.scheduler.usage

    @property
    def num_put_off(self) -> int:
        """Times a running request had to give way so far."""
        return self._loop.scheduler.num_put_off

    @property
    def is_alive(self) -> bool:
        """True while requests are taken."""
        return self._thread.is_alive() and not self._is_draining

    def check(self, count: int = 1) -> None:
        """See whether requests would be taken now, before the work of making them.

        Args:
            count: how many.

        Raises:
            BusyError: the queue has no room for all of them, or the service is shutting down.
        """
        if self._is_draining or self._is_closed:
            raise BusyError("the server is shutting down", "ask again when it is back")
        there = len(self._listeners)
        if there + count > self._max_requests:
            raise BusyError(
                f"{there} requests run or wait, expected at most {self._max_requests} with "
                f"{count} more",
                "ask again later",
            )

    def submit(self, request: Request, listen: Listener) -> None:
        """Queue a request; its last piece carries the result.

        Raises:
            BusyError: the queue is full, or the service is shutting down.
        """
        self.submit_all([(request, listen)])

    def submit_all(self, asked: Sequence[tuple[Request, Listener]]) -> None:
        """Queue all of them or, where there is not room for all, none.

        Raises:
            BusyError: the queue is too full, or the service is shutting down.
        """
        with self._changed:
            self.check(len(asked))
            for request, listen in asked:
                self._listeners[request.key] = request, listen
                self._inbox.append(request)
            self._changed.notify_all()

    def abort(self, request: Request) -> None:
        """End a request; its last piece comes with finish_reason "abort". Ended ones are left."""
        with self._changed:
            if request.key in self._listeners:
                self._unwanted.append(request)
                self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Take no more requests and wait for those there are; False if some are left."""
        until = time.monotonic() + seconds
        with self._changed:
            self._is_draining = True
            while self._listeners and self._thread.is_alive():
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def close(self) -> None:
        """Abort what runs and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def leaks(self) -> str:
        """What the idle loop still holds; see `Loop.leaks`."""
        return self._loop.leaks()

    def _work(self) -> None:
        while self._collect():
            try:
                for row in self._loop.turn():
                    self._tell(row)
            except Exception as error:  # noqa: BLE001 - whatever it was, the next request must live
                self._fail(error)
            if not self._loop.scheduler.has_work and (leak := self._loop.leaks()):
                log.error("the idle loop is not empty: %s", leak)
        self._loop.close()
        for request, _ in list(self._listeners.values()):
            if not request.is_finished:
                request.abort()
            self._tell(request)

    def _collect(self) -> bool:
        """Wait for work, take it in; False once closed."""
        with self._changed:
            while not (
                self._inbox or self._unwanted or self._loop.scheduler.has_work or self._is_closed
            ):
                self._changed.wait()
            fresh, self._inbox = self._inbox, []
            unwanted, self._unwanted = self._unwanted, []
        for request in fresh:
            self._loop.submit(request)
        for request in unwanted:
            self._loop.abort(request)
            self._tell(request)
        return not self._is_closed

    def _tell(self, row: Request) -> None:
        """Hand a row's news to its listener; forget both when it is finished."""
        found = self._listeners.get(row.key)
        if found is None:
            return
        if row.is_finished:
            with self._changed:
                del self._listeners[row.key]
                self._changed.notify_all()
        try:
            found[1](row.take())
        except Exception:
            log.exception("a listener failed; its request is dropped")
            self.abort(row)

    def _fail(self, error: Exception) -> None:
        """End everything that was in the loop with this error."""
        log.error("the loop failed; its requests end with an error", exc_info=error)
        told = error if isinstance(error, SlipstreamError) else SlipstreamError("internal error")
        every = [*self._loop.scheduler.running, *self._loop.scheduler.waiting]
        rows = [row for row in every if not row.is_finished]
        self._loop.close()
        self._loop.scheduler.forget()  # what a broken turn left behind is not to be trusted
        for row in rows:
            row.fail(told)
        for request, _ in list(self._listeners.values()):
            if request.is_finished:
                self._tell(request)
