"""A chat request's tools and what may be done with them. Pure checks; the templates see the tools as sent."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import SERVER_LIMITS
from ..errors import RequestError
from .errors import UnsupportedParameter
from .unknown import first_places, unknown_names

_TOOL_FIELDS = frozenset(("type", "function"))
_FUNCTION_FIELDS = frozenset(("name", "description", "parameters", "strict"))
_NAME_CHARS = frozenset(string.ascii_letters + string.digits + "_.-")


@dataclass(frozen=True)
class ToolUse:
    """``tools``: for the template, None where there are none. ``calls``: whether the answer is read for calls;
    ``banned``: the model must not begin one. ``one_call``: the answer ends behind its first call. ``ignored``: paths of
    fields that have no effect yet; ``unknown``: of those that have no meaning.
    """

    tools: list[dict[str, Any]] | None
    calls: bool
    banned: bool = False
    one_call: bool = False
    ignored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def read_tools(
    tools: Sequence[Any] | None, choice: Any, parallel: bool | None, limit: int = SERVER_LIMITS.tools
) -> ToolUse:
    """Check ``tools``, ``tool_choice`` and ``parallel_tool_calls``; ``limit``: tools at most.

    Raises RequestError with the path of the field at fault, UnsupportedParameter for choices of a later release.
    """
    if tools is not None and len(tools) > limit:
        raise RequestError(f"tools must be a list of at most {limit}", "tools")
    names: dict[str, int] = {}
    ignored: list[str] = []
    unknown: list[str] = []
    for i, tool in enumerate(tools or ()):
        function = _function(tool, f"tools[{i}]")
        name = function["name"]
        if name in names:
            raise RequestError(
                f"tools[{i}].function.name is that of tools[{names[name]}] too", f"tools[{i}].function.name"
            )
        names[name] = i
        if function.get("strict"):
            ignored.append(f"tools[{i}].function.strict")
        unknown += unknown_names(tool, _TOOL_FIELDS, f"tools[{i}]")
        unknown += unknown_names(function, _FUNCTION_FIELDS, f"tools[{i}].function")
    given = list(tools) if tools else None
    told = first_places(ignored), first_places(unknown)
    if not _auto(choice, names):
        return ToolUse(given, False, given is not None, False, *told)
    return ToolUse(given, given is not None, False, parallel is False, *told)


def _function(tool: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{path} must be an object", path)
    kind = tool.get("type", "function")
    if not isinstance(kind, str):
        raise RequestError(f"{path}.type must be a string", f"{path}.type")
    if kind != "function":
        raise UnsupportedParameter(f"{path}.type must be 'function'", f"{path}.type")
    function = tool.get("function")
    path += ".function"
    if not isinstance(function, Mapping):
        raise RequestError(f"{path} must be an object", path)
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= 64 or not _NAME_CHARS.issuperset(name):
        raise RequestError(f"{path}.name must be 1 to 64 of the characters A-Z a-z 0-9 _ . -", f"{path}.name")
    for key, types, legal in (
        ("description", str, "a string"),
        ("parameters", Mapping, "an object"),
        ("strict", bool, "true or false"),
    ):
        value = function.get(key)
        if value is not None and not isinstance(value, types):
            raise RequestError(f"{path}.{key} must be {legal}", f"{path}.{key}")
    return function


def _auto(choice: Any, names: Mapping[str, int]) -> bool:
    """Whether the model decides; False for ``none``."""
    if choice is None or choice == "auto":
        return True
    if choice == "none":
        return False
    if choice == "required":
        raise UnsupportedParameter("tool_choice 'required' is not supported yet", "tool_choice")
    if not isinstance(choice, Mapping):
        raise RequestError("tool_choice must be 'none', 'auto', 'required' or an object", "tool_choice")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") == "function" and (not isinstance(name, str) or name not in names):
        raise RequestError("tool_choice.function.name is the name of no tool", "tool_choice.function.name")
    raise UnsupportedParameter("tool_choice for one function is not supported yet", "tool_choice")
