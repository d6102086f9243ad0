"""What a scanned answer consists of: the events of its stream, and the whole that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call that is certain; ``index`` counts the answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of the arguments' JSON; all of a call's joined are the whole."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete. One that was cut off has no such event, and its arguments are not valid JSON."""

    index: int


Event = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; ``arguments`` is JSON text, broken off where the call was."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """A whole answer. ``reasoning`` is None where the model wrote none."""

    reasoning: str | None
    content: str
    calls: list[Call]


def joined(events: Iterable[Event]) -> Message:
    """The buffered answer: a stream's events added up."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: dict[int, tuple[str, list[str]]] = {}
    for event in events:
        match event:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case CallStart(index, name):
                calls[index] = (name, [])
            case CallArguments(index, text):
                calls[index][1].append(text)
    return Message(
        "".join(reasoning) if reasoning else None,
        "".join(content),
        [Call(name, "".join(parts)) for name, parts in calls.values()],
    )
