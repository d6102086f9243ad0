"""Incremental text of one turn: ids in, final text out, with stop strings.

Buffered and streamed answers both come from here. The work per token depends on the token and on the
longest stop, never on the length of the text so far (C38).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What a detokeniser needs of a tokeniser."""

    def token_bytes(self, token: int) -> bytes: ...

    def hidden(self, token: int) -> bool: ...


class Detokenizer:
    """Text of a turn, in parts that are never taken back.

    ``stops`` end the text at the smallest start of a match (C31), or behind it with ``include_stop`` (C33);
    of several that start there the shortest counts. ``skip_special`` leaves control tokens out (C37).
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        stops: Sequence[str] = (),
        skip_special: bool = True,
        include_stop: bool = False,
    ) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty")
        self._tokenizer = tokenizer
        self._stops = sorted(set(stops), key=len)
        self._prefixes = frozenset(stop[:n] for stop in self._stops for n in range(1, len(stop)))
        self._longest = max(map(len, self._stops), default=1)
        self._skip_special = skip_special
        self._include_stop = include_stop
        # Holds back an open character and gives one U+FFFD per maximal broken piece, as bytes.decode does.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # the longest tail that is a proper prefix of some stop (C35)
        self.armed = True  # while False, stop strings do not act and nothing is held back for them
        self.stopped = False
        self.stop_reason: str | None = None

    def push(self, token: int) -> str:
        """Text that became final with this token; "" after a stop."""
        if self.stopped or (self._skip_special and self._tokenizer.hidden(token)):
            return ""
        return self._take(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def finish(self) -> str:
        """The rest: held-back text, an open character as U+FFFD. ``push`` must not follow."""
        if self.stopped:
            return ""
        text = self._take(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _take(self, text: str) -> str:
        if not self._stops or not (text or self._held):
            return text
        window, self._held = self._held + text, ""
        if not self.armed:
            return window
        # A match cannot start before the held-back tail: what was released could not become a stop.
        starts = [(at, len(stop), stop) for stop in self._stops if (at := window.find(stop)) >= 0]
        if starts:
            at, length, self.stop_reason = min(starts)
            self.stopped = True
            return window[: at + length] if self._include_stop else window[:at]
        for n in range(min(self._longest - 1, len(window)), 0, -1):
            if window[-n:] in self._prefixes:
                self._held = window[-n:]
                return window[:-n]
        return window
