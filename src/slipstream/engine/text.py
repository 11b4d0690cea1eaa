"""Text as it becomes certain: whole characters only, and never past a stop string.

Tokens can end inside a character, so text is held back while the decoded window ends in U+FFFD;
it can end inside a stop string, so the longest tail that may still become one is held back too.
What ends an answer otherwise than a fixed string is asked after every piece.
Each step decodes a short window, not the whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slipstream.errors import SettingError

REPLACEMENT = "\ufffd"
MAX_PARTIAL = 3  # tokens of an unfinished character: it has at most 3 of its 4 bytes
MAX_HELD = 32  # tokens; a window that stays undecodable this long is not valid text


class Decoder(Protocol):
    """The part of a tokenizer that text needs."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some token ids."""


class Verbatim:
    """Decodes with special tokens left in."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some token ids, special tokens included."""
        return self._tokenizer.decode(ids, skip_special=False)


class Detokenizer:
    """Turns token ids into text piece by piece; the pieces join to the decoding of all ids.

    New tokens are decoded after those of the last piece, because some tokenizers treat the first
    token of a text differently.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._context: list[int] = []  # tokens of the last piece, already told
        self._told = ""  # their text
        self._held: list[int] = []  # tokens whose text is not told yet

    def push(self, ids: Sequence[int]) -> str:
        """Text that became certain with these tokens, possibly empty."""
        self._held += ids
        for num_partial in range(min(MAX_PARTIAL + 1, len(self._held))):
            size = len(self._held) - num_partial
            text = self._decoder.decode(self._context + self._held[:size])
            if not text.endswith(REPLACEMENT) and text.startswith(self._told):
                return self._tell(text, size)
        return self.flush() if len(self._held) > MAX_HELD else ""

    def flush(self) -> str:
        """Whatever is held back, as the tokenizer decodes it."""
        text = self._decoder.decode(self._context + self._held)
        return self._tell(text, len(self._held)) if self._held else ""

    def _tell(self, text: str, size: int) -> str:
        piece = text[len(self._told) :]
        self._context, self._held = self._held[:size], self._held[size:]
        self._told = self._decoder.decode(self._context)
        return piece


class TextStream:
    """The text of one answer, cut before the first stop string.

    Args:
        decoder: turns ids into text.
        stop_strings: any of them ends the text; it is not part of the text.
        is_over: told every piece, in order; True ends the text after it.

    Raises:
        SettingError: a stop string is empty.
    """

    def __init__(
        self,
        decoder: Decoder,
        stop_strings: Sequence[str] = (),
        is_over: Callable[[str], bool] | None = None,
    ) -> None:
        if "" in stop_strings:
            raise SettingError("stop", "''", "non-empty strings", "leave it out to stop nowhere")
        self._detokenizer = Detokenizer(decoder)
        self._stops, self._is_over = tuple(stop_strings), is_over
        self._held = ""  # certain text that may still become a stop string
        self._pieces: list[str] = []
        self._num_taken = 0
        self.is_stopped = False

    def push(self, ids: Sequence[int]) -> None:
        """Add emitted tokens. Where text can end it, add them one at a time to learn which did."""
        if not self.is_stopped:
            self._release(self._detokenizer.push(ids))

    def finish(self) -> None:
        """No more tokens: release what is held back."""
        if not self.is_stopped:
            self._release(self._detokenizer.flush())
        if not self.is_stopped:
            self._pieces.append(self._held)
        self._held = ""

    def take(self) -> str:
        """Text released since the last call."""
        fresh = "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        return fresh

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._pieces)

    def _release(self, piece: str) -> None:
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.is_stopped = True
            self._pieces.append(text[: min(found)])
            self._held = ""
            return
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        self._pieces.append(text[: len(text) - keep])
        if self._is_over is not None and self._is_over(self._pieces[-1]):
            self.is_stopped, self._held = True, ""


def overlap(text: str, stop: str) -> int:
    """Length of the longest tail of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
