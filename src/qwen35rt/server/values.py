"""Values of tool arguments: from the text that a model wrote to JSON, typed by the tool's schema.

The schema decides, never the look of the text. Knows nothing of tags or streams. Nothing here raises for
any text or schema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import unquote

from qwen35rt.config import TOOLS

Kinds = tuple[str, ...]  # JSON schema type names in the order to try; "string" is last and always there

STRING: Kinds = ("string",)
_KINDS = frozenset(("string", "integer", "number", "boolean", "array", "object", "null"))
_BOOLEANS = {"true": "true", "false": "false"}
_NULLS = frozenset(("null", "None"))  # templates print a null of an earlier call in Python's spelling

# Text of the model holds no lone surrogates, so plain characters stay as they are.
quote = json.JSONEncoder(ensure_ascii=False).encode


class ToolTypes:
    """The declared parameters of a request's tools, each looked up in its schema once."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schema = function.get("parameters")
                self._schemas[function["name"]] = schema if isinstance(schema, Mapping) else {}
        self._kinds: dict[tuple[str, str], Kinds] = {}

    def known(self, function: str) -> bool:
        """Whether a call of this name can be meant: any can where no tools are given."""
        return not self._schemas or function in self._schemas

    def declares(self, function: str, parameter: str) -> bool:
        """Whether the function has this parameter; one without declared parameters may have any."""
        properties = self._properties(function)
        return not properties or parameter in properties

    def kinds(self, function: str, parameter: str) -> Kinds:
        """Types to try for a value; ``STRING`` for an unknown function or an undeclared parameter."""
        key = (function, parameter)
        found = self._kinds.get(key)
        if found is None:
            properties = self._properties(function)
            if parameter not in properties:
                return STRING  # not kept: the model could invent names without end
            found = self._kinds[key] = schema_kinds(properties[parameter], self._schemas[function])
        return found

    def _properties(self, function: str) -> Mapping[str, Any]:
        properties = self._schemas.get(function, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}


def schema_kinds(schema: Any, root: Any) -> Kinds:
    """Types that ``schema`` allows, in its own order, string last. ``$ref`` is looked up in ``root``.

    Alternatives (anyOf, oneOf, allOf, type lists) are flattened. Deeper than ``config.TOOLS.schema_depth`` and
    behind a reference that was followed before there is nothing new.
    """
    kinds: dict[str, None] = {}
    seen: set[int] = set()  # schemas by identity, so that shared references cost their size once
    stack = [(schema, 0)]
    while stack:
        node, depth = stack.pop()
        if not isinstance(node, Mapping) or id(node) in seen or depth > TOOLS.schema_depth:
            continue
        seen.add(id(node))
        kinds.update(dict.fromkeys(_own_kinds(node)))
        inner = [_resolve(node["$ref"], root)] if "$ref" in node else []
        for key in ("anyOf", "oneOf", "allOf"):
            options = node.get(key)
            if isinstance(options, list | tuple):
                inner += options
        stack += [(option, depth + 1) for option in reversed(inner)]
    kinds.pop("string", None)
    return (*kinds, "string")


def _own_kinds(node: Mapping[str, Any]) -> list[str]:
    """Types that a schema names itself, else those of its enum or const, else the one its keywords imply."""
    stated = node.get("type")
    if stated is not None:
        names = stated if isinstance(stated, list | tuple) else [stated]
        return [name for name in names if isinstance(name, str) and name in _KINDS]
    members = node.get("enum")
    if isinstance(members, list | tuple) or "const" in node:
        return [_kind_of(m) for m in (members if isinstance(members, list | tuple) else [node["const"]])]
    if "properties" in node:
        return ["object"]
    return ["array"] if "items" in node else []


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, types in (("boolean", bool), ("integer", int), ("number", float), ("string", str)):
        if isinstance(value, types):
            return kind
    return "object" if isinstance(value, Mapping) else "array"


def _resolve(ref: Any, root: Any) -> Any:
    """The schema that a ``#/...`` pointer names, None where there is none; nothing outside is looked at."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    node = root
    for part in unquote(ref[1:]).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(part)
        elif isinstance(node, list) and part.isascii() and part.isdigit() and len(part) < 10:
            node = node[int(part)] if int(part) < len(node) else None
        else:
            return None
    return node


def value_json(text: str, kinds: Kinds) -> str:
    """A value as JSON text: the first type that the text fits, else the text itself as a string."""
    trimmed = text.strip()
    for kind in kinds:
        if kind == "string":
            break
        found = _as_kind(trimmed, kind)
        if found is not None:
            return found
    return quote(text)


def _as_kind(text: str, kind: str) -> str | None:
    if kind == "null":
        return "null" if text in _NULLS else None
    if kind == "boolean":
        return _BOOLEANS.get(text.lower())
    value = parsed(text)
    if kind == "array":
        return text if isinstance(value, list) else None
    if kind == "object":
        return text if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if kind == "integer" and isinstance(value, float):
        return str(int(value)) if value.is_integer() else None
    return json.dumps(value)


def no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=no_constant)


def parsed(text: str, decoder: json.JSONDecoder = _decoder) -> Any:
    """The JSON value, None for null and for text that is no JSON value or one too deep or too long."""
    try:
        return decoder.decode(text)
    except (ValueError, RecursionError):
        return None
