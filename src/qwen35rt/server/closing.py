"""Where a parameter's value ends. Values are plain text and may speak of tags; a model may leave closing tags out."""

from __future__ import annotations

from qwen35rt.config import TOOLS
from qwen35rt.server.arguments import CallWriter
from qwen35rt.server.tags import (
    CALL,
    END_CALL,
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    MORE,
    PARAMETER,
    blanks_end,
    named_tag_at,
    tag_at,
    tag_name,
)


def closes(buf: str, at: int, tag: str, at_line: bool, call: CallWriter, final: bool) -> int:
    """``at`` if the tag that stands there ends the value; MORE; else the position from which to look on.

    Outer tags end it only where the value's own closing tag is plainly missing: a function's end before the
    call's or the turn's; and at the start of a line a call's end before the next call or the turn's end, a
    call of a known function, or a parameter that is declared and not given yet.
    """
    behind = at + len(tag)
    if tag == END_PARAMETER:
        return at
    if tag != END_FUNCTION and not at_line:
        return behind
    if tag == PARAMETER:
        return _opens_parameter(buf, at, behind, call, final)
    gap = blanks_end(buf, behind, TOOLS.tag_gap)
    if gap == len(buf) and not final:
        return MORE
    if tag == CALL:
        name, after = named_tag_at(buf, gap, FUNCTION, final)
        return MORE if after == MORE else at if after >= 0 and call.knows(name) else gap
    if gap == len(buf):
        return at
    following = tag_at(buf, gap, (CALL, END_CALL) if tag == END_FUNCTION else (CALL,), final)
    return MORE if following == "" else at if following else gap


def _opens_parameter(buf: str, at: int, behind: int, call: CallWriter, final: bool) -> int:
    name, after = tag_name(buf, behind, final)
    if after == MORE or (after == len(buf) and not final):
        return MORE
    return at if after >= 0 and call.expects(name) and buf.startswith(("\n", "\r"), after) else behind
