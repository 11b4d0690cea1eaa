"""A progress bar that says how long the rest takes once it can know."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from slipstream.cli.output import console


@contextlib.contextmanager
def progress_bar(label: str, *, is_shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Within it, call the function with (done, total); the bar is on standard error."""
    if not is_shown:
        yield lambda _done, _total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TextColumn("{task.fields[left]}"), console=console()) as bar:
        task = bar.add_task(label, total=None, left="")
        clock = Estimate()

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, left=clock.left(done, total))

        yield update


class Estimate:
    """Time left, from the pace since the first report; the first one may hold warm-up."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._first: tuple[int, float] | None = None

    def left(self, done: int, total: int) -> str:
        """Text such as "about 3 min left"; empty before the pace is known."""
        if self._first is None:
            self._first = done, self._now()
            return ""
        begun, since = self._first
        if done <= begun or done >= total:
            return ""
        seconds = (self._now() - since) / (done - begun) * (total - done)
        return (
            f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"
        )
