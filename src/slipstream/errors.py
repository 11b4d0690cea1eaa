"""Every error a user can meet. Each says what failed, what was found and what was expected.

The `hint` says what to type next; it is added as a note, so that it shows under a traceback and
the command line can print it on a line of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SlipstreamError(Exception):
    """Base of every error a user can cause. The command line prints it and exits with 2."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")


class ShapeError(SlipstreamError, ValueError):
    """A tensor or a tree does not have the shape its function asks for."""


class SettingError(SlipstreamError, ValueError):
    """A setting is outside its range."""

    def __init__(self, name: str, found: object, expected: str, hint: str | None = None) -> None:
        super().__init__(f"{name} is {found}, expected {expected}", hint)
        self.name = name


class TemplateRefusalError(SettingError):
    """A chat that the model's template cannot write; the name is what it refuses."""


class UnknownNameError(SlipstreamError, KeyError):
    """A name that is in no catalogue; suggests neighbours and lists what is known."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        suggestion = f" Did you mean: {', '.join(near)}?" if near else ""
        super().__init__(f"no {kind} '{name}'.{suggestion} Known: {', '.join(known)}")

    def __str__(self) -> str:  # KeyError would quote the message
        return str(self.args[0])


class CheckpointError(SlipstreamError):
    """A checkpoint is missing, truncated, or does not agree with itself."""


class DrafterMismatchError(SlipstreamError):
    """A drafter was made for another target."""


class UnsupportedTargetError(SlipstreamError):
    """A model that cannot be a target, named with the reason."""


class DataError(SlipstreamError):
    """A data file that cannot be read as asked; names the line."""


class PromptTooLongError(SlipstreamError):
    """A prompt that does not fit the context."""


class CacheFullError(SlipstreamError):
    """The cache has fewer free slots than a row needs."""


class OutputError(SlipstreamError):
    """An output path that exists, or cannot be written."""


class VerifierMismatchError(SlipstreamError):
    """A verifier that does not fit how a tree was made."""


class BusyError(SlipstreamError):
    """A server that takes no more requests for now."""


class NumericError(SlipstreamError):
    """The target returned NaN where a token had to be chosen."""

    @classmethod
    def of_rows(cls, count: int, num_rows: int) -> NumericError:
        """Of so many rows of a batch."""
        return cls(
            f"the target returned NaN for {count} of {num_rows} rows of the batch",
            hint="try --dtype float32; if that helps, the model overflows in this number type",
        )
