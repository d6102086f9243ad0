"""What a model writes, split: B53, B58, B59, B67, B69, B71 to B74, and equality of any cut."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from qwen35rt.server.scan import (
    Call,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Form,
    Message,
    Reasoning,
    Scanner,
    call_form,
    joined,
)

Tools = Sequence[Mapping[str, Any]]


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool("f", a="integer", s="string", o="object", b="boolean", t="string"), tool("g"), tool("h", x="integer")]


def events(
    text: str,
    cuts: Sequence[int] | None = None,
    reason: str = "stop",
    reasoning: bool = False,
    tools: Tools | None = TOOLS,
    parse_calls: bool = True,
    form: Form = "xml",
    opening: bool = False,
) -> list[Event]:
    """Events of a text that is cut at the given positions (None: not at all)."""
    scanner = Scanner(reasoning, tools, parse_calls, form, opening)
    bounds = [0, *(cuts or ()), len(text)]
    out = [e for low, high in pairwise(bounds) for e in scanner.push(text[low:high])]
    return out + scanner.finish(reason)


def scan(text: str, **options: Any) -> Message:
    """The whole answer, which is the same character by character and in random pieces."""
    whole = joined(events(text, **options))
    rng = random.Random(67)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    for cut in (range(1, len(text)), cuts):
        assert joined(events(text, list(cut), **options)) == whole
    return whole


def call(name: str, **values: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def value(text: str, key: str = "s") -> Any:
    """The one argument of the one call in ``text``."""
    [found] = scan(text).calls
    return json.loads(found.arguments)[key]


# ------------------------------------------------------------------------------------------ reasoning


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("abc</think>\n\nxyz", "abc", "xyz"),
        ("abc", "abc", ""),
        ("abc\n\n", "abc\n\n", ""),
        ("abc\n\r\n\n</think>\r\n\nxyz", "abc", "xyz"),
        ("\nabc\n d \n</think>\n\n\n xyz\n", "\nabc\n d ", "\n xyz\n"),
        ("abc\r</think>\rxyz", "abc\r", "\rxyz"),
        ("a</think>b</think>c", "a", "b</think>c"),
        ("a</thin</think>b", "a</thin", "b"),
        ("a</thin", "a</thin", ""),
        ("\n</think>\n\nxyz", None, "xyz"),
        ("", None, ""),
    ],
)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_b58_reasoning_ends_at_the_first_closing_tag(text: str, reasoning: str, content: str, reason: str) -> None:
    assert scan(text, reasoning=True, reason=reason) == Message(reasoning, content, [])


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("xyz", None, "xyz"),
        ("<think>\nabc\n</think>\n\nxyz", "abc", "xyz"),
        ("<think>\n\nabc", "\nabc", ""),
        ("<think>", None, ""),
        ("<thi", None, "<thi"),
        ("a<think>b</think>c", None, "a<think>b</think>c"),
        ("\n<think>b", None, "\n<think>b"),
    ],
)
def test_b59_the_prompt_says_which_side_a_text_belongs_to(text: str, reasoning: str, content: str) -> None:
    assert scan(text) == Message(reasoning, content, [])
    assert scan(text, parse_calls=False) == Message(reasoning, content, [])


def test_the_line_break_of_an_opening_tag_at_the_prompts_end_is_markup() -> None:
    assert scan("\r\n\nabc</think>x", reasoning=True, opening=True) == Message("\nabc", "x", [])
    assert scan("abc</think>x", reasoning=True, opening=True) == Message("abc", "x", [])


def test_b73_calls_are_looked_for_behind_the_reasoning_only() -> None:
    draft = "plan <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call> done"
    assert scan(f"{draft}</think>\n\n{call('g')}", reasoning=True) == Message(draft, "", [Call("g", "{}")])
    assert scan(draft, reasoning=True) == Message(draft, "", [])


# ------------------------------------------------------------------------------------------ calls and content

TWO_CALLS = f"Hi\n{call('f', a='1')}\n{call('g')}"


def test_b67_any_cut_gives_the_same_calls() -> None:
    expected = Message(None, "Hi", [Call("f", '{"a": 1}'), Call("g", "{}")])
    rng = random.Random(67)
    cuts = [[n] for n in range(len(TWO_CALLS) + 1)] + [list(range(1, len(TWO_CALLS)))]
    cuts += [sorted(rng.sample(range(1, len(TWO_CALLS)), rng.randrange(1, 30))) for _ in range(500)]
    for cut in cuts:
        assert joined(events(TWO_CALLS, cut)) == expected
    assert joined(events(TWO_CALLS)) == expected


def test_b67_events_come_in_order_and_as_soon_as_they_are_certain() -> None:
    scanner = Scanner(False, TOOLS)
    assert scanner.push("Hi \n<tool_call>\n<function=f>\n<parameter=s") == [Content("Hi")]
    assert scanner.push(">\n") == [CallStart(0, "f"), CallArguments(0, '{"s": "')]
    assert scanner.push("x\ny\n") == [CallArguments(0, "x\\ny")]
    assert scanner.push("</parameter>\n<parameter=a>\n1") == [CallArguments(0, '"'), CallArguments(0, ', "a": ')]
    assert scanner.push("2\n</parameter>") == [CallArguments(0, "12")]
    assert scanner.push("\n</function>") == [CallArguments(0, "}"), CallEnd(0)]
    assert scanner.push("\n</tool_call>") == []
    assert scanner.finish("stop") == []
    assert scanner.push("more") == scanner.finish("stop") == []


def test_text_streams_at_once_but_for_what_can_become_a_tag() -> None:
    scanner = Scanner(True, None)
    assert scanner.push("a<b </thin") == [Reasoning("a<b ")]
    assert scanner.push("k>") == []
    assert scanner.push("\nx < y") == [Content("x < y")]
    assert scanner.push(" <tool_") == []
    assert scanner.push("box>") == [Content(" <tool_box>")]


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("\n Hi \n ", "\n Hi \n ", ""),
        (f"\n Hi \n {call('g')}", "\n Hi", "g"),
        (f" \n{call('g')}\n\n{call('g')}\n ", "", "gg"),
        (f"{call('g')}\n\nbye\n", "bye", "g"),
        (f"Hi\n\n{call('g')}\nthen \n{call('h')} bye ", "Hi\nthen bye", "gh"),
        ("<tool_call>\n<function=g>\n</function>\n<function=h>\n</function>\n</tool_call>\nx", "x", "gh"),
        ("<tool_call>\n<function=g>\n</function>\njunk\n</tool_call>\n", "junk", "g"),
        ("see <tool_call> tags\n", "see <tool_call> tags\n", ""),
        ("a <tool_call>\n<tool_call> ", "a <tool_call>\n<tool_call> ", ""),
        (f"<tool_call>\n<function=f\n{call('g')}", "<tool_call>\n<function=f", "g"),
        ("<function=f>\n</function> </tool_call>", "<function=f>\n</function> </tool_call>", ""),
        ("<tool_call>\n<function=a<b>\n</function>", "<tool_call>\n<function=a<b>\n</function>", ""),
        ("<tool_call>\n<function= >\n</function>", "<tool_call>\n<function= >\n</function>", ""),
        ("<tool_call>\n<function=g>\nwhat\n</function>", "<tool_call>\n<function=g>\nwhat\n</function>", ""),
        (f"<tool_call><function={'n' * 300}>", f"<tool_call><function={'n' * 300}>", ""),
    ],
)
def test_b74_text_around_calls_is_content(text: str, content: str, names: str) -> None:
    assert scan(text) == Message(None, content, [Call(name, "{}") for name in names])


def test_nothing_is_a_call_where_calls_are_not_parsed() -> None:
    text = f"Hi\n{call('g')} \n"
    assert scan(text, parse_calls=False) == Message(None, text, [])
    assert scan(f"r\n</think>\n\n{text}", parse_calls=False, reasoning=True) == Message("r", text, [])


@pytest.mark.parametrize(
    ("broken", "content"),
    [("<tool_call>\n<function=f>\n<parameter=x\n</tool_call>", None), ("<tool_call>\n<function", None)],
)
def test_b71_complete_calls_beside_a_broken_one_survive(broken: str, content: str | None) -> None:
    found = scan(f"{call('g')}\n{broken}\n{call('h', x='3')}")
    assert found == Message(None, content or broken, [Call("g", "{}"), Call("h", '{"x": 3}')])


def test_b71_a_value_that_does_not_fit_keeps_the_call() -> None:
    found = scan(call("f", a="abc", b="maybe", o="{bad") + call("nobody", z="1"))
    assert [c.name for c in found.calls] == ["f", "nobody"]
    assert json.loads(found.calls[0].arguments) == {"a": "abc", "b": "maybe", "o": "{bad"}
    assert json.loads(found.calls[1].arguments) == {"z": "1"}


def test_junk_between_parameters_is_content_and_the_call_goes_on() -> None:
    text = (
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\nhm <parameter=x\n<parameter=s>\ny\n</parameter>\n"
    )
    assert scan(f"{text}</function>\n</tool_call>") == Message(
        None, "hm <parameter=x", [Call("f", '{"a": 1, "s": "y"}')]
    )


def test_of_a_repeated_parameter_the_first_counts() -> None:
    one = "<parameter=s>\n{}\n</parameter>\n"
    text = f"<tool_call>\n<function=f>\n{one.format('x')}{one.format('y')}</function>\n</tool_call>"
    assert scan(text).calls == [Call("f", '{"s": "x"}')]


# ------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    "text",
    [
        "    if x:\n        y\n",
        "",
        "\n",
        " ",
        "\t\t",
        "\n\n",
        "a\r\nb\r\n",
        "\r\n",
        "\r",
        "x\r",
        " x ",
        '"\\',
        "é😀\u2028\0",
    ],
)
def test_b69_blanks_of_a_value_are_kept(text: str) -> None:
    assert value(call("f", s=text)) == text
    assert value(call("f", s=text).replace(f"\n{text}\n</", f"\r\n{text}\r\n</")) == text


def test_b69_a_value_without_line_breaks_of_its_markup_is_whole() -> None:
    assert value("<tool_call><function=f><parameter=s>x</parameter></function></tool_call>") == "x"
    assert value("<tool_call><function=f><parameter=s></parameter></function></tool_call>") == ""
    assert value("<tool_call><function=f><parameter=s>\n</parameter></function></tool_call>") == ""


@pytest.mark.parametrize(
    "text",
    [
        "&& < > &amp; <!-- ]]>",
        "a</param\n</parameter\n</parameter >",
        "x</function>y",
        "x\n</function>\nmore\n</tool_call>\nmore",
        "<tool_call>\n{}\n</tool_call>.",
        "in <parameter=t>\n line",
        "<parameter=none>\n",
        "<parameter=s>\n",
        "<tool_call>\n<function=unheard>",
        f"</function>{' ' * 17}</tool_call>",
        "</think><think><|im_end|>",
    ],
)
def test_b72_a_value_may_speak_of_tags(text: str) -> None:
    assert value(call("f", s=text)) == text


HEAD = "<tool_call>\n<function=f>\n<parameter=s>\nx"


@pytest.mark.parametrize(
    ("tail", "arguments", "more"),
    [
        ("\n</function>\n</tool_call>", {"s": "x"}, ""),
        ("</function></tool_call>", {"s": "x"}, ""),
        ("\n</function>\n", {"s": "x"}, ""),
        ("\n</tool_call>", {"s": "x"}, ""),
        ("", {"s": "x"}, ""),
        ("\n", {"s": "x"}, ""),
        ("\n</para", {"s": "x\n</para"}, ""),
        ("\n</parameter>", {"s": "x"}, ""),
        ("\n</parameter>\n</tool_call>", {"s": "x"}, ""),
        ("\n</parameter>\n</function>", {"s": "x"}, ""),
        ("\n<parameter=a>\n1\n</function>", {"s": "x", "a": 1}, ""),
        (f"\n</function>\n{call('g')}", {"s": "x"}, "g"),
        (f"\n</tool_call>\n{call('g')}", {"s": "x"}, "g"),
        (f"\n{call('g')}", {"s": "x"}, "g"),
        (f"\n</parameter>\n{call('g')}", {"s": "x"}, "g"),
        ("\n</parameter>\n<function=g>\n</function>\n</tool_call>", {"s": "x"}, "g"),
    ],
)
def test_b72_missing_closing_tags_are_supplied(tail: str, arguments: dict[str, Any], more: str) -> None:
    found = scan(HEAD + tail)
    assert json.loads(found.calls[0].arguments) == arguments
    assert found.content == ""
    assert [c.name for c in found.calls[1:]] == list(more)
    assert CallEnd(0) in events(HEAD + tail)


def test_b72_a_function_without_parameters_needs_no_closing_tags() -> None:
    for tail in ("", "\n", "</function>", "</tool_call>", "\n</function>\n</tool_call>\n"):
        assert scan(f"<tool_call>\n<function=g>{tail}") == Message(None, "", [Call("g", "{}")])


@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_b72_a_call_that_is_cut_off_is_returned_as_far_as_written(reason: str) -> None:
    text = f"Hi\n{call('f', s='ab<c', a='12', o='{}')}"
    first = text.index(">\n<parameter")
    end = text.index("</function>") + len("</function>")
    for at in range(len(text)):
        found = scan(text[:at], reason=reason)
        if at <= first:
            assert not found.calls
            assert found.content == text[:at]
            continue
        assert [c.name for c in found.calls] == ["f"]
        assert found.content in ("Hi", "Hi" + text[end:at])
        complete = CallEnd(0) in events(text[:at], reason=reason)
        assert complete == (at >= end)
        if not complete:
            assert found.calls[0].arguments
            with pytest.raises(json.JSONDecodeError):
                json.loads(found.calls[0].arguments)
    assert scan(HEAD, reason=reason).calls == [Call("f", '{"s": "x')]


def test_b53_characters_of_all_planes_pass_through_arguments_and_reasoning() -> None:
    text = "日😀\ufffd</think>\n\n😀" + call("f", s="😀é\ufffdx")
    assert scan(text, reasoning=True) == Message("日😀\ufffd", "😀", [Call("f", '{"s": "😀é\ufffdx"}')])


# ------------------------------------------------------------------------------------------ JSON calls


def json_call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_call_form_follows_the_template() -> None:
    assert call_form("{{ '<tool_call>\\n<function=' ~ name }}") == "xml"
    assert call_form("<tool_call>\n{{ call|tojson }}\n</tool_call>") == call_form("") == "json"


def test_json_calls() -> None:
    given = {"a": 1, "s": 'x</tool_call>\n"{\\', "l": [{}, "<tool_call>"], "u": "😀"}
    found = scan(f"Hi\n{json_call('f', given)}\n{json_call('g', {})}\nbye", form="json")
    assert (found.content, [c.name for c in found.calls]) == ("Hi\nbye", ["f", "g"])
    assert [json.loads(c.arguments) for c in found.calls] == [given, {}]


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\nno",
        '<tool_call>\n{"name": "f", "arguments": {bad}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": "open}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>',
        '<tool_call>\n{"name": 3}',
        '<tool_call>\n{"a": ' * 3,
    ],
)
def test_json_calls_beside_a_broken_one_survive(broken: str) -> None:
    found = scan(f"{broken}\n{json_call('g', {'x': 1})}", form="json")
    assert found == Message(None, broken.rstrip(), [Call("g", '{"x": 1}')])


def test_json_calls_that_are_cut_off() -> None:
    text = json_call("f", {"a": "x"})
    for at in range(len(text)):
        found = scan(text[:at], form="json", reason="length")
        if at < text.index('"f"') + 3:
            assert found == Message(None, text[:at], [])
        else:
            assert [c.name for c in found.calls] == ["f"]
            assert found.calls[0].arguments.startswith("{")
            assert found.calls[0].arguments.rstrip("\n") in ("{", '{"a": "x"}') or found.calls[0].arguments in text[:at]
    assert scan(text[:-20], form="json") == Message(None, text[:-20], [])
