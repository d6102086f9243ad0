"""Arguments typed by the tool's schema, never by their look (B70, B71)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qwen35rt.config import TOOLS
from qwen35rt.server.json_call import call_of_json, cut_call_of_json
from qwen35rt.server.values import STRING, ToolTypes, schema_kinds, value_json

DEEP = "[" * 100_000


def typed(text: str, schema: Any, root: Any = None) -> Any:
    return json.loads(value_json(text, schema_kinds(schema, root)))


@pytest.mark.parametrize("text", ["02134", "true", "null", '{"a":1}', "1e5", "", " x\n"])
def test_b70_strings_stay_strings(text: str) -> None:
    assert typed(text, {"type": "string"}) == text
    assert typed(text, {}) == text
    assert typed(text, {"type": "string", "enum": [text, 1]}) == text


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("5", "integer", 5),
        ("5.0", "integer", 5),
        (" -7\n", "integer", -7),
        ("1e3", "integer", 1000),
        ("123456789012345678901234567890", "integer", 123456789012345678901234567890),
        ("1e5", "number", 100000.0),
        ("2", "number", 2),
        ("2.50", "number", 2.5),
        ("True", "boolean", True),
        ("false", "boolean", False),
        ("FALSE\n", "boolean", False),
        ('[1, {"a": null}]', "array", [1, {"a": None}]),
        ('\n{"a": [1.0]}\n', "object", {"a": [1.0]}),
        ("null", "null", None),
        ("None", "null", None),
    ],
)
def test_b70_other_types_are_parsed(text: str, kind: str, value: Any) -> None:
    found = typed(text, {"type": kind})
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("abc", "integer"),
        ("5.5", "integer"),
        ("05", "integer"),
        ("1_0", "integer"),
        ("٥", "integer"),
        ("true", "integer"),
        ("1e999", "integer"),
        ("9" * 5000, "integer"),
        ("NaN", "number"),
        ("-Infinity", "number"),
        ("1e999", "number"),
        ("", "number"),
        ("maybe", "boolean"),
        ("1", "boolean"),
        ("{bad", "object"),
        ("[1]", "object"),
        ("{'a': 1}", "object"),
        ('{"a": NaN}', "object"),
        ("{}", "array"),
        (DEEP, "array"),
        ("nil", "null"),
        ("5", "integers"),
        ("5", "string"),
    ],
)
def test_b71_what_does_not_fit_is_the_text(text: str, kind: str) -> None:
    assert typed(text, {"type": kind}) == text


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null string"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "number integer string"),
        ({"type": ["string", "integer", "null"]}, "integer null string"),
        ({"allOf": [{"type": "boolean"}]}, "boolean string"),
        ({"anyOf": [{"anyOf": [{"type": "array"}, {"type": "object"}]}, {"type": "null"}]}, "array object null string"),
        ({"enum": [1, 2.5, True, None, "x", [1], {}]}, "integer number boolean null array object string"),
        ({"const": 3}, "integer string"),
        ({"properties": {}}, "object string"),
        ({"items": {}}, "array string"),
        ({"type": [3, None]}, "string"),
        ({"anyOf": 3, "$ref": 4}, "string"),
        (True, "string"),
        (None, "string"),
    ],
)
def test_b70_alternatives_are_tried_in_their_order_and_string_last(schema: Any, kinds: str) -> None:
    assert schema_kinds(schema, schema) == tuple(kinds.split())


def test_b70_alternatives_give_the_first_that_fits() -> None:
    either = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert typed("null", either) is None
    assert typed("nullx", either) == "nullx"
    assert repr(typed("5", {"type": ["number", "integer"]})) == "5"
    assert repr(typed("5.0", {"type": ["number", "integer"]})) == "5.0"


@pytest.mark.parametrize(
    ("ref", "kinds"),
    [
        ("#/$defs/n", "integer string"),
        ("#/$defs/a~1b~0c%20d", "boolean string"),
        ("#/list/1", "null string"),
        ("#/$defs/twice", "integer string"),
        ("#", "object string"),
        ("#/$defs/none", "string"),
        ("#/list/9", "string"),
        ("#/list/x", "string"),
        ("#/$defs/n/type/deeper", "string"),
        ("#/$defs/self", "string"),
        ("https://example.com/x", "string"),
    ],
)
def test_b70_references_inside_the_schema_are_followed(ref: str, kinds: str) -> None:
    root = {
        "type": "object",
        "$defs": {
            "n": {"type": "integer"},
            "a/b~c d": {"type": "boolean"},
            "twice": {"$ref": "#/$defs/n"},
            "self": {"$ref": "#/$defs/self"},
        },
        "list": [{}, {"type": "null"}],
    }
    assert schema_kinds({"$ref": ref}, root) == tuple(kinds.split())


def test_a_reference_is_followed_to_the_limit_only() -> None:
    def chain(n: int) -> dict[str, Any]:
        steps: dict[str, Any] = {str(i): {"$ref": f"#/{i + 1}"} for i in range(n)}
        return {**steps, str(n): {"type": "integer"}}

    deepest = TOOLS.schema_depth - 1
    assert schema_kinds({"$ref": "#/0"}, chain(deepest)) == ("integer", "string")
    assert schema_kinds({"$ref": "#/0"}, chain(deepest + 1)) == STRING


def test_references_that_multiply_cost_their_size_once() -> None:
    root: dict[str, Any] = {str(i): {"anyOf": [{"$ref": f"#/{i + 1}"}] * 20} for i in range(30)}
    root["30"] = {"type": "null"}
    root = json.loads(json.dumps(root))
    assert len(schema_kinds({"$ref": "#/0"}, root)) <= 2


def test_tools_of_any_shape_give_types() -> None:
    schema = {"properties": {"a": {"type": "integer"}}}
    types = ToolTypes([{"function": {"name": "f", "parameters": schema}}, {"name": "flat", "parameters": schema}])
    for name in ("f", "flat"):
        assert types.known(name)
        assert types.kinds(name, "a") == types.kinds(name, "a") == ("integer", "string")
        assert types.kinds(name, "b") == STRING
        assert (types.declares(name, "a"), types.declares(name, "b")) == (True, False)
    assert not types.known("x")
    assert types.kinds("x", "a") == STRING
    assert types.declares("x", "a")
    assert ToolTypes(None).known("x")
    odd: list[Any] = [{}, {"function": 3}, 4, {"function": {"name": "o", "parameters": []}}, {"name": "p"}]
    odd += [{"name": "q", "parameters": {"properties": [1]}}]
    assert [ToolTypes(odd).kinds(name, "a") for name in "opq"] == [STRING] * 3


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "f", "arguments": {"a": "é"}}', ("f", '{"a": "é"}')),
        ('{"arguments": "{\\"a\\": 1}", "name": "f"}', ("f", '{"a": 1}')),
        ('{"name": "f"}', ("f", "{}")),
        ('{"name": "f", "arguments": {"a": "\n"}}', ("f", '{"a": "\\n"}')),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', ("f", '{"a": "\\ud800"}')),
        ('{"name": "\\ud800"}', None),
        ('{"name": ""}', None),
        ('{"name": "f", "arguments": {"a": 1e999}}', None),
        ('{"name": "f", "arguments": "x"}', None),
        ('{"a": ' + DEEP, None),
        ("[]", None),
    ],
)
def test_calls_in_json(text: str, call: tuple[str, str] | None) -> None:
    assert call_of_json(text) == call


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('\n{"name": "f', None),
        ('{"name": "f"', ("f", "{")),
        ('{"id": 1 , "name" : "f", "arguments" : {"a": 1', ("f", '{"a": 1')),
        ('{"name": "f", "arguments": ', ("f", "{")),
        ('{"arguments": {"a": 1}, "name": "f"', ("f", "{")),
        ('{"name": "\\ud800", "arguments": {', None),
        ("{" + DEEP, None),
    ],
)
def test_calls_in_json_that_break_off(text: str, call: tuple[str, str] | None) -> None:
    assert cut_call_of_json(text) == call
