"""Keeps text of a caller from becoming control tokens in a rendered chat prompt (B52).

A private-use character, the breaker, is put into whatever in a caller's strings spells a control token
or could do so together with its neighbours. It survives rendering, keeps the control tokens from being
matched, and is taken out before the text between real markers is encoded as one piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from qwen35rt.errors import RequestError
from qwen35rt.tokenizer.base import Tokenizer
from qwen35rt.tokenizer.vocab import USER_MARKERS, Vocab

_PRIVATE = re.compile("[\U000f0000-\U000ffffd]")


def pick_breaker(texts: Iterator[str]) -> str:
    """A private-use character that occurs in none of ``texts``."""
    used = {c for text in texts if not text.isascii() for c in _PRIVATE.findall(text)}
    for code in range(0xF0000, 0xFFFFE):
        if chr(code) not in used:
            return chr(code)
    raise RequestError("the messages use every character of a private-use plane", "messages")


class Guard:
    """The places at which strings are broken, for the control tokens of one vocabulary."""

    def __init__(self, vocab: Vocab) -> None:
        # Templates look for these in contents, so they must come through whole in every vocabulary.
        whole = USER_MARKERS.union(vocab.tokens[i] for i in vocab.user_defined)
        self._tokens = sorted({vocab.tokens[i] for i in vocab.control if len(vocab.tokens[i]) > 1})
        # A head is what tells a control token from every such marker, like "<|": any control token
        # in the prompt needs its head, so heads are broken wherever they stand.
        heads = sorted({_head(token, whole) for token in self._tokens})
        self._heads = _alternatives([f"{re.escape(h[0])}(?={re.escape(h[1:])})" for h in heads])
        # A head may be completed by what follows the string, which a template may have stripped before.
        ends = sorted({h[:n] for h in heads for n in range(1, len(h))}, key=len, reverse=True)
        self._end = _alternatives([re.escape(end) for end in ends], r"(?:%s)(?=\s*\Z)")
        # Or the template wrote the first part of a token and the string has the rest. A plain word is left
        # alone: a template may build a marker from a role, and compares words.
        rests = {t[n:] for t in self._tokens for n in range(1, len(t))}
        self._start = _alternatives([re.escape(r) for r in sorted(rests, key=len, reverse=True) if not _is_word(r)])

    def protect(self, text: str, breaker: str) -> str:
        if self._heads is None:
            return text
        text = self._heads.sub(rf"\g<0>{breaker}", text)
        if self._end is not None:
            text = self._end.sub(rf"\g<0>{breaker}", text)
        core = text.strip()
        if core and not _is_word(core):
            at = len(text) - len(text.lstrip())
            if (self._start and self._start.match(text, at)) or any(core in token[1:] for token in self._tokens):
                text = text[:at] + breaker + text[at:]
        return text


class Encoded(NamedTuple):
    """Ids of a rendered text, its last control token (None: it has none), and the plain text behind that."""

    ids: list[int]
    control: int | None
    tail: str


def encode_guarded(tokenizer: Tokenizer, text: str, breaker: str) -> Encoded:
    """Encode rendered ``text``: unbroken control tokens are matched, all between two of them is one piece."""
    ids: list[int] = []
    control, tail = None, ""
    for piece in tokenizer.cut_control(text):
        if isinstance(piece, int):
            ids.append(piece)
            control, tail = piece, ""
        else:
            tail = piece.replace(breaker, "")
            ids += tokenizer.encode(tail)
    return Encoded(ids, control, tail)


def _head(token: str, whole: frozenset[str]) -> str:
    for n in range(2, len(token)):
        if not any(w.startswith(token[:n]) for w in whole):
            return token[:n]
    return token


def _is_word(text: str) -> bool:
    return text.replace("_", "a").isalnum()


def _alternatives(patterns: list[str], form: str = "%s") -> re.Pattern[str] | None:
    return re.compile(form % "|".join(patterns)) if patterns else None
