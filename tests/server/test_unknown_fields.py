"""Unknown fields inside the objects of a body: named by their paths, or refused (C7, C8)."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from qwen35rt.errors import RequestError
from qwen35rt.server import chat, completions
from qwen35rt.server.errors import UnknownParameter, UnsupportedParameter
from qwen35rt.server.settings import ServerSettings
from tests.server.conftest import Make, Server
from tests.server.fake import asynchronous

HI: dict[str, Any] = {"role": "user", "content": "Hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"odd": 1}}}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"odd": 1}}}


def said(role: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": "x", **fields}


def ignored(body: dict[str, Any], **settings: Any) -> tuple[str, ...]:
    return chat.parse(json.dumps({"messages": [HI], **body}).encode(), ServerSettings(**settings)).ignored


NESTED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [HI, said("user", foo=1)]}, "messages[1].foo"),
    ({"messages": [said("user", content=[{"type": "text", "text": "a", "odd": {}}])]}, "messages[0].content[0].odd"),
    ({"messages": [HI, said("assistant", tool_calls=[{**CALL, "index": 0}])]}, "messages[1].tool_calls[0].index"),
    (
        {"messages": [HI, said("assistant", tool_calls=[{"function": {"name": "f", "x": 1}}])]},
        "messages[1].tool_calls[0].function.x",
    ),
    ({"messages": [said("assistant", function_call={"name": "f", "x": 1})]}, "messages[0].function_call.x"),
    ({"tools": [TOOL, {"function": {"name": "g"}, "odd": 1}]}, "tools[1].odd"),
    ({"tools": [{"function": {"name": "g", "odd": 1}}]}, "tools[0].function.odd"),
    ({"thinking": {"type": "enabled", "odd": 1}}, "thinking.odd"),
    ({"response_format": {"type": "text", "odd": 1}}, "response_format.odd"),
    ({"stream": True, "stream_options": {"include_usage": True, "odd": 1}}, "stream_options.odd"),
]


@pytest.mark.parametrize(("body", "path"), NESTED, ids=[path for _, path in NESTED])
def test_c8_unknown_fields_inside_objects_are_named_or_refused(body: dict[str, Any], path: str) -> None:
    assert ignored(body) == (path,)
    with pytest.raises(UnknownParameter) as caught:
        ignored(body, strict_fields=True)
    assert caught.value.param == path


def test_c8_what_is_known_or_free_is_not_named() -> None:
    messages = [
        said("system", name="n"),
        HI | {"annotations": None, "audio": None},
        said("assistant", reasoning_content="r", reasoning="r", refusal=None, tool_calls=[CALL]),
        said("tool", tool_call_id="c", name="f"),
        said("user", content=[{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]),
    ]
    body = {
        "messages": messages,
        "tools": [TOOL],
        "chat_template_kwargs": {"odd": {"odd": 1}},
        "metadata": {"odd": 1},
        "logit_bias": {"5": 1},
        "response_format": {"type": "text"},
        "thinking": {"type": "enabled", "budget_tokens": 3},
        "odd": None,
    }
    assert ignored(body, strict_fields=True) == ()


def test_c8_each_field_is_named_once_at_its_first_place_and_lists_are_bounded() -> None:
    turns = [said("user", id=i, content=[{"type": "text", "text": "a", "odd": 1}] * 2) for i in range(50)]
    body = {"messages": [HI, *turns, HI | {"other": 1}], "top": 1}
    assert ignored(body) == ("top", "messages[1].id", "messages[1].content[0].odd", "messages[51].other")
    many = ignored({"messages": [said("user", **{f"f{i:03}" + "y" * 100: i}) for i in range(100)]})
    assert len(many) == 16
    assert {len(path) for path in many} == {64}
    assert ignored({"messages": [said("user", **{"a\r\nb: c": 1, "\u00e9": 1})]}) == ("messages[0].abc",)


def test_a_tools_strict_is_named_but_known() -> None:
    tools = [TOOL, {"function": {"name": "g", "strict": True}}, {"function": {"name": "h", "strict": True}}]
    assert ignored({"tools": tools}, strict_fields=True) == ("tools[1].function.strict",)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"type": "json_object"}, UnsupportedParameter),
        ({"type": "json_schema", "json_schema": {}}, UnsupportedParameter),
        ({"type": "text", "json_schema": {}}, UnsupportedParameter),
        ({"type": "text", "schema": {}}, UnsupportedParameter),
        ("text", RequestError),
        ({}, RequestError),
    ],
)
def test_c7_other_response_formats_are_refused(value: Any, error: type[RequestError]) -> None:
    for body in ({"messages": [HI]}, {"prompt": "a"}):
        parse = chat.parse if "messages" in body else completions.parse
        with pytest.raises(error) as caught:
            parse(json.dumps(body | {"response_format": value}).encode(), ServerSettings())
        assert (caught.value.param or "").split(".")[0] == "response_format"


@asynchronous
async def test_c8_the_header_tells_paths(server: Server, make: Make) -> None:
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": False, "odd": 1}, "top": 1}
    answer = await server.post(body)
    assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "top, stream_options.odd")
    refused = await make(strict_fields=True).post({k: v for k, v in body.items() if k != "top"})
    assert (refused.status, refused.error["param"]) == (400, "stream_options.odd")
    assert refused.error["code"] == "unknown_parameter"


@asynchronous
async def test_c8_fields_without_effect_are_one_line_in_the_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "qwen35rt")
    await server.post({"prompt": "a", "one": 1, "two": 2}, headers=[("x-request-id", "r1")])
    await server.post({"prompt": "a", "user": "u"})
    lines = [r.getMessage() for r in caplog.records if "without effect" in r.msg]
    assert lines == ["request r1: fields without effect: one, two"]
