"""Chat templates: golden renderings, the environment templates expect, limits."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from qwen35rt.config import TEMPLATE
from qwen35rt.errors import RequestError, TemplateError
from qwen35rt.tokenizer import ChatTemplate, Tokenizer, build_tokenizer, read_chat_template
from tests.tokenizer.real_vocab import small_metadata

USER = [{"role": "user", "content": "Hi"}]


def outcome(template: ChatTemplate, case: dict[str, Any]) -> tuple[str, str]:
    variables = {k: v for k, v in case.items() if k not in ("name", "rendered", "error")}
    try:
        return "rendered", template.render(**variables)
    except TemplateError as e:
        return "error", str(e)


def expected(case: dict[str, Any]) -> tuple[str, str]:
    return ("rendered", case["rendered"]) if "rendered" in case else ("error", case["error"])


def file_metadata(oracle: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(oracle / "models" / "nano.f32.gguf")
    return {key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def equivalent(oracle: Path) -> ChatTemplate:
    return ChatTemplate((oracle / "chat" / "equivalent.jinja").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def from_file(oracle: Path) -> tuple[Tokenizer, ChatTemplate]:
    metadata = file_metadata(oracle)
    tokenizer = build_tokenizer(metadata)
    template = read_chat_template(metadata, tokenizer.vocab)
    assert template is not None
    return tokenizer, template


def test_golden_renderings(equivalent: ChatTemplate, chat_cases: list[dict[str, Any]]) -> None:
    assert len(chat_cases) == 39
    assert [c["name"] for c in chat_cases if outcome(equivalent, c) != expected(c)] == []


def test_golden_renderings_of_the_template_in_a_model_file(
    from_file: tuple[Tokenizer, ChatTemplate], chat_cases: list[dict[str, Any]]
) -> None:
    assert [c["name"] for c in chat_cases if outcome(from_file[1], c) != expected(c)] == []


def test_golden_renderings_by_jinja2(equivalent: ChatTemplate, chat_cases: list[dict[str, Any]]) -> None:
    """The reference engine, where it is installed, agrees with the golden file and so with ours."""
    sandbox = pytest.importorskip("jinja2.sandbox", reason="jinja2 is no dependency of this package")
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def fail(text: str) -> None:
        raise TemplateError(text)

    environment.globals["raise_exception"] = fail
    environment.filters["tojson"] = lambda value, **kw: json.dumps(value, **{"ensure_ascii": False, **kw})
    template = environment.from_string(equivalent.source)
    assert [c["name"] for c in chat_cases if outcome(template, c) != expected(c)] == []


def test_metadata_without_template_gives_none(small: Tokenizer) -> None:
    assert read_chat_template({}, small.vocab) is None


def test_the_files_own_tokens_are_variables(small: Tokenizer) -> None:
    template = read_chat_template({"tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}"}, small.vocab)
    assert template is not None
    assert template.render(USER) == "<|endoftext|>|<|im_end|>"
    assert template.render_ids(small, USER) == [259, small.vocab.index["|"], 261]


TOOLS = [{"name": "wetter", "description": "天气 <b> & 'é' \"q\"", "args": {"z": 1, "a": [1.5, None, True, {}]}}]


def test_b61_a_turn_sent_back_renders_as_the_model_wrote_it(from_file: tuple[Tokenizer, ChatTemplate]) -> None:
    """Reasoning and a tool call without text: prompt and generated ids are the beginning of the next prompt."""
    tokenizer, template = from_file
    prompt = template.render_ids(tokenizer, USER)
    written = (
        "need it\n</think>\n\n<tool_call>\n<function=f>\n<parameter=k>\nv <b>\n</parameter>\n</function>\n</tool_call>"
    )
    generated = tokenizer.encode(written + "<|im_end|>", special=True)
    call = {"type": "function", "function": {"name": "f", "arguments": {"k": "v <b>"}}}
    for content in ("", None):
        turn = {"role": "assistant", "content": content, "reasoning_content": "need it", "tool_calls": [call]}
        again = template.render_ids(tokenizer, [*USER, turn, {"role": "tool", "content": "r"}])
        assert again[: len(prompt) + len(generated)] == prompt + generated


def test_b66_tojson_writes_what_json_dumps_writes() -> None:
    template = ChatTemplate(
        "{{ tools | tojson }}|{{ tools | tojson(ensure_ascii=False) }}|{{ tools|tojson(indent=2) }}"
    )
    plain = json.dumps(TOOLS, ensure_ascii=False)
    assert template.render(USER, tools=TOOLS) == f"{plain}|{plain}|{json.dumps(TOOLS, ensure_ascii=False, indent=2)}"


@pytest.mark.parametrize(
    ("call", "kwargs"),
    [
        ("ensure_ascii=True", {"ensure_ascii": True}),
        ("separators=(',', ':')", {"separators": (",", ":")}),
        ("sort_keys=true", {"sort_keys": True}),
        ("indent=4, ensure_ascii=true", {"indent": 4, "ensure_ascii": True}),
    ],
)
def test_b66_keyword_arguments_of_tojson(call: str, kwargs: dict[str, Any]) -> None:
    value = [*TOOLS, {"emoji": "😀", "small": 1e-7, "large": 1e22}]
    text = ChatTemplate(f"{{{{ tools|tojson({call}) }}}}").render(USER, tools=value)
    assert text == json.dumps(value, **{"ensure_ascii": False, **kwargs})


@pytest.mark.parametrize("value", [True, None, 3, 2.0, -0.0, 1e22, 1e-7, 10**30, "é", [1, "a"], {"a": None}])
def test_values_are_spelled_as_python_spells_them(value: Any) -> None:
    """Tool arguments reach the prompt through string conversion: True, None, 1e-07."""
    for expression in ("{{ v }}", "{{ v|string }}", "{{ '' ~ v }}"):
        assert ChatTemplate(expression).render(USER, v=value) == str(value)
    call = [{"role": "assistant", "arguments": {"v": value}}]
    for expression, text in (("{{ %s }}", str(value)), ("{{ %s|tojson }}", json.dumps(value, ensure_ascii=False))):
        assert ChatTemplate(expression % "messages[0].arguments.v").render(call) == text


def test_numbers_among_the_variables_can_be_compared() -> None:
    assert ChatTemplate("{{ v > 1.5 and v + 1 == 3 }}").render(USER, v=2.0) == "True"


def test_b57_what_the_template_raises_is_the_error_text() -> None:
    template = ChatTemplate("{{ raise_exception('No user query found in messages.') }}")
    with pytest.raises(TemplateError) as caught:
        template.render(USER)
    assert str(caught.value) == "No user query found in messages."


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(a) %}{{ f(a + 1) }}{% endmacro %}{{ f(0) }}",
        "{% for i in range(9999) %}{{ messages[0].content * 1000 }}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(50) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ 'x' * 1000000000000 }}",
        "{{ undefined.attribute }}",
        "{{ unknown_function() }}",
        "{% if %}",
        "{% include 'other' %}",
    ],
)
def test_b66_templates_that_fail_or_never_end_are_cut_off(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "expression",
    [
        "messages.__class__",
        "messages[0].__class__",
        "''.__class__",
        "messages|attr('__class__')",
        "messages.append.__self__",
        "raise_exception.__globals__",
        "strftime_now.__closure__",
        "tojson.__code__",
    ],
)
def test_b66_python_internals_are_out_of_reach(expression: str) -> None:
    with contextlib.suppress(TemplateError):
        assert ChatTemplate(f"{{{{ {expression} }}}}").render(USER) == ""
    with pytest.raises(TemplateError):
        ChatTemplate(f"{{{{ {expression}.__mro__[1].__subclasses__() }}}}").render(USER)


def test_a_template_cannot_alter_the_callers_data() -> None:
    messages = copy.deepcopy(USER)
    ChatTemplate("{{ messages.append(1) }}{{ messages[0].update({'role': 'x'}) }}").render(messages)
    assert messages == USER


def test_limits_of_values() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(RequestError, match="nested"):
        template.render([{"role": "user", "content": deep}])
    with pytest.raises(RequestError, match="nested"):
        template.render_ids(build_tokenizer(small_metadata()), [{"role": "user", "content": deep}])
    with pytest.raises(RequestError, match="object"):
        template.render([{"role": "user", "content": object()}])
    with pytest.raises(RequestError, match="surrogate"):
        template.render([{"role": "user", "content": "\ud800"}])


def test_output_limit() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    template.render([{"role": "user", "content": "x" * TEMPLATE.max_output_bytes}])
    with pytest.raises(TemplateError, match="more than"):
        template.render([{"role": "user", "content": "x" * TEMPLATE.max_output_bytes + "y"}])


def test_4096_messages_are_within_the_work_limit(equivalent: ChatTemplate) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"message {i}"} for i in range(4096)]
    assert "message 4095" in equivalent.render(messages)


def test_environment_of_templates() -> None:
    def text(source: str) -> str:
        return ChatTemplate(source).render(USER)

    loop = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    pairs = "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0].get('x', 'y') }}"
    assert text("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc"
    assert text(loop) == "023"
    assert text(pairs) == "role=user;content=Hi;y"
    assert text("{{ ' a<b '.strip().replace('a', 'A').split('<') | join('|') }}{{ 'x'.startswith('x') }}") == "A|bTrue"
    assert text("{{ '<a&b>' }}") == "<a&b>"
    assert text("{{ strftime_now('%Y') | length }}") == "4"
    assert text("a {%- generation -%} b {%- endgeneration %} c") == "ab c"
