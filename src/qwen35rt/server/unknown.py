"""Fields of a body that mean nothing here: found wherever its type knows an object's fields, named by safe paths (C8).

Knows no endpoint. Objects whose fields are the client's own, such as schemas, are not looked into.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ..config import SERVER_LIMITS
from .errors import UnknownParameter

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_INDEX = re.compile(r"\[\d+\]")


def safe_name(name: str) -> str:
    """What of a client's name can be shown in a header and a log; may be empty."""
    return _UNSAFE.sub("", name)[: SERVER_LIMITS.ignored_name_chars]


def unknown_names(sent: Mapping[str, Any], known: Collection[str], path: str = "") -> Iterator[str]:
    """Paths of an object's fields that are not ``known``; null is the same as absent."""
    for name, value in sent.items():
        if name not in known and value is not None and (safe := safe_name(name)):
            yield f"{path}.{safe}" if path else safe


def unknown_inside(sent: Any, read: Any, path: str = "") -> Iterator[str]:
    """Paths of the fields that objects below the decoded JSON ``sent`` have and their types in ``read`` have not."""
    if isinstance(read, msgspec.Struct):
        if path:
            yield from unknown_names(sent, read.__struct_fields__, path)
        for name in read.__struct_fields__:
            if name in sent:
                yield from unknown_inside(sent[name], getattr(read, name), f"{path}.{name}" if path else name)
    elif isinstance(read, list) and read and isinstance(read[0], msgspec.Struct):
        for at, (one, typed) in enumerate(zip(sent, read, strict=True)):
            yield from unknown_inside(one, typed, f"{path}[{at}]")


def first_places(paths: Iterable[str]) -> tuple[str, ...]:
    """Each field once, at the first of its places in lists; so many, and so long, as a header may tell."""
    found: dict[str, str] = {}
    for path in paths:
        found.setdefault(_INDEX.sub("[]", path), path[: SERVER_LIMITS.ignored_name_chars])
        if len(found) == SERVER_LIMITS.ignored_names:
            break
    return tuple(found.values())


def refuse(paths: Iterable[str]) -> None:
    """Raise UnknownParameter for the first of the fields, if there is one."""
    for path in paths:
        shown = path[: SERVER_LIMITS.ignored_name_chars]
        raise UnknownParameter(f"there is no field {shown}", shown)
