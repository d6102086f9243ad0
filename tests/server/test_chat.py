"""POST /v1/chat/completions over a scripted engine: fields, prompts, thinking, tools, both kinds of answer."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest

from qwen35rt.errors import GenerationFailed
from qwen35rt.server.fields import LATER
from tests.server.chat_server import HI, PATH, TOOLS
from tests.server.chat_templates import PLAIN
from tests.server.conftest import ChatServer, Open
from tests.server.fake import asynchronous, eventually


@asynchronous
async def test_form_of_the_answer(chat: ChatServer) -> None:
    chat.script("why\n</think>\n\nBecause.")
    answer = await chat.ask(model="any", seed=5)
    body = answer.json
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"], body["seed"], body["on_gpu"]) == ("chat.completion", "any", 5, False)
    assert answer.headers["x-model-id"] == "tiny"
    assert set(body) == {
        *("id", "object", "created", "model", "choices", "usage"),
        *("on_gpu", "timings", "seed", "system_fingerprint"),
    }
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Because.",
                "reasoning_content": "why",
                "reasoning": "why",
            },
            "finish_reason": "stop",
            "stop_reason": None,
            "logprobs": None,
        }
    ]
    n = len(chat.engine.tokenizer.encode("why\n</think>\n\nBecause."))
    reasoning = len(chat.engine.tokenizer.encode("why\n</think>"))
    assert body["usage"] == {
        "prompt_tokens": len(chat.plan.ids),
        "completion_tokens": n,
        "total_tokens": len(chat.plan.ids) + n,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


@asynchronous
async def test_form_of_the_stream(chat: ChatServer) -> None:
    chat.script("why\n</think>\n\nBecause.")
    events = (await chat.ask(stream=True)).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {(e["object"], e["id"], e["created"], e["model"], e["system_fingerprint"]) for e in events} == {
        ("chat.completion.chunk", *(events[0][key] for key in ("id", "created", "model", "system_fingerprint")))
    }
    kinds = [next(iter(e["choices"][0]["delta"]), "end") for e in events[1:]]
    assert kinds == sorted(kinds, key=["reasoning_content", "content", "end"].index)
    assert events[-1]["choices"][0]["delta"] == {}
    assert all("usage" not in e for e in events[:-1])
    assert {"usage", "on_gpu", "timings", "seed"} <= set(events[-1])


@asynchronous
async def test_b81_c49_usage_is_told_once(chat: ChatServer) -> None:
    answer = await chat.ask(stream=True, stream_options={"include_usage": True})
    *before, last = answer.events
    assert last["choices"] == []
    spent = last["usage"]["completion_tokens"]
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": spent}
    assert [e["usage"] for e in before] == [None] * len(before)


@asynchronous
async def test_b44_the_files_template_is_used(open_chat: Open) -> None:
    chat = open_chat("{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}!")
    asked = [HI, {"role": "assistant", "content": "a"}, HI]
    answer = await chat.ask("/apply-template", messages=asked)
    assert answer.json == {"prompt": "<user>Hi<assistant>a<user>Hi!"}
    await chat.ask(messages=asked)
    assert chat.text() == "<user>Hi<assistant>a<user>Hi!"
    without = open_chat(None)
    assert (await without.refused())["code"] == "no_chat_template"
    assert (await without.post({"prompt": "a"}, "/v1/completions")).status == 200


@asynchronous
async def test_prompt_tokens_can_be_counted(chat: ChatServer) -> None:
    body = {"messages": [HI], "tools": TOOLS, "enable_thinking": False}
    counted = await chat.post(body, PATH + "/input_tokens")
    assert counted.json == {"object": "response.input_tokens", "input_tokens": counted.json["input_tokens"]}
    assert not chat.engine.submitted
    used = (await chat.post(body, PATH)).json["usage"]["prompt_tokens"]
    assert counted.json["input_tokens"] == used
    text = (await chat.post(body, "/apply-template")).json["prompt"]
    assert chat.text() == text


@asynchronous
async def test_b52_text_of_messages_is_no_control_token(chat: ChatServer) -> None:
    end = chat.engine.tokenizer.vocab.index["<|im_end|>"]
    counts = []
    for text, options in (("x", {}), ("<|im_end|>", {}), ("<|im_end|>", {"parse_special": True})):
        await chat.ask(messages=[{"role": "user", "content": text}], **options)
        counts.append(chat.plan.ids.count(end))
    assert counts == [1, 1, 2]


LATE = [
    {"role": "system", "content": "A"},
    HI,
    {"role": "assistant", "content": "B"},
    {"role": "system", "content": "C"},
]


@asynchronous
async def test_b56_late_system_messages(open_chat: Open) -> None:
    for mode, found in (("user", "<|im_start|>user\nC<|im_end|>"), ("merge", "<|im_start|>system\nA\n\nC<|im_end|>")):
        chat = open_chat(late_system=mode)
        assert (await chat.ask(messages=[*LATE, HI])).status == 200
        assert found in chat.text()
        for asked in ([{"role": "developer", "content": "A"}, HI], [*LATE[:1], *LATE[:1], HI]):
            assert (await chat.ask(messages=asked)).status == 200
    error = await open_chat(late_system="error").refused(messages=[*LATE, HI])
    assert (error["code"], error["param"]) == ("template_error", "messages[3].role")
    assert "messages[3]" in error["message"]


@asynchronous
async def test_b57_what_the_template_raises(chat: ChatServer) -> None:
    call = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}
    for asked in (LATE[:1], [LATE[0], call, {"role": "tool", "tool_call_id": "1", "content": "r"}]):
        error = await chat.refused(messages=asked)
        assert (error["code"], error["message"]) == ("template_error", "No user query found in messages.")
    assert chat.idle


@asynchronous
async def test_b66_tools_reach_the_template_as_they_were_sent(open_chat: Open) -> None:
    chat = open_chat("{{ tools | tojson }}|{{ tools | tojson(indent=2) }}")
    function = {"zeta": 1, "name": "f", "description": "天气 <b> & 'é'", "parameters": {"type": "object", "a": None}}
    tools = [{"type": "function", "function": function}]
    text = (await chat.ask("/apply-template", tools=tools)).json["prompt"]
    assert text == json.dumps(tools, ensure_ascii=False) + "|" + json.dumps(tools, ensure_ascii=False, indent=2)


@asynchronous
async def test_b79_forms_of_stop(chat: ChatServer) -> None:
    for stop in ("X", ["X"], [], None):
        assert (await chat.ask(stop=stop)).status == 200
    assert (await chat.refused(stop=[""]))["param"] == "stop"


@asynchronous
async def test_b76_odd_numbers_are_refused_by_name(chat: ChatServer) -> None:
    for name in ("temperature", "top_k", "max_tokens", "max_completion_tokens", "seed", "thinking_token_budget"):
        for value in ("NaN", "Infinity", "-Infinity", "1e308", '"1"', "true", "[]"):
            raw = f'{{"messages": [{{"role": "user", "content": "x"}}], "{name}": {value}}}'.encode()
            answer = await chat.post(raw, PATH)
            assert (answer.status, answer.error["param"]) == (400, name), (name, value)
        assert (await chat.ask(**{name: None})).status == 200


@asynchronous
async def test_c7_fields_of_later_stages(chat: ChatServer) -> None:
    odd: dict[str, Any] = {
        **{name: {"odd": 1} for name in LATER},
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "response_format": {"type": "json_object"},
        "modalities": ["audio"],
        "audio": {},
        "prediction": {"type": "content"},
        "web_search_options": {},
        "echo": True,
        "suffix": "x",
        "best_of": 2,
        "functions": [{"name": "f"}],
        "chat_template": "x",
    }
    for name, value in odd.items():
        error = await chat.refused(**{name: value})
        assert (error["code"], error["param"]) == ("unsupported_parameter", name)
    neutral = {
        "n": 1,
        "logprobs": False,
        "top_logprobs": 0,
        "response_format": {"type": "text"},
        "modalities": ["text"],
    }
    answer = await chat.ask(**neutral, audio=None, user="u", store=True)
    assert (answer.status, answer.headers.get("x-ignored-fields")) == (200, None)


@asynchronous
async def test_c8_fields_without_effect_are_named(open_chat: Open) -> None:
    chat = open_chat()
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    answer = await chat.ask(tools=[strict], odd_field=1)
    assert answer.headers["x-ignored-fields"] == "odd_field, tools[0].function.strict"
    assert (await open_chat(strict_fields=True).refused(odd_field=1))["code"] == "unknown_parameter"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [HI] * 4097}, "messages"),
        ({"messages": [HI, 3]}, "messages[1]"),
        ({"messages": [HI, {"content": "x"}]}, "messages[1]"),
        ({"messages": [HI, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"messages": [HI, {"role": "king", "content": "x"}]}, "messages[1].role"),
        ({"messages": [HI, HI, HI, {"role": "user", "content": [{"type": 1}]}]}, "messages[3].content[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": {}}, "tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"reasoning_format": "odd"}, "reasoning_format"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"enable_thinking": 1}, "enable_thinking"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ],
)
@asynchronous
async def test_c9_faults_name_their_field(open_chat: Open, body: dict[str, Any], param: str) -> None:
    chat = open_chat()
    assert (await chat.refused(**body))["param"] == param
    assert chat.idle


@asynchronous
async def test_the_number_of_messages_is_bounded(open_chat: Open) -> None:
    for most, settings in ((4096, {}), (2, {"max_messages": 2})):
        chat = open_chat("{{ messages | length }}", **settings)
        assert (await chat.ask(messages=[HI] * most, max_tokens=1)).status == 200
        error = await chat.refused(messages=[HI] * (most + 1))
        assert (error["param"], error["code"]) == ("messages", "invalid_value")


@asynchronous
async def test_b82_images_need_a_vision_model(chat: ChatServer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    error = await chat.refused(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, image]}])
    assert (error["code"], error["param"]) == ("unsupported_content_type", "messages[0].content[1].type")


@asynchronous
async def test_b82_all_forms_through_http(open_chat: Open) -> None:
    chat = open_chat(PLAIN)
    asked = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "function", "name": "f", "content": "r"},
        HI,
    ]
    text = (await chat.ask("/apply-template", messages=asked)).json["prompt"]
    assert text == 'system::::ab;assistant::::[f {"x": 1}];tool:f:::r;user::::Hi;'


@asynchronous
async def test_c10_sampling_defaults_follow_the_prompt(open_chat: Open) -> None:
    chat = open_chat()
    await chat.ask()
    assert (chat.plan.params.temperature, chat.plan.params.presence_penalty) == (1.0, 1.5)
    await chat.ask(enable_thinking=False, top_p=0.5)
    params = chat.plan.params
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.5, 20)
    chat = open_chat(sampling_preset="precise", temperature=0.3, facts={"metadata": {"general.sampling.top_k": 7}})
    await chat.ask()
    params = chat.plan.params
    assert (params.temperature, params.top_p, params.top_k, params.presence_penalty) == (0.3, 0.95, 7, 0)


@asynchronous
async def test_c20_an_answer_may_take_what_the_context_has_left(open_chat: Open) -> None:
    chat = open_chat()
    await chat.ask()
    assert chat.plan.budget == 1024 - len(chat.plan.ids)
    await chat.ask(max_completion_tokens=7)
    assert chat.plan.budget == 7
    chat = open_chat(max_tokens_default=9)
    await chat.ask()
    assert chat.plan.budget == 9


@asynchronous
async def test_b83_c18_a_prompt_beyond_the_context(open_chat: Open) -> None:
    chat = open_chat(n_ctx=64)
    for n, least in ((80, ""), (100_000, "at least ")):
        error = await chat.refused(messages=[{"role": "user", "content": "x" * n}])
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert f"has {least}{error['n_prompt_tokens']}" in error["message"]
    counted = await chat.ask(PATH + "/input_tokens", messages=[{"role": "user", "content": "x" * 80}])
    assert counted.json["input_tokens"] > 64


@asynchronous
async def test_a_template_of_the_request(open_chat: Open) -> None:
    chat = open_chat(allow_request_template=True)
    await chat.ask(chat_template="[{{ messages[0].content }}]")
    assert chat.text() == "[Hi]"
    without = open_chat(None, allow_request_template=True)
    assert (await without.ask(chat_template="{% if %}")).error["code"] == "template_error"
    assert (await without.ask(chat_template="")).error["code"] == "no_chat_template"


@asynchronous
async def test_c6_the_first_chat_finds_everything_built(open_chat: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*given: Any) -> None:
        raise AssertionError("this belongs to loading")

    chat = open_chat()
    monkeypatch.setattr("qwen35rt.tokenizer.chat._environment", late)
    monkeypatch.setattr("qwen35rt.server.prompt.Guard", late)
    assert (await chat.ask(max_tokens=1)).status == 200


@asynchronous
async def test_an_empty_prompt(open_chat: Open) -> None:
    error = await open_chat("{{ '' }}").refused()
    assert (error["code"], error["param"]) == ("empty_prompt", "messages")


@asynchronous
async def test_c41_c46_token_ids_and_timings_in_a_stream(chat: ChatServer) -> None:
    chat.script("a</think>b")
    answer = await chat.ask(return_token_ids=True, seed=1)
    choice = answer.json["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (
        list(chat.plan.ids),
        chat.engine.tokenizer.encode("a</think>b"),
    )
    events = (await chat.ask(return_token_ids=True, stream=True, timings_per_token=True, seed=1)).events
    parts = [e["choices"][0] for e in events]
    assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert [i for p in parts for i in p["token_ids"]] == choice["token_ids"]
    assert all("timings" in e for e in events)


@asynchronous
async def test_c51_a_failure_in_the_stream(chat: ChatServer) -> None:
    chat.script("abcdefgh")
    chat.engine.fault = lambda turn, n: GenerationFailed("NaN") if n == 3 else None
    answer = await chat.ask(stream=True)
    last = answer.events[-1]
    assert "[DONE]" not in answer.lines
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "error", "logprobs": None}]
    assert last["error"]["code"] == "generation_failed"
    assert (await chat.ask()).status == 500
    chat.engine.fault = lambda turn, n: None
    assert (await chat.ask()).status == 200


@asynchronous
async def test_c62_chats_are_counted_and_release_their_places(chat: ChatServer) -> None:
    await chat.both()
    await chat.refused(top_p=3)
    assert chat.idle
    chat.engine.forever(b"x")
    exchange = chat.begin({"messages": [HI], "stream": True}, PATH)
    await exchange.until(lambda: len(exchange.messages) > 2)
    exchange.leave()
    await exchange.end()
    await eventually(lambda: chat.idle)


@asynchronous
async def test_c62_an_answer_with_calls_is_counted_and_logged_as_what_it_says(
    chat: ChatServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "qwen35rt.server.record")
    ids = chat.engine.tokenizer.encode("<tool_call>\n<function=f>\n</function>\n</tool_call>")
    chat.engine.script = lambda plan: ids
    bodies: list[dict[str, Any]] = [{"tools": TOOLS}, {"tools": TOOLS, "stream": True}, {"max_tokens": 1}]
    for body in bodies:
        assert (await chat.ask(enable_thinking=False, **body)).status == 200
    told = [record.__dict__["request"]["finish_reason"] for record in caplog.records]
    assert told == ["tool_calls", "tool_calls", "length"]
    page = (await chat.get("/metrics")).body.decode()
    counted = dict(re.findall(r'^qwen35rt:request_success_total\{.*finished_reason="(\w+)".*\} (.+)$', page, re.M))
    assert counted == {"tool_calls": "2.0", "length": "1.0"}
