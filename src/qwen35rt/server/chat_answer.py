"""One choice of a chat answer: what the model writes, as a message or as the deltas of a stream (a ChoiceWriter).

The message is the stream's events added up, so both say the same (B67).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..engine.result import Completion, Delta
from .answer import Json, usage_of
from .record import random_letters
from .scan import CallArguments, CallEnd, CallStart, Content, Event, Form, Reasoning, Scanner, joined
from .tags import END_THINK, THINK

ReasoningField = Literal["both", "reasoning_content", "reasoning", "none"]
_REASONING_KEYS: dict[str, tuple[str, ...]] = {
    "both": ("reasoning_content", "reasoning"),
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "none": (),
}


@dataclass(frozen=True)
class AnswerForm:
    """How a choice is read and written. The first five are the Scanner's.

    ``one_call``: what follows the first call is dropped. ``split`` False: reasoning stays in the content, tags
    included. ``reasoning_field``: under which names it is told; with "none" it is left out. ``prompt_ids``: told in the
    answer where they are given.
    """

    reasoning: bool
    opening: bool = False
    tools: Sequence[dict[str, Any]] | None = None
    calls: bool = False
    form: Form = "xml"
    one_call: bool = False
    split: bool = True
    reasoning_field: ReasoningField = "both"
    prompt_ids: tuple[int, ...] | None = None


class ChatWriter:
    """A choice with number ``index``."""

    def __init__(self, index: int, form: AnswerForm) -> None:
        self._index, self._form = index, form
        self._keys = _REASONING_KEYS[form.reasoning_field]
        self._reader = _reader(form)
        self._calls = 0
        self._complete = False  # nothing more is told
        self._ids: list[int] = []  # drawn, not sent yet

    def begin(self) -> list[Json]:
        chunk = self._chunk({"role": "assistant", "content": ""})
        if self._form.prompt_ids is not None:
            chunk["prompt_token_ids"] = self._form.prompt_ids
        return [chunk]

    def delta(self, delta: Delta) -> list[Json]:
        self._ids += delta.ids
        return self._chunks(self._reader.push(delta.text))

    def finish(self, completion: Completion) -> list[Json]:
        chunks = self._chunks(self._reader.finish(completion.finish_reason))
        terminal = self._chunk({}) | self._end(completion, self._calls)
        return [*chunks, terminal]

    def failed(self) -> Json:
        return self._chunk({}) | {"finish_reason": "error"}

    def whole(self, completion: Completion) -> Json:
        events = [*self._reader.push(completion.text), *self._reader.finish(completion.finish_reason)]
        message = joined(self._wanted(events))
        told: Json = {
            "role": "assistant",
            "content": None if message.calls and not message.content else message.content,
        }
        if message.reasoning is not None:
            told |= dict.fromkeys(self._keys, message.reasoning)
        if message.calls:
            told["tool_calls"] = [_call(c.name, c.arguments) for c in message.calls]
        choice: Json = {"index": self._index, "message": told} | self._end(completion, len(message.calls))
        choice["logprobs"] = None
        if self._form.prompt_ids is not None:
            choice |= {"prompt_token_ids": self._form.prompt_ids, "token_ids": completion.ids}
        return choice

    def _end(self, completion: Completion, calls: int) -> Json:
        reason = completion.finish_reason
        told = "tool_calls" if calls and reason == "stop" else reason
        return {"finish_reason": told, "stop_reason": completion.stop_reason}

    def _wanted(self, events: Iterable[Event]) -> Iterator[Event]:
        """The engine ends a turn at the token of a closing tag; a model may also spell the tag, or leave it out."""
        for event in events:
            if not self._complete:
                yield event
                self._complete = self._form.one_call and isinstance(event, CallEnd)

    def _chunks(self, events: Iterable[Event]) -> list[Json]:
        deltas: list[Json] = []
        for event in _merged(self._wanted(events)):
            match event:
                case Reasoning(text) if self._keys:
                    deltas.append(dict.fromkeys(self._keys, text))
                case Content(text):
                    deltas.append({"content": text})
                case CallStart(index, name):
                    self._calls += 1
                    deltas.append({"tool_calls": [{"index": index} | _call(name, "")]})
                case CallArguments(index, text):
                    deltas.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        return [self._chunk(delta) for delta in deltas]

    def _chunk(self, delta: Json) -> Json:
        chunk: Json = {"index": self._index, "delta": delta, "finish_reason": None, "logprobs": None}
        if self._form.prompt_ids is not None:
            chunk["token_ids"], self._ids = self._ids, []
        return chunk


def chat_usage(completions: Sequence[Completion]) -> Json:
    """Usage with the share of reasoning."""
    reasoning = sum(c.usage.reasoning_tokens for c in completions)
    return usage_of(completions) | {"completion_tokens_details": {"reasoning_tokens": reasoning}}


def _call(name: str, arguments: str) -> Json:
    call_id = "call_" + random_letters()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _merged(events: Iterable[Event]) -> list[Event]:
    """Pieces of one kind that follow each other become one."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            merged[-1] = CallArguments(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged


def _reader(form: AnswerForm) -> Scanner | _Unsplit:
    if form.split:
        return Scanner(form.reasoning, form.tools, form.calls, form.form, form.opening)
    return _Unsplit(form.reasoning, Scanner(False, form.tools, form.calls, form.form))


class _Unsplit:
    """Gives the reasoning with its tags as content, then what the scanner reads in the rest: calls count there only."""

    def __init__(self, reasoning: bool, scanner: Scanner) -> None:
        self._scanner = scanner
        self._state: Literal["start", "reasoning", "answer"] = "reasoning" if reasoning else "start"
        self._held = ""

    def push(self, text: str) -> list[Event]:
        text = self._held + text
        self._held = ""
        if self._state == "start":
            if len(text) < len(THINK) and THINK.startswith(text):
                self._held = text
                return []
            self._state = "reasoning" if text.startswith(THINK) else "answer"
        if self._state == "answer":
            return [_as_content(event) for event in self._scanner.push(text)]
        end = text.find(END_THINK)
        if end >= 0:
            self._state = "answer"
            end += len(END_THINK)
            return [Content(text[:end]), *self.push(text[end:])]
        keep = next((n for n in range(len(END_THINK) - 1, 0, -1) if text.endswith(END_THINK[:n])), 0)
        text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return [Content(text)] if text else []

    def finish(self, reason: str) -> list[Event]:
        held, self._held = self._held, ""
        events: list[Event] = [Content(held)] if held else []
        return [*events, *(_as_content(event) for event in self._scanner.finish(reason))]


def _as_content(event: Event) -> Event:
    return Content(event.text) if isinstance(event, Reasoning) else event
