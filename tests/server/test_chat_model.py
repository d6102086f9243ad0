"""Chats with scripted models: file, template, engine and server together, and OpenAI's client as the judge."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from quart import Quart

from qwen35rt.server.app import create_app
from qwen35rt.server.loading import make_service
from qwen35rt.server.settings import ServerSettings
from tests.fixtures import write_script
from tests.server.chat_server import HI, PATH, add_up, without_ids
from tests.server.chat_templates import QWEN
from tests.server.fake import Exchange, asynchronous

CALL: tuple[bytes | str, ...] = (
    "<tool_call>",
    b"\n<function=f>\n",
    b"<parameter=city>\n",
    b"K\xc3\xb6ln\n</parameter>\n",
    b"<parameter=n>\n3\n</parameter>\n</function>\n",
    "</tool_call>",
)
TURN: tuple[bytes | str, ...] = (b"let me ", b"look", b"\n", "</think>", b"\n\n", b"Sure", b":\n\n", *CALL)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


@contextmanager
def serving(path: Path, **settings: Any) -> Iterator[Quart]:
    given: dict[str, Any] = {"device": "cpu", "threads": 1, "ctx_size": 2048, "cache_ram": 16, **settings}
    service = make_service(ServerSettings(**given), path)
    app = create_app(service)
    service.start()
    assert service.loaded.wait(30)
    assert service.failure is None, service.failure
    try:
        yield app
    finally:
        service.close()


def scripted(path: Path, chain: Sequence[bytes | str], **options: Any) -> Path:
    return write_script(path / "script.gguf", chain, **{"chat_template": QWEN, **options})


async def ask(app: Quart, path: str = PATH, **body: Any) -> Exchange:
    raw = json.dumps({"messages": [HI], "temperature": 0, **body}).encode()
    return await Exchange(app, "POST", path, raw).end()


async def both(app: Quart, **body: Any) -> dict[str, Any]:
    """The choice, which is the same buffered and streamed."""
    answer = await ask(app, **body)
    assert answer.status == 200, answer.body
    choice: dict[str, Any] = answer.json["choices"][0]
    told = add_up((await ask(app, **body, stream=True)).events)
    assert without_ids(told) == without_ids(choice)
    return choice


def client_of(app: Quart) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="none",
        base_url="http://localhost/v1",
        http_client=httpx.AsyncClient(transport=httpx.ASGITransport(app=app)),  # type: ignore[arg-type]
        max_retries=0,
    )


@asynchronous
async def test_b67_a_tool_round_and_what_follows_it(tmp_path: Path) -> None:
    with serving(scripted(tmp_path, TURN)) as app:
        choice = await both(app, tools=TOOLS)
        message = choice["message"]
        assert (message["reasoning"], message["content"]) == ("let me look", "Sure:")
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"city": "Köln", "n": 3}'}
        assert choice["finish_reason"] == "tool_calls"

        first = (await ask(app, "/apply-template", tools=TOOLS)).json["prompt"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7 degrees"}
        turns = [HI, message, result]
        second = (await ask(app, "/apply-template", tools=TOOLS, messages=turns)).json["prompt"]
        wrote = b"".join(step if isinstance(step, bytes) else step.encode() for step in TURN).decode()
        assert second.startswith(first + wrote + "<|im_end|>")
        # A script's tokens are its own, so what is shared ends with the first prompt.
        usage = (await ask(app, tools=TOOLS, messages=turns)).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= len(first) // 2


@asynchronous
async def test_openais_client_works_unchanged(tmp_path: Path) -> None:
    with serving(scripted(tmp_path, TURN)) as app:
        client = client_of(app)
        asked: dict[str, Any] = {"model": "m", "messages": [HI], "tools": TOOLS, "temperature": 0}
        answer = await client.chat.completions.create(**asked)
        ChatCompletion.model_validate(answer.model_dump(), strict=True)
        calls = answer.choices[0].message.tool_calls
        assert calls is not None
        assert calls[0].type == "function"
        assert json.loads(calls[0].function.arguments) == {"city": "Köln", "n": 3}
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        arguments = [
            call.function.arguments or ""
            for chunk in chunks
            for choice in chunk.choices
            for call in choice.delta.tool_calls or ()
            if call.function is not None
        ]
        assert "".join(arguments) == calls[0].function.arguments
        assert answer.usage is not None
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
        assert chunks[-1].usage.completion_tokens_details == answer.usage.completion_tokens_details
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{**asked, "messages": [{"role": "system", "content": "x"}]})
        assert caught.value.code == "template_error"


@asynchronous
async def test_openais_stream_helper_adds_up_the_same_message(tmp_path: Path) -> None:
    with serving(scripted(tmp_path, TURN)) as app:
        client = client_of(app)
        asked: dict[str, Any] = {"model": "m", "messages": [HI], "tools": TOOLS, "temperature": 0}
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert message.content == "Sure:"
        assert message.tool_calls is not None
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln", "n": 3}


@asynchronous
async def test_b58_b59_where_reasoning_ends(tmp_path: Path) -> None:
    with serving(scripted(tmp_path, [b"abc", "</think>", b"\n\n", b"xyz"])) as app:
        message = (await both(app))["message"]
        assert (message["reasoning"], message["content"]) == ("abc", "xyz")
        message = (await both(app, max_tokens=1))["message"]
        assert (message["reasoning"], message["content"]) == ("abc", "")
        answer = await ask(app, thinking_token_budget=0, max_tokens=4)
        assert "reasoning" not in answer.json["choices"][0]["message"]
    off = tmp_path / "off"
    off.mkdir()
    with serving(scripted(off, [b"xyz"])) as app:
        assert (await both(app, enable_thinking=False))["message"] == {"role": "assistant", "content": "xyz"}


@asynchronous
async def test_b53_characters_over_several_tokens(tmp_path: Path) -> None:
    """In reasoning, content and arguments alike, no event has half a character."""
    split = [b"\xf0", b"\x9f\x98", b"\x80"]
    wild: list[bytes | str] = [
        *split,
        "</think>",
        b"\n\n",
        b"\xe3\x81",
        b"x",
        "<tool_call>",
        b"\n<function=f>\n<parameter=city>\n",
    ]
    with serving(
        scripted(tmp_path, [*wild, b"\xe2\x82", b"\xac", b"\n</parameter>\n</function>\n", "</tool_call>"])
    ) as app:
        message = (await both(app, tools=TOOLS))["message"]
        assert (message["reasoning"], message["content"]) == ("😀", "\ufffdx")
        assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "€"}'
        for event in (await ask(app, tools=TOOLS, stream=True)).events[:-1]:
            delta = event["choices"][0]["delta"]
            assert "\ufffd" not in delta.get("reasoning", "") + json.dumps(delta.get("tool_calls"))


@asynchronous
async def test_b62_b45_the_prompt_ends_behind_a_trailing_answer(tmp_path: Path) -> None:
    path = scripted(tmp_path, [b" 42"], markers_as_normal=["<|im_start|>", "<|im_end|>"])
    with serving(path) as app:
        started = [HI, {"role": "assistant", "content": "The answer is"}]
        answer = (await ask(app, messages=started, return_token_ids=True)).json
        text = (await ask(app, "/apply-template", messages=started)).json["prompt"]
        assert text.endswith("</think>\n\nThe answer is")
        choice = answer["choices"][0]
        assert choice["message"]["content"] == " 42"
        assert choice["finish_reason"] == "stop"
        assert len(choice["prompt_token_ids"]) < len(text) - 2 * len("im_start|"), "markers are one token each"
