"""Splits what a model writes into reasoning, content and tool calls, as the text comes.

One pass, whatever the cut: only what can still become a tag is held back, and its length is bounded; blanks
whose fate is open wait aside. Knows nothing of HTTP or tokens. Nothing raises, whatever the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from qwen35rt.server.arguments import CallWriter
from qwen35rt.server.closing import closes
from qwen35rt.server.events import (
    Call,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Message,
    Reasoning,
    joined,
)
from qwen35rt.server.json_call import ObjectEnd, call_of_json, cut_call_of_json
from qwen35rt.server.tags import (
    BLANKS,
    CALL,
    END_CALL,
    END_FUNCTION,
    END_PARAMETER,
    END_THINK,
    FUNCTION,
    MORE,
    NONE,
    PARAMETER,
    THINK,
    blanks_end,
    break_before,
    find_tag,
    named_tag_at,
    tag_at,
    tag_name,
)
from qwen35rt.server.values import ToolTypes

__all__ = ["Call", "CallArguments", "CallEnd", "CallStart", "Content", "Event", "Form", "Message", "Reasoning"]
__all__ += ["Scanner", "call_form", "joined"]

Form = Literal["xml", "json"]

_IN_CONTENT = (CALL,)
_IN_OPEN_CALL = (CALL, END_CALL)  # behind a function whose call has not been closed
_IN_FUNCTION = (PARAMETER, END_FUNCTION, END_CALL, CALL, FUNCTION)
_IN_VALUE = (END_PARAMETER, END_FUNCTION, END_CALL, PARAMETER, CALL)


def call_form(template_source: str) -> Form:
    """The form of calls that a chat template shows to its model."""
    return "xml" if FUNCTION in template_source else "json"


class Scanner:
    """Events of one answer.

    ``reasoning``: the prompt ends inside an open ``<think>``; with ``opening`` right behind the tag, whose line
    break is then still to come. ``tools`` (OpenAI's list) type the arguments. Without ``parse_calls`` everything
    behind the reasoning is content. ``form`` is that of ``call_form``.

    A state is a method that reads from a position and returns the one to go on from: the same position in the
    same state means that the text from there waits for more.
    """

    def __init__(
        self,
        reasoning: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        parse_calls: bool = True,
        form: Form = "xml",
        opening: bool = False,
    ) -> None:
        self._types = ToolTypes(tools)
        self._answer: _State = Scanner._content if parse_calls else Scanner._plain
        self._call: _State = Scanner._opened if form == "xml" else Scanner._object_opened
        self._state: _State = Scanner._reasoning if reasoning else Scanner._first
        self._skip = int(reasoning and opening)  # so many line breaks, if they come next, are markup
        self._out: list[Event] = []
        self._held = ""  # what can still become a tag
        self._final = False  # no more text comes
        self._blanks: list[str] = []  # behind the text so far: dropped if a tag follows, else text
        self._calls = 0  # that are certain
        self._spoken = False  # there was content
        self._behind_call = False  # no content since the last call
        self._tags: tuple[str, ...] = _IN_CONTENT  # tags that mean something in content
        self._raw: list[str] = []  # what was read of a call that is not certain yet
        self._writer = CallWriter(self._types, "", 0)
        self._crlf = False  # how the last line break that was markup was written
        self._begun = False  # some of the current value was read
        self._object = ObjectEnd()

    def push(self, text: str) -> list[Event]:
        """Events that became certain with this piece of text."""
        return self._run(self._held + text if self._held else text)

    def finish(self, reason: str) -> list[Event]:
        """The rest. ``stop``: the model ended its turn, and missing closing tags are supplied; anything else
        (``length``, ``cancelled``) cut it off, and an open call stays as far as it was written.
        """
        self._final = True
        rest, self._held = self._held, ""
        if reason != "stop" and self._state in (Scanner._parameters, Scanner._value):
            self._out = []
            if self._state is Scanner._value:
                self._take(rest)
                self._writer.cut_value(self._out)
            else:
                self._start()
                self._writer.cut(rest[len(PARAMETER) :] if rest.startswith(PARAMETER) else "", self._out)
        else:
            self._run(rest)
            self._close(reason == "stop")
        self._state = Scanner._done
        return self._out

    def _close(self, whole: bool) -> None:
        """Ends the state that the text ended in."""
        state = self._state
        if state is Scanner._reasoning:
            self._emit(Reasoning, "")
            return
        if state is Scanner._value:
            self._writer.close(self._out)
        if state in (Scanner._value, Scanner._parameters, Scanner._junk) and whole:
            self._end()
        cut = cut_call_of_json("".join(self._raw[1:])) if state is Scanner._object_body and not whole else None
        if cut:
            self._give_object(*cut, whole=False)
        elif state in (Scanner._opened, Scanner._object_opened, Scanner._object_body):
            self._reject()
        if not self._calls:
            self._emit(Content, "")

    def _run(self, buf: str) -> list[Event]:
        out: list[Event] = []
        self._out = out
        at, end = 0, len(buf)
        while at < end:
            if self._skip:
                step = 1 if buf[at] == "\n" else 2 if buf.startswith("\r\n", at) else 0
                if not step and buf[at] == "\r" and at + 1 == end and not self._final:
                    break
                self._skip = self._skip - 1 if step else 0
                self._crlf = step == 2
                at += step
                continue
            state = self._state
            now = state(self, buf, at)
            if now == at and self._state is state:
                break
            at = now
        self._held = buf[at:]
        return out

    def _done(self, buf: str, at: int) -> int:
        return len(buf)  # nothing is read behind the end

    # ------------------------------------------------------------------------------------------ reasoning, content

    def _first(self, buf: str, at: int) -> int:
        """The very start of an answer: a model may open its reasoning itself."""
        tag = tag_at(buf, at, (THINK,), self._final)
        if tag is None:
            self._state = self._answer
            return at
        if tag:
            self._state, self._skip = Scanner._reasoning, 1
        return at + len(tag)

    def _reasoning(self, buf: str, at: int) -> int:
        end, tag = find_tag(buf, at, (END_THINK,), self._final)
        text = buf[at:end]
        body = text.rstrip("\r\n")
        if body:
            self._emit(Reasoning, body)
        if len(body) < len(text):
            self._blanks.append(text[len(body) :])
        if tag:
            held = "".join(self._blanks)
            low = len(held)
            while (before := break_before(held, 0, low)) < low:
                low = before
            self._blanks = [held[:low]]
            self._emit(Reasoning, "")
            self._state, self._skip = self._answer, 2
        return end + len(tag)

    def _plain(self, buf: str, at: int) -> int:
        self._out.append(Content(buf[at:]))
        return len(buf)

    def _content(self, buf: str, at: int) -> int:
        end, tag = find_tag(buf, at, self._tags, self._final)
        if end > at:
            self._say(buf[at:end])
        if tag == CALL:
            self._raw = [tag]
            self._state = self._call
        elif tag:
            self._blanks.clear()
            self._tags = _IN_CONTENT
        return end + len(tag)

    def _say(self, text: str) -> None:
        """Content, but for the blanks behind it. Blanks between a call and text part it from earlier content."""
        body = text.rstrip(BLANKS)
        if body:
            tail = text[len(body) :]
            if self._behind_call and not self._spoken:
                self._blanks.clear()
                body = body.lstrip(BLANKS)
            self._spoken, self._behind_call = True, False
            self._emit(Content, body)
            text = tail
        if text:
            self._blanks.append(text)

    def _emit(self, kind: type[Reasoning] | type[Content], text: str) -> None:
        """Text with the blanks that waited before it."""
        if self._blanks:
            text = "".join(self._blanks) + text
            self._blanks.clear()
        if text:
            self._out.append(kind(text))

    # ------------------------------------------------------------------------------------------ a call's tags

    def _opened(self, buf: str, at: int) -> int:
        """Behind the call's tag: a function's tag, or this was no call."""
        end = blanks_end(buf, at)
        self._raw.append(buf[at:end])
        if end == len(buf):
            return end
        name, behind = named_tag_at(buf, end, FUNCTION, self._final)
        if behind == NONE:
            self._reject()
        if behind < 0:
            return end
        return self._open_function(name, buf, end, behind)

    def _open_function(self, name: str, buf: str, at: int, behind: int) -> int:
        self._raw.append(buf[at:behind])
        self._writer = CallWriter(self._types, name, self._calls)
        self._state = Scanner._parameters
        return behind

    def _reject(self) -> None:
        """No call: what was read since its first tag is content."""
        raw = "".join(self._raw)
        self._raw = []
        self._tags = _IN_CONTENT
        self._state = Scanner._content
        self._say(raw)

    def _start(self) -> None:
        """The call is certain."""
        if not self._writer.started:
            self._raw = []
            self._blanks.clear()
            self._calls += 1
            self._behind_call = True
            self._writer.start(self._out)

    def _end(self) -> None:
        self._start()
        self._writer.end(self._out)
        self._blanks.clear()
        self._behind_call = True
        self._state = Scanner._between

    def _parameters(self, buf: str, at: int) -> int:
        """Between a function's tags: a parameter, or a tag that ends the function."""
        end = blanks_end(buf, at)
        if not self._writer.started:
            self._raw.append(buf[at:end])
        if end == len(buf):
            return end
        tag = tag_at(buf, end, _IN_FUNCTION, self._final)
        if tag == "":
            return end
        if tag in (PARAMETER, FUNCTION):
            name, behind = tag_name(buf, end + len(tag), self._final)
            if behind == MORE:
                return end
            if behind == NONE:
                tag = None
            elif tag == PARAMETER:
                self._start()
                self._blanks.clear()
                self._writer.open(name, self._out)
                self._state, self._skip = Scanner._value, 1
                self._begun = self._crlf = False
                return behind
        if tag is None and self._writer.started:
            self._state = Scanner._junk
            self._say(buf[end])
            return end + 1
        if tag is None:
            self._reject()
            return end
        self._end()
        return end + len(tag) if tag == END_FUNCTION else end

    def _junk(self, buf: str, at: int) -> int:
        """Text between the parameters of a call that is certain: content, up to the next tag."""
        end, tag = find_tag(buf, at, _IN_FUNCTION, self._final)
        self._say(buf[at:end])
        if tag:
            self._state = Scanner._parameters
        return end

    def _between(self, buf: str, at: int) -> int:
        """Behind a function: another one of the same call, or on with content."""
        end = blanks_end(buf, at)
        self._blanks.append(buf[at:end])
        if end == len(buf):
            return end
        name, behind = named_tag_at(buf, end, FUNCTION, self._final)
        if behind >= 0:
            return self._open_function(name, buf, end, behind)
        if behind == NONE:
            self._tags = _IN_OPEN_CALL
            self._state = Scanner._content
        return end

    # ------------------------------------------------------------------------------------------ values

    def _value(self, buf: str, at: int) -> int:
        """A parameter's text, up to its closing tag or one that shows it missing.

        Templates write LF around a value: a CR before the last one is the value's, unless it began with CRLF.
        """
        scan = at
        while True:
            found, tag = find_tag(buf, scan, _IN_VALUE, self._final)
            end = break_before(buf, at, found, self._crlf)  # a line break waits too: before a closing tag it is markup
            if not tag:
                break
            at_line = end < found or (found == at and not self._begun)
            scan = closes(buf, found, tag, at_line, self._writer, self._final)
            if scan == found:
                self._take(buf[at:end])
                self._writer.close(self._out)
                self._state = Scanner._parameters
                return found + len(tag) if tag == END_PARAMETER else found
            if scan == MORE:
                break
        if found == len(buf) == end and buf[-1] == "\r" and not self._final:
            end -= 1
        self._take(buf[at:end])
        return len(buf) if self._final else end

    def _take(self, text: str) -> None:
        if text:
            self._begun = True
            self._writer.take(text, self._out)

    # ------------------------------------------------------------------------------------------ calls in JSON

    def _object_opened(self, buf: str, at: int) -> int:
        """Behind the call's tag: an object, or this was no call."""
        end = blanks_end(buf, at)
        self._raw.append(buf[at:end])
        if end < len(buf):
            if buf[end] == "{":
                self._state, self._object = Scanner._object_body, ObjectEnd()
            else:
                self._reject()
        return end

    def _object_body(self, buf: str, at: int) -> int:
        end, verdict = self._object.take(buf, at, self._final)
        self._raw.append(buf[at:end])
        call = call_of_json("".join(self._raw[1:])) if verdict == "whole" else None
        if call:
            self._give_object(*call, whole=True)
        elif verdict != "open":
            self._reject()
        return end

    def _give_object(self, name: str, arguments: str, whole: bool) -> None:
        self._writer = CallWriter(self._types, name, self._calls)
        self._start()
        self._out.append(CallArguments(self._calls - 1, arguments))
        if whole:
            self._out.append(CallEnd(self._calls - 1))
        self._tags = _IN_OPEN_CALL
        self._state = Scanner._content


_State = Callable[[Scanner, str, int], int]
