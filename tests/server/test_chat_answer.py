"""What the model writes, as a message and as deltas: both say the same for any cut (B67)."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from qwen35rt.engine.result import Completion, Delta, Timings, Usage
from qwen35rt.server.answer import Json
from qwen35rt.server.chat_answer import AnswerForm, ChatWriter, chat_usage

TOOLS: list[dict[str, Any]] = [
    {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}}},
    {"function": {"name": "g"}},
]
CALLS = AnswerForm(reasoning=False, tools=TOOLS, calls=True)
THINKS = replace(CALLS, reasoning=True)
CALL_F = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
CALL_G = "<tool_call>\n<function=g>\n</function>\n</tool_call>"


def completion(text: str, reason: str = "stop", ids: Sequence[int] = ()) -> Completion:
    timings = Timings(0, 1, 1.0, 1, None, 0.0, 1.0)
    return Completion(text, list(ids), reason, None, Usage(3, 5, 1, 2), False, timings, 1)


def whole(form: AnswerForm, text: str, reason: str = "stop") -> tuple[Json, str]:
    choice = ChatWriter(0, form).whole(completion(text, reason))
    return choice["message"], choice["finish_reason"]


def streamed(form: AnswerForm, pieces: Sequence[str], reason: str = "stop") -> tuple[Json, str]:
    """The message that the chunks add up to, as clients do it."""
    writer = ChatWriter(0, form)
    chunks = writer.begin()
    for piece in pieces:
        chunks += writer.delta(Delta(piece, ()))
    chunks += writer.finish(completion("".join(pieces), reason))
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["delta"] == {}
    assert all(c["finish_reason"] is None for c in chunks[:-1])
    message: Json = {"role": "assistant", "content": ""}
    calls: list[Json] = []
    for chunk in chunks[1:-1]:
        delta = chunk["delta"]
        assert delta in ({"content": delta.get("content")}, {"tool_calls": delta.get("tool_calls")}) or set(delta) <= {
            "reasoning",
            "reasoning_content",
        }, "one kind of text in each"
        for key in ("content", "reasoning", "reasoning_content"):
            if key in delta:
                assert delta[key]
                message[key] = message.get(key, "") + delta[key]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                assert call["function"]["arguments"] == ""
                calls.append({k: v for k, v in call.items() if k != "index"})
            else:
                assert set(call) == {"index", "function"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message, chunks[-1]["finish_reason"]


def without_ids(found: tuple[Json, str]) -> tuple[Json, str]:
    message, reason = found
    calls = [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls", ())]
    return message | ({"tool_calls": calls} if calls else {}), reason


def test_b67_a_stream_says_what_the_message_says_for_any_cut() -> None:
    text = f"plan\n</think>\n\nHi\n{CALL_F}\n{CALL_G}"
    expected = whole(THINKS, text)
    message, reason = expected
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("plan", "plan", "Hi")
    told = [(c["type"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]
    assert told == [("function", "f", {"a": 1}), ("function", "g", {})]
    assert reason == "tool_calls"
    cuts = [[text[:i], text[i:]] for i in range(len(text) + 1)] + [list(text)]
    rng = random.Random("b67 cuts")
    for _ in range(100):
        at = sorted(rng.randrange(len(text)) for _ in range(rng.randrange(1, 9)))
        cuts.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    for pieces in cuts:
        assert without_ids(streamed(THINKS, pieces)) == without_ids(expected)


@pytest.mark.parametrize("form", [CALLS, THINKS, replace(THINKS, split=False), replace(CALLS, split=False)])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_b74_whatever_the_model_writes(form: AnswerForm, reason: str) -> None:
    parts = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=s>"]
    parts += ["</parameter>", "\n", " ", "x", "é", "{", '"name"', "<", "</"]
    rng = random.Random(f"b74 {form} {reason}")
    for _ in range(150):
        pieces = rng.choices(parts, k=rng.randrange(1, 25))
        assert without_ids(streamed(form, pieces, reason)) == without_ids(whole(form, "".join(pieces), reason))


def test_call_ids_are_fresh() -> None:
    message, _ = whole(CALLS, CALL_F + CALL_F)
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(i.startswith("call_") and len(i) == 29 and i[5:].isalnum() for i in ids)


def test_b58_reasoning_that_never_ends() -> None:
    message, reason = whole(THINKS, "abc", "length")
    assert (message["reasoning_content"], message["content"], reason) == ("abc", "", "length")
    assert without_ids(streamed(THINKS, ["a", "bc"], "length")) == (message, reason)
    message, _ = whole(THINKS, "abc</think>\n\nxyz")
    assert (message["reasoning_content"], message["content"]) == ("abc", "xyz")


def test_no_reasoning_no_keys() -> None:
    for form, text in (
        (CALLS, "x"),
        (THINKS, "\n</think>\n\nx"),
        (replace(THINKS, reasoning_field="none"), "y</think>x"),
    ):
        assert whole(form, text)[0] == {"role": "assistant", "content": "x"} == streamed(form, list(text))[0]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_names_of_the_reasoning(name: Any) -> None:
    form = replace(THINKS, reasoning_field=name)
    expected = {"role": "assistant", "content": "x", name: "y"}
    assert whole(form, "y</think>x")[0] == expected == streamed(form, list("y</think>x"))[0]


def test_reasoning_format_none_keeps_tags_in_the_content() -> None:
    form = replace(THINKS, split=False)
    text = "plan <tool_call> \n</think>\n\nHi"
    for cut in ([text + CALL_F], list(text + CALL_F)):
        message, reason = streamed(form, cut)
        assert (message["content"], reason, len(message["tool_calls"])) == (text, "tool_calls", 1)
        assert "reasoning" not in message
    assert streamed(replace(CALLS, split=False), list("<think>a</think>b"))[0]["content"] == "<think>a</think>b"
    assert streamed(form, list("never</thin"))[0]["content"] == "never</thin"
    assert streamed(replace(CALLS, split=False), list("<thi"))[0]["content"] == "<thi"


def test_what_follows_a_single_call_is_dropped() -> None:
    form = replace(CALLS, one_call=True)
    for text in (
        f"Hi {CALL_F} {CALL_G} bye",
        "Hi <tool_call><function=f>\n</function><function=g></function></tool_call>",
    ):
        for found in (whole(form, text), streamed(form, list(text)), streamed(form, [text])):
            assert (found[0]["content"], len(found[0]["tool_calls"]), found[1]) == ("Hi", 1, "tool_calls")


def test_content_is_null_only_beside_calls() -> None:
    assert whole(CALLS, CALL_F)[0]["content"] is None
    assert whole(CALLS, "")[0] == {"role": "assistant", "content": ""}
    assert whole(replace(CALLS, calls=False), CALL_F)[0] == {"role": "assistant", "content": CALL_F}


def test_a_call_cut_off_by_the_budget_is_no_valid_json() -> None:
    cut = "<tool_call>\n<function=f>\n<parameter=s>\nrm -rf /tm"
    message, reason = whole(CALLS, cut, "length")
    assert reason == "length"
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments.startswith('{"s": "rm -rf /tm')
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
    assert without_ids(streamed(CALLS, list(cut), "length")) == without_ids((message, reason))


def test_c41_token_ids_join_to_the_counted_tokens() -> None:
    writer = ChatWriter(0, replace(THINKS, prompt_ids=(7, 8)))
    first = writer.begin()
    chunks = first + writer.delta(Delta("a", (1,))) + writer.delta(Delta("</thi", (2, 3)))
    chunks += writer.delta(Delta("nk>\n\nb", (4,))) + writer.finish(completion("a</think>\n\nb", ids=(1, 2, 3, 4)))
    assert first[0]["prompt_token_ids"] == (7, 8)
    assert [i for c in chunks for i in c["token_ids"]] == [1, 2, 3, 4]
    assert all("prompt_token_ids" not in c for c in chunks[1:])
    choice = ChatWriter(0, replace(THINKS, prompt_ids=(7, 8))).whole(completion("b", ids=(1,)))
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ((7, 8), [1])
    assert "token_ids" not in ChatWriter(0, THINKS).whole(completion("b"))


def test_a_failed_choice_and_the_usage() -> None:
    failed = ChatWriter(3, THINKS).failed()
    assert failed == {"index": 3, "delta": {}, "finish_reason": "error", "logprobs": None}
    assert chat_usage([completion("x")]) == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
