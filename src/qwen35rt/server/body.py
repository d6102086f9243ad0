"""JSON text -> one typed object: strict types, every fault with its field's path, nothing ignored silently (C7 to C9).

Knows no endpoint: names, later fields and second names come as tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from ..config import SERVER_LIMITS
from ..errors import RequestError
from .errors import InvalidJson, UnsupportedParameter
from .unknown import first_places, refuse, safe_name, unknown_inside, unknown_names

T = TypeVar("T", bound=msgspec.Struct)

# The last alternative makes an unterminated string match too: otherwise each quote in it would be tried as a start.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_STEP = np.zeros(256, np.int8)
_STEP[[ord("["), ord("{")]] = 1
_STEP[[ord("]"), ord("}")]] = -1
_SLICE = 1 << 20
_NOT_FINITE = re.compile(rb"\b(?:NaN|Infinity)\b")
_PATH = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_PARAM_CHARS = 128


@dataclass(frozen=True)
class Fields:
    """What an endpoint's body may hold beside the fields of its type.

    ``later``: fields of later stages -> whether a value leaves them without effect. ``second``: second name -> first
    name of the same field. ``inert``: accepted, they cannot change the answer.
    """

    later: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    second: Mapping[str, str] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Body(Generic[T]):
    """``value``: the typed object; ``ignored``: paths of unknown fields, safe to show; ``names``: first name of a
    field -> the one the client used, for errors."""

    value: T
    ignored: tuple[str, ...]
    names: Mapping[str, str]


def neutral(*values: Any) -> Callable[[Any], bool]:
    """A test for values that equal one of these; true and 1 are not equal here. Empty lists always pass."""

    def test(value: Any) -> bool:
        return value == [] or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)

    return test


def read_object(raw: bytes, max_depth: int = SERVER_LIMITS.json_depth) -> dict[str, Any]:
    """Decode one JSON object. Raises InvalidJson, and RequestError naming a field that holds no finite number."""
    if depth_over(raw, max_depth):
        raise InvalidJson(f"the body is nested deeper than {max_depth} levels")
    try:
        found = msgspec.json.decode(raw)
    except msgspec.ValidationError as e:  # JSON, but a number beyond what a float or an integer can hold
        raise RequestError(f"a number is out of range ({_reason(e)})", _find_number(raw)) from None
    except msgspec.DecodeError as e:
        if _NOT_FINITE.search(raw) and (param := _find_number(raw)) is not None:
            raise RequestError(f"{param} must be a finite number", param) from None
        raise InvalidJson(f"the body is not valid JSON: {_reason(e)}") from None
    except RecursionError:
        raise InvalidJson("the body is nested too deep") from None
    if not isinstance(found, dict):
        raise InvalidJson("the body must be a JSON object")
    return found


def depth_over(raw: bytes, limit: int) -> bool:
    """Whether lists and objects are nested deeper than ``limit``; brackets inside strings do not count."""
    if raw.count(b"[") + raw.count(b"{") <= limit:
        return False
    text = np.frombuffer(_STRING.sub(b"", raw), np.uint8)
    depth = 0
    for at in range(0, len(text), _SLICE):
        depths = np.cumsum(_STEP[text[at : at + _SLICE]], dtype=np.int32)
        if depth + int(depths.max()) > limit:
            return True
        depth += int(depths[-1])
    return False


def read_body(
    raw: bytes, kind: type[T], fields: Fields, *, max_depth: int = SERVER_LIMITS.json_depth, strict: bool = False
) -> Body[T]:
    """Decode and check types. ``strict``: unknown fields are an error. Raises RequestErrors with ``param`` set."""
    given = read_object(raw, max_depth)
    for name, harmless in fields.later.items():
        value = given.pop(name, None)
        if value is not None and not harmless(value):
            raise UnsupportedParameter(f"{name} is not supported by this server", name)
    names = _join_names(given, fields.second)
    known = set(kind.__struct_fields__)
    unknown = list(unknown_names(given, known | fields.inert))
    if strict:
        refuse(unknown)
    # null means the default, whatever the field's type.
    values = {name: value for name, value in given.items() if name in known and value is not None}
    try:
        value = msgspec.convert(values, kind)
    except msgspec.ValidationError as e:
        message = str(e)
        match = _PATH.search(message)
        path = match[1] if match else None
        if path:
            top = re.split(r"[.\[]", path, maxsplit=1)[0]
            path = (names.get(top, top) + path[len(top) :])[:_PARAM_CHARS]
        raise RequestError(f"{path or 'the body'}: {message[: match.start()] if match else message}", path) from None
    if strict:
        refuse(unknown_inside(values, value))
    return Body(value, first_places([*unknown, *unknown_inside(values, value)]), names)


def _join_names(given: dict[str, Any], second: Mapping[str, str]) -> dict[str, str]:
    """Move values to their field's first name; -> names used. Two names with different values are refused."""
    used: dict[str, str] = {}
    for name, first in second.items():
        value = given.pop(name, None)
        if value is None:
            continue
        present = given.get(first)
        if present is None:
            given[first], used[first] = value, name
        elif present != value or isinstance(present, bool) != isinstance(value, bool):
            raise RequestError(f"{used.get(first, first)} and {name} mean the same and differ", name)
    return used


def _reason(error: Exception) -> str:
    """The library's words without the path, which says nothing here."""
    return str(error).partition(" - at `")[0]


class _Odd:
    """Stands for a number that is none."""


def _find_number(raw: bytes) -> str | None:
    """Path of the first number that is not finite or too long; None if the text is no JSON even then, or large."""
    if len(raw) > _SLICE:
        return None

    def real(text: str) -> Any:
        value = float(text)
        return value if abs(value) < float("inf") else _Odd()

    def whole(text: str) -> Any:
        return 0 if len(text) <= 400 else _Odd()

    try:
        found = json.loads(raw, parse_constant=lambda _: _Odd(), parse_float=real, parse_int=whole)
    except (ValueError, RecursionError):
        return None
    path = _path_of_odd(found)
    return path[:_PARAM_CHARS] if path else None


def _path_of_odd(value: Any) -> str | None:
    """Path below ``value`` of the first number that stands for one that cannot be; its depth is bounded."""
    if isinstance(value, _Odd):
        return ""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        below = _path_of_odd(inner) if isinstance(inner, _Odd | dict | list) else None
        if below is not None:
            step = f"[{key}]" if isinstance(value, list) else safe_name(key)
            return step + ("." if below and not below.startswith("[") else "") + below
    return None
