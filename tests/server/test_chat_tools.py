"""Tools, thinking switches and sampling defaults of a chat request."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest

from qwen35rt.config import CHAT_SAMPLING, SAMPLING
from qwen35rt.errors import RequestError
from qwen35rt.plan import Markup, sampling_params
from qwen35rt.server.errors import UnsupportedParameter
from qwen35rt.server.prompt import ChatPrompt
from qwen35rt.server.reasoning import Thinking, banned_ids, chat_defaults, markup_of, template_variables
from qwen35rt.server.tools import read_tools
from qwen35rt.tokenizer import build_tokenizer
from tests.fixtures import TinySpec, tiny_metadata
from tests.tiny_vocab import tiny_vocab

TOKENIZER = build_tokenizer(tiny_metadata(TinySpec(), tiny_vocab(320), None))
F: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def named(name: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (["f"], "tools[0]"),
        ([F, {"type": "function"}], "tools[1].function"),
        ([F, {"type": 3}], "tools[1].type"),
        ([F, named("")], "tools[1].function.name"),
        ([named("x" * 65)], "tools[0].function.name"),
        ([named("a b")], "tools[0].function.name"),
        ([named("é")], "tools[0].function.name"),
        ([named(3)], "tools[0].function.name"),
        ([F, named("g"), F], "tools[2].function.name"),
        ([named("f", description=3)], "tools[0].function.description"),
        ([named("f", parameters=[])], "tools[0].function.parameters"),
        ([named("f", strict="yes")], "tools[0].function.strict"),
        ([named(f"f{i}") for i in range(129)], "tools"),
    ],
)
def test_tools_are_checked_by_path(tools: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_tools(tools, None, None)
    assert caught.value.param == param
    assert not isinstance(caught.value, UnsupportedParameter)


def test_tools_that_are_legal() -> None:
    tools = [named(f"f{i}") for i in range(128)]
    use = read_tools(tools, None, None)
    assert (use.tools, use.calls, use.banned, use.one_call, use.ignored) == (tools, True, False, False, ())
    assert read_tools(
        [named("a.B_c-9" + "x" * 57), {"function": {"name": "g", "description": None}}], "auto", True
    ).calls
    assert read_tools([named("f", strict=True), named("g", strict=True)], None, None).ignored == (
        "tools[0].function.strict",
    )
    assert read_tools([named("f", strict=False)], None, None).ignored == ()
    assert read_tools([F], "auto", False).one_call
    assert read_tools(None, None, None) == read_tools([], "none", None) == read_tools(None, "none", None)
    assert not read_tools([], None, None).calls


def test_b75_tool_choice() -> None:
    none = read_tools([F], "none", False)
    assert (none.tools, none.calls, none.banned, none.one_call) == ([F], False, True, False)
    assert banned_ids(TOKENIZER, none) == {TOKENIZER.vocab.index["<tool_call>"]}
    assert banned_ids(TOKENIZER, read_tools([F], None, None)) == frozenset()
    for later in ("required", named("f"), {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}):
        with pytest.raises(UnsupportedParameter) as unsupported:
            read_tools([F], later, None)
        assert unsupported.value.param == "tool_choice"
    for wrong, param in (
        ("always", "tool_choice"),
        (named("g"), "tool_choice.function.name"),
        ({"type": "function"}, "tool_choice.function.name"),
    ):
        with pytest.raises(RequestError) as caught:
            read_tools([F], wrong, None)
        assert (caught.value.param, isinstance(caught.value, UnsupportedParameter)) == (param, False)


def test_b59_the_first_switch_that_is_present_wins() -> None:
    def switch(*given: Any) -> Any:
        return template_variables(*given).get("enable_thinking")

    on, off = Thinking(type="enabled"), Thinking(type="disabled")
    assert switch({"enable_thinking": True}, False, off, "none", "off") is True
    assert switch({"enable_thinking": None}, False, on, "high", "on") is False
    assert switch(None, None, off, "high", "on") is False
    assert switch(None, None, on, "none", "off") is True
    assert switch(None, None, None, "none", "on") is False
    for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
        assert switch(None, None, None, effort, "off") is True
    assert switch(None, None, None, None, "on") is True
    assert switch(None, None, None, None, "off") is False
    assert switch(None, None, None, None, "auto") is None


def test_the_effort_and_other_variables_reach_the_template() -> None:
    variables = template_variables({"preserve_thinking": True, "x": None}, None, None, "low", "auto")
    assert variables == {"preserve_thinking": True, "enable_thinking": True, "reasoning_effort": "low"}
    assert template_variables({"reasoning_effort": "odd"}, None, None, "low", "auto")["reasoning_effort"] == "odd"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", "range"]
)
def test_names_that_no_request_may_set(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        template_variables({name: 1}, None, None, None, "auto")
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_a_switch_of_another_type() -> None:
    with pytest.raises(RequestError) as caught:
        template_variables({"enable_thinking": "no"}, None, None, None, "auto")
    assert caught.value.param == "chat_template_kwargs.enable_thinking"


def test_markup_has_the_vocabularys_tags() -> None:
    index = TOKENIZER.vocab.index
    prompt = ChatPrompt("", "", (), (), reasoning=True, opening=False)
    markup = markup_of(TOKENIZER, prompt, read_tools([F], None, False), 3, "Enough.")
    assert markup == Markup(
        reasoning=True,
        think=index["<think>"],
        think_end=index["</think>"],
        call=index["<tool_call>"],
        call_end=index["</tool_call>"],
        budget=3,
        closing=tuple(TOKENIZER.encode("Enough.\n</think>\n\n")),
        one_call=True,
    )
    without = markup_of(TOKENIZER, prompt, read_tools([F], "none", None), -1, "")
    assert (without.call, without.call_end, without.budget, without.closing) == (None, None, -1, ())


def test_sampling_defaults_of_the_published_table() -> None:
    def values(preset: str, reasoning: bool, file: dict[str, Any], flags: dict[str, Any], **asked: Any) -> list[Any]:
        above, below = chat_defaults(preset, reasoning, flags, file)
        params = sampling_params(above | asked, below, 320)
        names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty")
        return [getattr(params, name) for name in names]

    assert values("general", True, {}, {}) == [1.0, 0.95, 20, 0, 1.5, 1.0]
    assert values("precise", True, {}, {}) == [0.6, 0.95, 20, 0, 0, 1.0]
    assert values("reasoning", True, {}, {}) == [1.0, 0.95, 20, 0, 1.5, 1.0]
    assert values("general", False, {}, {}) == [0.7, 0.8, 20, 0, 1.5, 1.0]
    assert values("precise", False, {}, {}) == [0.7, 0.8, 20, 0, 1.5, 1.0]
    assert values("reasoning", False, {}, {}) == [1.0, 1.0, 40, 0, 2.0, 1.0]
    off = [SAMPLING.temperature, SAMPLING.top_p, SAMPLING.top_k, SAMPLING.min_p, 0, 1]
    assert values("off", True, {}, {}) == off
    assert "off" not in CHAT_SAMPLING
    file = {"general.sampling.temp": 0.25, "general.sampling.top_k": 7}
    assert values("general", True, file, {}) == [0.25, 0.95, 7, 0, 1.5, 1.0]
    flags = {"temperature": 0.5, "presence_penalty": 0.0}
    assert values("general", True, file, flags) == [0.5, 0.95, 7, 0, 0.0, 1.0]
    assert values("general", True, file, flags, temperature=0.1, top_p=1.0) == [0.1, 1.0, 7, 0, 0.0, 1.0]


class _Metadata(UserDict[str, Any]):
    """The keys of a file, of which some are costly to decode."""

    def __getitem__(self, key: str) -> Any:
        assert not key.startswith("tokenizer."), "the vocabulary is decoded"
        return super().__getitem__(key)


def test_sampling_defaults_leave_the_vocabulary_alone() -> None:
    """Each chat asks for them, and a real file's three arrays of 248,320 entries take a quarter of a second."""
    file = _Metadata({"general.sampling.temp": 0.25, "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["a b"]})
    for preset in ("general", "off"):
        above, below = chat_defaults(preset, True, {}, file)
        assert sampling_params(above, below, 320).temperature == 0.25
