"""POST /v1/chat/completions over a scripted engine: thinking, calls, answers that go on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.chat_server import CALL, HI, TOOLS
from tests.server.chat_templates import QUIET
from tests.server.conftest import ChatServer, Open
from tests.server.fake import asynchronous


@asynchronous
async def test_b58_reasoning_that_the_prompt_opened(chat: ChatServer) -> None:
    chat.script("abcdef")
    message = (await chat.both(max_tokens=3))["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("abc", "abc", "")
    chat.script("abc</think>\n\nxyz")
    message = (await chat.both())["message"]
    assert (message["reasoning_content"], message["content"]) == ("abc", "xyz")


@pytest.mark.parametrize("template", ["qwen", "quiet"])
@asynchronous
async def test_b59_thinking_off_and_on(open_chat: Open, template: str) -> None:
    given: dict[str, Any] = {} if template == "qwen" else {"template": QUIET}
    off = {"role": "assistant", "content": "xyz"}
    on = {"role": "assistant", "content": "", "reasoning": "xyz", "reasoning_content": "xyz"}

    async def told(chat: ChatServer, **body: Any) -> Any:
        chat.script("xyz")
        return (await chat.both(**body))["message"]

    chat = open_chat(**given)
    for body in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "none"},
    ):
        assert await told(chat, **body) == off
        flipped = json.loads(json.dumps(body).replace("false", "true").replace("none", "high"))
        flipped = json.loads(json.dumps(flipped).replace("disabled", "enabled"))
        assert await told(chat, **flipped) == on
    never = open_chat(**given, reasoning="off")
    assert await told(never) == off
    assert await told(never, enable_thinking=True) == on
    always = open_chat(**given, reasoning="on")
    assert await told(always) == on
    assert await told(always, reasoning_effort="none") == off
    assert await told(chat) == (on if template == "qwen" else off)


@asynchronous
async def test_a_model_may_open_its_reasoning_itself(open_chat: Open) -> None:
    chat = open_chat(QUIET)
    chat.script("<think>\nabc\n</think>\n\nxyz")
    message = (await chat.both())["message"]
    assert (message["reasoning"], message["content"]) == ("abc", "xyz")


@asynchronous
async def test_names_of_the_reasoning(open_chat: Open) -> None:
    chat = open_chat(reasoning_field="reasoning")
    chat.script("abc</think>xyz")
    assert (await chat.both())["message"] == {"role": "assistant", "content": "xyz", "reasoning": "abc"}
    assert (await chat.both(include_reasoning=False))["message"] == {"role": "assistant", "content": "xyz"}
    answer = await chat.ask(include_reasoning=False)
    assert answer.json["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    raw = {"role": "assistant", "content": "abc</think>xyz"}
    assert (await chat.both(reasoning_format="none"))["message"] == raw
    for same in ("auto", "deepseek"):
        assert (await chat.both(reasoning_format=same))["message"]["reasoning"] == "abc"


@asynchronous
async def test_a_budget_ends_the_reasoning(open_chat: Open) -> None:
    for name in ("thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens"):
        chat = open_chat()
        chat.script("abcdefgh")
        message = (await chat.both(**{name: 3}))["message"]
        forced = len(chat.engine.tokenizer.encode("\n</think>\n\n"))
        assert (message["reasoning"], message["content"]) == ("abc", "abcdefgh"[3 + forced :])
        assert (await chat.refused(**{name: -2}))["param"] == name
    message = (await chat.both(reasoning_budget_tokens=0))["message"]
    assert "reasoning" not in message
    message = (await chat.both(thinking={"type": "enabled", "budget_tokens": 2}))["message"]
    assert message["reasoning"] == "ab"
    told = open_chat(reasoning_budget=2, reasoning_budget_message="Enough.")
    told.script("abcdefgh")
    assert (await told.both())["message"]["reasoning"] == "abEnough."
    assert (await told.both(thinking_token_budget=-1))["message"]["content"] == ""


@asynchronous
async def test_b62_a_trailing_answer_goes_on(chat: ChatServer) -> None:
    chat.script(" 42")
    started = [HI, {"role": "assistant", "content": "The answer is"}]
    assert (await chat.both(messages=started))["message"] == {"role": "assistant", "content": " 42"}
    assert chat.text().endswith("</think>\n\nThe answer is")
    await chat.ask(messages=started, continue_final_message=False)
    assert chat.text().endswith("The answer is<|im_end|>\n<|im_start|>assistant\n<think>\n")
    await chat.ask(messages=started, add_generation_prompt=True)
    assert chat.text().endswith("The answer is<|im_end|>\n<|im_start|>assistant\n<think>\n")
    await chat.ask(messages=started, add_generation_prompt=False, continue_final_message=False)
    assert chat.text().endswith("The answer is<|im_end|>\n")
    await chat.ask(add_generation_prompt=False)
    assert chat.text().endswith("Hi<|im_end|>\n")
    await chat.ask()
    fresh = chat.text()
    await chat.ask(messages=[HI, {"role": "assistant", "content": ""}])
    assert chat.text() == fresh
    chat.script("more</think>done")
    message = (await chat.both(messages=[HI, {"role": "assistant", "reasoning": "so "}]))["message"]
    assert (message["reasoning"], message["content"]) == ("more", "done")
    chat.script("y")
    assert (await chat.both(messages=[HI, {"role": "assistant", "content": "<think>x</think>"}]))["message"] == {
        "role": "assistant",
        "content": "y",
    }
    for body in (
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": True, "messages": started},
        {
            "continue_final_message": True,
            "messages": [HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
        },
    ):
        assert (await chat.refused(**body))["param"] == "continue_final_message"


@asynchronous
async def test_b67_calls_in_both_kinds_of_answer(chat: ChatServer) -> None:
    chat.script("why</think>\n\nHi \n" + f"{CALL}\n{CALL}")
    choice = await chat.both(tools=TOOLS)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Hi"
    assert [c["function"] for c in message["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}] * 2
    one = await chat.both(tools=TOOLS, parallel_tool_calls=False)
    assert (len(one["message"]["tool_calls"]), one["finish_reason"]) == (1, "tool_calls")
    assert (await chat.both())["message"]["content"].count("<tool_call>") == 2, "no tools, no calls"


@asynchronous
async def test_b73_a_call_in_the_reasoning_is_none(chat: ChatServer) -> None:
    draft = "plan <tool_call>\n<function=f>...</tool_call> done"
    chat.script(f"{draft}</think>\n\n{CALL}")
    message = (await chat.both(tools=TOOLS))["message"]
    assert (message["reasoning"], len(message["tool_calls"]), message["content"]) == (draft, 1, None)
    chat.script(draft)
    message = (await chat.both(tools=TOOLS))["message"]
    assert (message["reasoning"], message["content"]) == (draft, "")
    assert "tool_calls" not in message


@asynchronous
async def test_b72_a_call_that_is_cut_off(chat: ChatServer) -> None:
    text = "</think>" + CALL
    chat.script(text)
    whole = len(chat.engine.tokenizer.encode(text))
    for budget in range(3, whole + 1, 5):
        choice = await chat.both(tools=TOOLS, max_tokens=budget)
        assert choice["finish_reason"] == "length"
        for call in choice["message"].get("tool_calls", ()):
            valid = json_or_none(call["function"]["arguments"])
            assert valid in (None, {"a": 1})
    assert (await chat.both(tools=TOOLS))["finish_reason"] == "tool_calls"


def json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


@asynchronous
async def test_b75_tool_choice(chat: ChatServer) -> None:
    call = chat.engine.tokenizer.vocab.index["<tool_call>"]
    chat.script("</think>" + CALL)
    choice = await chat.both(tools=TOOLS, tool_choice="none")
    assert "tool_calls" not in choice["message"]
    assert chat.plan.banned == {call}
    assert '"name": "f"' in chat.text(), "the tools stay in the prompt"
    await chat.both(tools=TOOLS)
    assert chat.plan.banned == frozenset()
    error = await chat.refused(tools=TOOLS, tool_choice="required")
    assert (error["code"], error["param"]) == ("unsupported_parameter", "tool_choice")
    error = await chat.refused(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "x"}})
    assert (error["code"], error["param"]) == ("invalid_value", "tool_choice.function.name")


@asynchronous
async def test_b77_stops_act_in_the_answers_text_alone(chat: ChatServer) -> None:
    chat.script("aXb</think>\n\n<tool_call>\n<function=f>\n<parameter=a>\nX\n</parameter>\n</function>\n</tool_call>")
    choice = await chat.both(tools=TOOLS, stop="X")
    assert (choice["finish_reason"], choice["message"]["reasoning"]) == ("tool_calls", "aXb")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "X"}'
    chat.script("aXb</think>\n\ncXd")
    choice = await chat.both(stop=["X"])
    assert (choice["message"]["content"], choice["stop_reason"]) == ("c", "X")


@pytest.mark.parametrize("space", ["", " ", "\n\n"])
@asynchronous
async def test_b61_an_answer_sent_back_begins_the_next_prompt(chat: ChatServer, space: str) -> None:
    """Prompt and generated ids are the beginning of the next prompt, with and without text before the call."""
    for text in (f"Sure.\n\n{CALL}\n{CALL}", CALL, "Sure."):
        wrote = f"I look it up\n</think>\n\n{text}"
        chat.script(wrote + (space if text == "Sure." else ""))
        answer = (await chat.ask(tools=TOOLS)).json["choices"][0]["message"]
        end = chat.engine.tokenizer.vocab.index["<|im_end|>"]
        generated = (*chat.plan.ids, *chat.engine.tokenizer.encode(wrote), end)
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "r"} for c in answer.get("tool_calls", ())]
        follow = results or [{"role": "user", "content": "And?"}]
        kept = {"chat_template_kwargs": {"preserve_thinking": True}}
        await chat.ask(tools=TOOLS, messages=[HI, answer, *follow], **kept)
        assert chat.plan.ids[: len(generated)] == generated
