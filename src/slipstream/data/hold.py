"""One process writes an output at a time: two would mix their rows, each sure that it is alone."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from slipstream.errors import OutputError

try:
    import fcntl
except ImportError:  # not a Unix: nothing is held there
    fcntl = None  # type: ignore[assignment]


class Hold:
    """Keeps a file or folder that exists for whoever made this, until `close`.

    The system lets go of it when the process ends, however it ends, so that nothing stays locked
    after a kill. File systems without locks hold nothing.

    Args:
        path: of the file or folder.

    Raises:
        OutputError: another process has it.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = None
        if fcntl is None:
            return
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise OutputError(
                f"another process is writing {path}",
                "wait until it is done or stop it, or choose another --output",
            ) from None
        except OSError:  # such as a network's
            self.close()

    def close(self) -> None:
        """Let go."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
