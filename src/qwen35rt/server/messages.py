"""A chat request's messages: from the forms that clients send to the plain ones that templates take.

Owns roles, content parts, earlier reasoning and earlier tool calls. Knows nothing of templates but the
names they use; renders nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ..errors import RequestError
from .errors import UnsupportedContent, UnsupportedParameter
from .values import no_constant

log = logging.getLogger(__name__)

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class Part(msgspec.Struct):
    """One part of a content list."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Function(msgspec.Struct):
    """An earlier call's function; ``arguments`` is JSON text or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    """An earlier tool call."""

    function: Function | None = None
    type: str | None = None
    id: str | None = None


class ChatMessage(msgspec.Struct):
    """A message as it is sent; other fields of it have no meaning here."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Function | None = None


TemplateMessage = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages for a template. ``late``: where system messages stand behind others; ``sources``: index of each message
    in the request (of joined ones the first). ``open``: which text of a trailing assistant message can be continued.
    """

    messages: list[TemplateMessage]
    sources: tuple[int, ...]
    late: tuple[int, ...] = ()
    open: Literal["content", "reasoning_content"] | None = None

    def late_as_user(self) -> list[TemplateMessage]:
        """Late system messages as user turns in their places."""
        return [{**m, "role": "user"} if i in self.late else m for i, m in enumerate(self.messages)]

    def late_merged(self) -> list[TemplateMessage]:
        """Late system messages moved into the first one."""
        first = [self.messages[0]] if self.messages[0]["role"] == "system" else []
        texts = [m["content"] for m in (*first, *(self.messages[i] for i in self.late)) if m["content"]]
        rest = [m for i, m in enumerate(self.messages) if i not in self.late and i >= len(first)]
        return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


def read_messages(sent: Sequence[ChatMessage]) -> Conversation:
    """Check the messages of a request and give them the form that templates take.

    Leading system messages are joined; an empty trailing assistant message counts as absent. Raises RequestError with
    the path of the field at fault, UnsupportedContent for parts that the model cannot take (B82).
    """
    messages = [_read(message, f"messages[{i}]") for i, message in enumerate(sent)]
    sources = list(range(len(messages)))
    leading = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if leading > 1:
        text = "\n\n".join(m["content"] for m in messages[:leading] if m["content"])
        messages[:leading] = [{"role": "system", "content": text}]
        del sources[1:leading]
    while messages and _is_empty_answer(messages[-1]):
        del messages[-1], sources[-1]
    late = tuple(i for i, m in enumerate(messages) if m["role"] == "system" and i > 0)
    return Conversation(messages, tuple(sources), late, _open(messages[-1]) if messages else None)


def _is_empty_answer(message: TemplateMessage) -> bool:
    texts = message["content"], message.get("reasoning_content"), message.get("tool_calls")
    return message["role"] == "assistant" and not any(texts)


def _open(message: TemplateMessage) -> Literal["content", "reasoning_content"] | None:
    """Which text of a last message goes on if it is continued; calls end a turn."""
    if message["role"] != "assistant" or "tool_calls" in message:
        return None
    return "content" if message["content"] else "reasoning_content"


def _read(message: ChatMessage, path: str) -> TemplateMessage:
    role = ROLES.get(message.role)
    if role is None:
        raise RequestError(f"{path}.role must be one of {', '.join(ROLES)}", f"{path}.role")
    read: TemplateMessage = {"role": role, "content": _content(message, path)}
    if message.name is not None:
        read["name"] = message.name
    if role == "tool" and message.tool_call_id is not None:
        read["tool_call_id"] = message.tool_call_id
    if role == "assistant":
        reasoning = _reasoning(message, path)
        if reasoning is not None:
            read["reasoning_content"] = reasoning
        calls = [_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
        if message.function_call is not None:
            calls.append(_function(message.function_call, None, f"{path}.function_call"))
        if calls:
            read["tool_calls"] = calls
    return read


def _content(message: ChatMessage, path: str) -> str:
    content = message.content
    if content is None:
        return message.refusal or ""
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{path}.content[{i}]") for i, part in enumerate(content))


def _part(part: Part, path: str) -> str:
    if part.type not in ("text", "refusal"):
        what = "images" if part.type == "image_url" else "parts of this type"
        raise UnsupportedContent(f"{path}.type: this model takes text only, no {what}", f"{path}.type")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise RequestError(f"{path}.{part.type} must be a string", f"{path}.{part.type}")
    return text


def _reasoning(message: ChatMessage, path: str) -> str | None:
    names = [text for text in (message.reasoning_content, message.reasoning) if text is not None]
    if len(set(names)) > 1:
        raise RequestError(f"{path}: reasoning and reasoning_content differ; they are one field", f"{path}.reasoning")
    return names[0] if names else None


def _call(call: ToolCall, path: str) -> dict[str, Any]:
    if call.type not in (None, "function"):
        raise UnsupportedParameter(f"{path}.type must be 'function'", f"{path}.type")
    if call.function is None:
        raise RequestError(f"{path}.function is missing", f"{path}.function")
    return _function(call.function, call.id, f"{path}.function")


def _function(function: Function, call_id: str | None, path: str) -> dict[str, Any]:
    named = {} if call_id is None else {"id": call_id}
    body = {"name": function.name, "arguments": _arguments(function.arguments, path)}
    return {**named, "type": "function", "function": body}


def _arguments(sent: str | dict[str, Any] | None, path: str) -> dict[str, Any]:
    """The object that templates walk; a text that is none, such as a call that was cut off, is one parameter of it."""
    if not isinstance(sent, str):
        return sent or {}
    if not sent.strip():
        return {}
    try:
        read = json.loads(sent, parse_constant=no_constant)
    except (ValueError, RecursionError):
        read = None
    if isinstance(read, dict):
        return read
    log.info("%s.arguments is no JSON object; the template is given it as one parameter 'arguments'", path)
    return {"arguments": sent}
