"""Writes one call's arguments as JSON while its parameters come. Knows nothing of tags."""

from __future__ import annotations

from qwen35rt.server.events import CallArguments, CallEnd, CallStart, Event
from qwen35rt.server.values import STRING, Kinds, ToolTypes, quote, value_json


class CallWriter:
    """Events of a call, appended to ``out`` of each method. A string's text is given as it comes, other values
    when they are complete. Of a repeated parameter the first counts.
    """

    def __init__(self, types: ToolTypes, name: str, index: int) -> None:
        self.name = name
        self.started = False
        self.keys: set[str] = set()
        self._types = types
        self._index = index
        self._kinds: Kinds = STRING
        self._repeated = False
        self._value: list[str] = []

    def expects(self, key: str) -> bool:
        """Whether this parameter can come next: declared, if any are, and not given yet."""
        return key not in self.keys and self._types.declares(self.name, key)

    def knows(self, function: str) -> bool:
        """Whether a call of this function can be meant."""
        return self._types.known(function)

    def start(self, out: list[Event]) -> None:
        """The call is certain."""
        if not self.started:
            self.started = True
            out.append(CallStart(self._index, self.name))

    def open(self, key: str, out: list[Event]) -> None:
        """A parameter's value begins."""
        self.start(out)
        self._value = []
        self._repeated = key in self.keys
        if not self._repeated:
            self._kinds = self._types.kinds(self.name, key)
            self._give(self._lead() + quote(key) + (': "' if self._kinds == STRING else ": "), out)
        self.keys.add(key)

    def take(self, text: str, out: list[Event]) -> None:
        """More of the value."""
        if self._repeated:
            return
        if self._kinds == STRING:
            self._give(quote(text)[1:-1], out)
        else:
            self._value.append(text)

    def close(self, out: list[Event]) -> None:
        """The value is complete."""
        if not self._repeated:
            self._give('"' if self._kinds == STRING else value_json("".join(self._value), self._kinds), out)

    def end(self, out: list[Event]) -> None:
        """The call is complete."""
        self.start(out)
        self._give("}" if self.keys else "{}", out)
        out.append(CallEnd(self._index))

    def cut_value(self, out: list[Event]) -> None:
        """The call breaks off in a value: it stays an open string, of which no type could make valid JSON."""
        if not self._repeated and self._kinds != STRING:
            self._give(quote("".join(self._value))[:-1], out)

    def cut(self, key: str, out: list[Event]) -> None:
        """The call breaks off between its values, in the name ``key`` if there is some of it.

        At least the brace is given: an empty text would read as "no arguments".
        """
        self.start(out)
        if key:
            self._give(self._lead() + quote(key)[:-1], out)
        elif not self.keys:
            self._give("{", out)

    def _lead(self) -> str:
        return ", " if self.keys else "{"

    def _give(self, text: str, out: list[Event]) -> None:
        if text:
            out.append(CallArguments(self._index, text))
