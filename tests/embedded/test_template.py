"""The embedded model's chat template: prompts written by hand, in three template engines."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen35rt.errors import TemplateError
from qwen35rt.tokenizer import ChatTemplate

SOURCE = (Path(__file__).parents[2] / "tools" / "embedded_model" / "template.jinja").read_text(encoding="utf-8")

Render = Callable[..., str]

PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather <now> & 'here'.", "parameters": PLACE},
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Time.", "parameters": PLACE}}
WEATHER_LINE = (
    '{"name": "weather", "description": "Weather <now> & \'here\'.", "parameters": {"type": "object", '
    '"properties": {"city": {"type": "string"}}, "required": ["city"]}}\n'
)
CLOCK_LINE = WEATHER_LINE.replace("weather", "clock").replace("Weather <now> & 'here'.", "Time.")
HOW = (
    "</tools>\nTo use a tool, answer with <tool_call>, <function=NAME> and one <parameter=KEY> for each value.\n"
    "If no tool fits, answer in words."
)
RESULT = "<|im_start|>user\n<tool_response>\n%s\n</tool_response><|im_end|>\n"
OPEN = "<|im_start|>assistant\n<think>\n"
EMPTY = OPEN + "\n</think>\n\n"


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def says(text: str | None, *calls: dict[str, Any], why: str | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [{"type": "function", "function": c} for c in calls]
    return message if why is None else {**message, "reasoning_content": why}


def gives(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


PARIS = {"name": "weather", "arguments": {"city": "Paris"}}
ROME = {"name": "clock", "arguments": {"city": "Rome"}}
PARIS_TEXT = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
ROME_TEXT = PARIS_TEXT.replace("weather", "clock").replace("Paris", "Rome")
TYPED = {"a": 7, "b": 1.5, "c": True, "d": [1, "x"], "e": {"k": "v"}, "f": "line\nline", "g": ""}
TYPED_TEXT = (
    "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n<parameter=b>\n1.5\n</parameter>\n<parameter=c>\ntrue\n"
    '</parameter>\n<parameter=d>\n[1, "x"]\n</parameter>\n<parameter=e>\n{"k": "v"}\n</parameter>\n<parameter=f>\n'
    "line\nline\n</parameter>\n<parameter=g>\n\n</parameter>\n</function>\n</tool_call>"
)

# name -> what is rendered, and the prompt
GOLDEN: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({"messages": [user(" Hi \n")]}, "<|im_start|>user\nHi<|im_end|>\n" + EMPTY),
    "thinking on": ({"messages": [user("Hi")], "enable_thinking": True}, "<|im_start|>user\nHi<|im_end|>\n" + OPEN),
    "thinking off": ({"messages": [user("Hi")], "enable_thinking": False}, "<|im_start|>user\nHi<|im_end|>\n" + EMPTY),
    "parts": ({"messages": [user([text_part("a"), text_part("b")])]}, "<|im_start|>user\nab<|im_end|>\n" + EMPTY),
    "system and a part": (
        {"messages": [{"role": "system", "content": "Be short."}, user([text_part("ab")])]},
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nab<|im_end|>\n" + EMPTY,
    ),
    "turns": (
        {"messages": [user("1"), says("one", why="Hm."), user("2"), says("two", why="Hm.\n"), user("3")]},
        "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\n2<|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\n3<|im_end|>\n" + EMPTY,
    ),
    "tools": (
        {"messages": [user("Hi")], "tools": [WEATHER, CLOCK]},
        "<|im_start|>system\n# Tools\n<tools>\n" + WEATHER_LINE + CLOCK_LINE + HOW + "<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n" + EMPTY,
    ),
    "tools and system": (
        {"messages": [{"role": "system", "content": "Be short."}, user("Hi")], "tools": [WEATHER]},
        "<|im_start|>system\n# Tools\n<tools>\n" + WEATHER_LINE + HOW + "\n\nBe short.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n" + EMPTY,
    ),
    "calls and results": (
        {
            "messages": [user("Q"), says("", PARIS, ROME, why="Two tools."), gives("21"), gives("9:30")],
            "tools": [WEATHER],
            "enable_thinking": True,
        },
        "<|im_start|>system\n# Tools\n<tools>\n" + WEATHER_LINE + HOW + "<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nTwo tools.\n</think>\n\n"
        + PARIS_TEXT
        + "\n"
        + ROME_TEXT
        + "<|im_end|>\n"
        + RESULT % "21\n</tool_response>\n<tool_response>\n9:30"
        + OPEN,
    ),
    "a call of an earlier turn": (
        {"messages": [user("Q"), says("I look.", PARIS), gives("21"), says("It is 21."), user("Thanks")]},
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nI look.\n\n"
        + PARIS_TEXT
        + "<|im_end|>\n"
        + RESULT % "21"
        + "<|im_start|>assistant\nIt is 21.<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n" + EMPTY,
    ),
    "typed arguments": (
        {"messages": [user("Q"), says(None, {"name": "f", "arguments": TYPED}), gives("ok")]},
        "<|im_start|>user\nQ<|im_end|>\n" + EMPTY + TYPED_TEXT + "<|im_end|>\n" + RESULT % "ok" + EMPTY,
    ),
    "no arguments": (
        {"messages": [user("Q"), says("", {"name": "f", "arguments": {}}), gives("ok")]},
        "<|im_start|>user\nQ<|im_end|>\n"
        + EMPTY
        + "<tool_call>\n<function=f>\n</function>\n</tool_call><|im_end|>\n"
        + RESULT % "ok"
        + EMPTY,
    ),
}
FAULTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "none": ([], "no messages"),
    "no user": ([{"role": "system", "content": "x"}], "no user message"),
    "only a result": ([user("<tool_response>\n1\n</tool_response>")], "no user message"),
    "role": ([user("x"), {"role": "robot", "content": "x"}], "unknown role"),
    "image": ([user([{"type": "image_url", "image_url": {"url": "data:"}}])], "this model reads no images"),
    "part": ([user([{"type": "sound"}])], "unknown part of a content"),
    "late system": ([user("x"), {"role": "system", "content": "x"}], "a system message must be the first message"),
}


def by_minijinja(messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return ChatTemplate(SOURCE).render(messages, **kwargs)


@pytest.fixture(scope="module")
def by_jinja2() -> Render:
    """The environment of the transformers library."""
    sandbox = pytest.importorskip("jinja2.sandbox", reason="jinja2 is no dependency of this package")
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def fail(text: str) -> None:
        raise TemplateError(text)

    environment.globals["raise_exception"] = fail
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(SOURCE)

    def render(messages: list[dict[str, Any]], **kwargs: Any) -> str:
        text: str = template.render(messages=messages, **{"add_generation_prompt": True, **kwargs})
        return text

    return render


@pytest.fixture(scope="module")
def by_llama_cpp(oracle: Path) -> Render:
    """llama.cpp's engine, through a server of its own with any model."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is for comparisons only")
    params = xllamacpp.CommonParams()
    params.model.path = str(oracle / "models" / "nano.f32.gguf")
    params.chat_template, params.use_jinja = SOURCE, True
    params.n_ctx, params.warmup, params.cpuparams.n_threads = 512, False, 1
    server = xllamacpp.Server(params)

    def render(messages: list[dict[str, Any]], **kwargs: Any) -> str:
        thinking = {"enable_thinking": kwargs.pop("enable_thinking", False)}
        body = json.dumps({"messages": messages, "chat_template_kwargs": thinking, **kwargs}).encode()
        request = urllib.request.Request(server.listening_address + "/apply-template", body)
        with urllib.request.urlopen(request, timeout=20) as answer:
            text: str = json.load(answer)["prompt"]
        return text

    return render


@pytest.mark.parametrize("name", GOLDEN)
def test_prompts_by_minijinja(name: str) -> None:
    given, wanted = GOLDEN[name]
    assert by_minijinja(**given) == wanted


@pytest.mark.parametrize("name", GOLDEN)
def test_prompts_by_jinja2(name: str, by_jinja2: Render) -> None:
    given, wanted = GOLDEN[name]
    assert by_jinja2(**given) == wanted


# It joins several parts by line breaks itself, before the template sees them.
@pytest.mark.parametrize("name", [n for n in GOLDEN if n != "parts"])
def test_prompts_by_llama_cpp(name: str, by_llama_cpp: Render) -> None:
    given, wanted = GOLDEN[name]
    assert by_llama_cpp(**given) == wanted


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str, by_jinja2: Render) -> None:
    """B57"""
    messages, text = FAULTS[name]
    for render in (by_minijinja, by_jinja2):
        with pytest.raises(TemplateError, match=text):
            render(messages)


def test_a_finished_answer_continues_the_prompt() -> None:
    """B61"""
    messages = [user("Q"), says("A", PARIS, why="Hm.")]
    whole = by_minijinja(messages, add_generation_prompt=False)
    assert whole == "<|im_start|>user\nQ<|im_end|>\n" + OPEN + "Hm.\n</think>\n\nA\n\n" + PARIS_TEXT + "<|im_end|>\n"
    assert whole.startswith(by_minijinja(messages[:1], enable_thinking=True))
