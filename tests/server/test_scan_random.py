"""Random model output: nothing raises, no character is lost, cuts do not matter, calls come back (B67, B74)."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35rt.server.scan import Call, CallEnd, Content, Form, Reasoning, Scanner, joined

from .test_scan import TOOLS, call, events, json_call

PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<function=nobody>", "</function>",
    "<parameter=", "</parameter>", "<function=", ">", "\n", "\n\n", " ", "\r\n", "\r", "<", "</", "{", "}", '"', "\\",
    '{"name": "f", "arguments": {', "<tool_call>\n<function=f>\n", "\n</parameter>\n", "</function>\n</tool_call>\n",
    call("g"), json_call("g", {}),
]  # fmt: skip


def random_output(rng: random.Random) -> tuple[str, list[str]]:
    """Text of pieces between words that occur once, and those words."""
    parts, words = [], []
    for n in range(rng.randrange(1, 25)):
        kind = rng.random()
        words.append(f"w{n}é{rng.randrange(1000)}.")
        if kind < 0.2:
            parts.append(f"<parameter={words[-1]}>")
        elif kind < 0.5:
            parts.append(words[-1])
        else:
            words.pop()
            parts.append(rng.choice(PIECES))
    return "".join(parts), words


def random_cuts(rng: random.Random, text: str) -> list[int]:
    if rng.random() < 0.3:
        return list(range(1, len(text)))
    return sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))


@pytest.mark.parametrize("form", ["xml", "json"])
def test_b74_random_output_never_raises_and_nothing_is_lost(form: Form) -> None:
    rng = random.Random(f"B74 {form}")
    for _ in range(5_000):
        text, words = random_output(rng)
        reasoning, parse_calls = rng.random() < 0.2, rng.random() < 0.9
        reason = rng.choice(["stop", "stop", "length", "cancelled"])
        tools = rng.choice([TOOLS, None])
        found = [
            events(text, cuts, reason, reasoning, tools, parse_calls, form) for cuts in (None, random_cuts(rng, text))
        ]
        whole, cut = map(joined, found)
        assert whole == cut, text
        for out in found:
            complete = {e.index for e in out if isinstance(e, CallEnd)}
            assert [i for i, c in enumerate(whole.calls) if i in complete and not isinstance(parse(c), dict)] == []
            assert all(e.text for e in out if isinstance(e, Reasoning | Content))
        shown = "".join([whole.reasoning or "", whole.content, *(c.name + c.arguments for c in whole.calls)])
        lost = [word for word in words if word not in shown]
        assert not lost, (text, whole)


def parse(found: Call) -> object:
    return json.loads(found.arguments)


names = st.text(st.characters(codec="utf-8", exclude_characters="<>\n\r\t ", exclude_categories=["Z", "C"]), min_size=1)
tags = st.sampled_from(
    [
        "</function>",
        "</tool_call>",
        "<tool_call>",
        "<parameter=s>",
        "<function=f>",
        "</parameter",
        "<think>",
        "\n",
        "\r",
        "\r\n",
    ]
)
plain = st.text(st.characters(codec="utf-8"))
texts = st.lists(st.one_of(plain, tags, st.just("."))).map("".join)
OUTER = (
    "</function></tool_call>",
    "</function><tool_call>",
    "</tool_call><tool_call>",
    "<tool_call><function=f>",
    "<parameter=s>",
)


def round_trips(text: str) -> bool:
    """Not what reads as a value without its closing tag: that tag, or tags of the outside in their places."""
    bare = "".join(text.split())
    return "</parameter>" not in text and not any(pair in bare for pair in OUTER)


@settings(max_examples=100, deadline=None)
@given(
    calls=st.lists(st.tuples(names, st.dictionaries(names, texts.filter(round_trips))), max_size=4),
    content=plain.map(str.strip),
    rng=st.randoms(use_true_random=False),
)
def test_b67_rendered_calls_come_back(
    calls: list[tuple[str, dict[str, str]]], content: str, rng: random.Random
) -> None:
    calls = [(name[:64], {key[:64]: text for key, text in values.items()}) for name, values in calls]
    if "<t" in content:
        content = ""
    text = content + "".join("\n" + render(name, values) for name, values in calls)
    found = joined(events(text, random_cuts(rng, text), tools=None))
    assert [(c.name, json.loads(c.arguments)) for c in found.calls] == calls
    assert found.content == content


def render(name: str, values: dict[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize("unit", ["<", "\n", " \r\n", "</function>", "\n<tool_call>", "<parameter=", "</think", "a"])
@pytest.mark.parametrize(
    "head", ["", "<think>", "<tool_call>", "<tool_call><function=f>", "<tool_call><function=f><parameter=s>"]
)
def test_what_is_held_back_is_bounded(head: str, unit: str) -> None:
    """The text that each new character is joined to stays short, so that work per character does."""
    scanner = Scanner(False, TOOLS)
    for char in head + unit * 400:
        scanner.push(char)
        assert len(scanner._held) < 300
