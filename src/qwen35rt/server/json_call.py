"""Calls of older templates: one JSON object with a name and arguments between the call's tags.

Unlike the form with tags it is read when it is complete: only then is it known to be JSON.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from qwen35rt.server.tags import CALL, END_CALL, tag_at
from qwen35rt.server.values import no_constant, parsed

Verdict = Literal["open", "whole", "broken"]

_MARK = re.compile(r'["\\{}<]')  # one character: nothing to go back to
_lenient = json.JSONDecoder(parse_constant=no_constant, strict=False)  # takes raw line breaks in strings


class ObjectEnd:
    """Finds the end of a JSON object that comes in pieces, its ``{`` first."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the next character belongs to a backslash
        self._last = ""  # the character before the text at hand

    def take(self, buf: str, at: int, final: bool) -> tuple[int, Verdict]:
        """Position up to which the text was read, and whether the object is complete there.

        A tag breaks it; inside a string only one at the start of a line, which JSON's strings cannot have.
        """
        end, verdict = self._take(buf, at, final)
        if end > at:
            self._last = buf[end - 1]
        return end, verdict

    def _take(self, buf: str, at: int, final: bool) -> tuple[int, Verdict]:
        start = at
        if self._escaped:
            self._escaped = False
            at += 1
        while mark := _MARK.search(buf, at):
            at = mark.start()
            match buf[at]:
                case "<":
                    tag = tag_at(buf, at, (CALL, END_CALL), final)
                    before = buf[at - 1] if at > start else self._last
                    if tag == "":
                        return at, "open"
                    if tag and (not self._in_string or before == "\n"):
                        return at, "broken"
                case '"':
                    self._in_string = not self._in_string
                case "\\" if self._in_string:
                    at += 1
                    self._escaped = at == len(buf)
                case "{" if not self._in_string:
                    self._depth += 1
                case "}" if not self._in_string:
                    self._depth -= 1
                    if self._depth == 0:
                        return at + 1, "whole"
            at += 1
        return len(buf), "open"


def call_of_json(text: str) -> tuple[str, str] | None:
    """Name and arguments of ``{"name": ..., "arguments": {...}}``; None if the text is no such object.

    Arguments are JSON text. They may be absent, or a string that holds the object.
    """
    body = parsed(text, _lenient)
    if not isinstance(body, dict):
        return None
    name, arguments = body.get("name"), body.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parsed(arguments, _lenient)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        name.encode()
        plain = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    try:
        plain.encode()
    except UnicodeEncodeError:  # lone surrogates that were escaped: they stay escaped
        return name, json.dumps(arguments)
    return name, plain


def cut_call_of_json(text: str) -> tuple[str, str] | None:
    """Name and arguments as far as written of a call whose JSON breaks off; None before its name is complete."""
    name, at = "", text.find("{") + 1
    try:
        while True:
            key, at = _lenient.raw_decode(text, _skip(text, at, ""))
            at = _skip(text, at, ":")
            if key == "arguments" and name:
                return name, text[at:] if text.startswith("{", at) else "{"
            value, at = _lenient.raw_decode(text, at)
            if key == "name" and isinstance(value, str):
                value.encode()
                name = value
            at = _skip(text, at, ",")
    except (ValueError, RecursionError):
        return (name, "{") if name else None


def _skip(text: str, at: int, mark: str) -> int:
    """Position behind blanks, ``mark`` and more blanks. Raises ValueError where the mark is not there."""
    for part in (mark, ""):
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        if not text.startswith(part, at):
            raise ValueError("not the mark")
        at += len(part)
    return at
