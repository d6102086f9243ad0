"""One conversation to learn from or to be judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """Messages of a conversation; the last one is the assistant's answer to learn.

    ``messages`` and ``tools`` have OpenAI's shape, but arguments of calls are mappings. ``must``: substrings of a
    right answer, without regard to case; an answer with tool calls is judged by their names and arguments instead.
    """

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False  # the generation prompt is rendered with enable_thinking
    must: tuple[str, ...] = ()
