"""Chat requests of the tests, and what clients make of the answers."""

from __future__ import annotations

from typing import Any

PATH = "/v1/chat/completions"
HI = {"role": "user", "content": "Hi"}
CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]


def add_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice that the chunks of a stream make."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    end: dict[str, Any] = {}
    for choice in (c for e in events for c in e["choices"]):
        delta = choice["delta"]
        for key in ("role", "content", "reasoning", "reasoning_content"):
            if key in delta:
                message[key] = message.get(key, "") + delta[key]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            end = {key: choice[key] for key in ("finish_reason", "stop_reason", "index", "logprobs")}
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return {"message": message, **end}


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [{k: v for k, v in call.items() if k != "id"} for call in message["tool_calls"]]
    return {**choice, "message": message}
