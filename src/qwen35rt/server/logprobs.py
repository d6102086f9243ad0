"""Log-probabilities of /v1/completions: tokens as text, offsets, and which entries a chunk of a stream may carry."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from ..engine.result import TokenLogprob
from ..tokenizer import Tokenizer

_NEVER = -9999.0  # JSON has no minus infinity


class _Entry(NamedTuple):
    token: str
    logprob: float | None
    top: dict[str, float] | None
    start: int  # characters of the choice's text before this token's
    end: int
    data: bytes


def spell_token(data: bytes) -> str:
    """A token as text; one that is not whole UTF-8 by its bytes (C57)."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


class TokenLog:
    """Entries of one choice, in order. Counts characters as the answer's own decoder does.

    ``silent``: ids that are no text. ``start``: characters of the choice's text before the first token.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, silent: Collection[int] = (), start: int = 0) -> None:
        self._tokenizer, self._skip_special, self._silent = tokenizer, skip_special, silent
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = start
        self._pending: list[_Entry] = []

    def add(self, entries: Iterable[TokenLogprob]) -> None:
        """Tokens that were drawn."""
        for entry in entries:
            self._push(entry.id, entry.logprob, dict(entry.top))

    def add_prompt(self, ids: Sequence[int], entries: Sequence[TokenLogprob | None], unsent: int, end: int) -> None:
        """Tokens of an echoed prompt of ``end`` characters; the first ``unsent`` are not part of its text."""
        for at, (token, entry) in enumerate(zip(ids, entries, strict=True)):
            top = None if entry is None else dict(entry.top)
            self._push(token, None if entry is None else entry.logprob, top, silent=at < unsent)
        # Normalisation may have changed the number of characters: the text is the one that was sent.
        self._pending = [e._replace(start=min(e.start, end), end=min(e.end, end)) for e in self._pending]
        self._decoder.reset()
        self._chars = end

    def take(self, released: int, *, last: bool = False) -> dict[str, Any] | None:
        """Entries whose text is within the ``released`` first characters, or all that are left; None if none are."""
        n = 0
        while n < len(self._pending) and (last or self._pending[n].end <= released):
            n += 1
        taken, self._pending = self._pending[:n], self._pending[n:]
        return self._arrays(taken, released) if taken else None

    def none(self) -> dict[str, Any]:
        """The object of no entries."""
        return self._arrays([])

    def _arrays(self, taken: Sequence[_Entry], released: int = 0) -> dict[str, Any]:
        return {
            "tokens": [e.token for e in taken],
            "token_logprobs": [e.logprob for e in taken],
            "top_logprobs": [e.top for e in taken],
            "text_offset": [min(e.start, released) for e in taken],
            "bytes": [list(e.data) for e in taken],
        }

    def _push(self, token: int, logprob: float | None, top: dict[int, float] | None, *, silent: bool = False) -> None:
        data = self._tokenizer.token_bytes(token)
        start = self._chars
        if not (silent or token in self._silent or (self._skip_special and self._tokenizer.hidden(token))):
            self._chars += len(self._decoder.decode(data))
        shown: dict[str, float] | None = None
        if top is not None and logprob is not None:
            shown = {}
            for i, value in [*top.items(), (token, logprob)]:
                shown.setdefault(spell_token(self._tokenizer.token_bytes(i)), _finite(value))
            shown[spell_token(data)] = _finite(logprob)  # of two tokens with one spelling the drawn one counts
        number = None if logprob is None else _finite(logprob)
        self._pending.append(_Entry(spell_token(data), number, shown, start, self._chars, data))


def _finite(value: float) -> float:
    return max(float(value), _NEVER)
