"""The tags of an answer, and how they are found in text that is still coming. Pure functions.

``final`` says that nothing follows the text, so that what could still become a tag is none.
"""

from __future__ import annotations

from qwen35rt.config import TOOLS

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
LONGEST = max(map(len, (END_CALL, END_FUNCTION, END_PARAMETER)))

BLANKS = " \t\r\n"
MORE, NONE = -1, -2  # in place of a position: undecided until more text comes; no


def break_before(buf: str, low: int, at: int, crlf: bool = True) -> int:
    """Start of the line break (``crlf``: with its CR) that ends at ``at``; ``at`` if none starts from ``low`` on."""
    if at > low and buf[at - 1] == "\n":
        return at - 2 if crlf and at - 2 >= low and buf[at - 2] == "\r" else at - 1
    return at


def blanks_end(buf: str, at: int, limit: int | None = None) -> int:
    """Position behind the blanks at ``at``, at most ``limit`` of them."""
    end = len(buf) if limit is None else min(len(buf), at + limit)
    while at < end and buf[at] in BLANKS:
        at += 1
    return at


def tag_at(buf: str, at: int, tags: tuple[str, ...], final: bool) -> str | None:
    """The tag at a position, "" while the text there can still become one, None for none."""
    if buf.startswith(tags, at):
        return next(tag for tag in tags if buf.startswith(tag, at))
    if not final and len(buf) - at < LONGEST:
        rest = buf[at:]
        if any(tag.startswith(rest) for tag in tags):
            return ""
    return None


def find_tag(buf: str, at: int, tags: tuple[str, ...], final: bool) -> tuple[int, str]:
    """Where the next tag stands, or what can become one (with ""); the end of the text if neither."""
    if len(tags) == 1:
        found = buf.find(tags[0], at)
        if found >= 0:
            return found, tags[0]
    else:
        found = buf.find("<", at)
        while found >= 0:
            if buf.startswith(tags, found):
                return found, next(tag for tag in tags if buf.startswith(tag, found))
            found = buf.find("<", found + 1)
    # A tag has one "<", so that only the last one of the text can be the start of a tag to come.
    last = -1 if final else buf.rfind("<", max(at, len(buf) - LONGEST))
    return (last if last >= 0 and tag_at(buf, last, tags, final) == "" else len(buf)), ""


def tag_name(buf: str, at: int, final: bool) -> tuple[str, int]:
    """The name that starts at ``at`` and the position behind its ``>``; MORE or NONE as position else."""
    close = buf.find(">", at, at + TOOLS.name_chars)
    name = buf[at : close if close >= 0 else at + TOOLS.name_chars]
    if "<" in name or "\n" in name or (close >= 0 and not name.strip()):
        return "", NONE
    if close >= 0:
        return name.strip(), close + 1
    return "", NONE if final or len(name) == TOOLS.name_chars else MORE


def named_tag_at(buf: str, at: int, tag: str, final: bool) -> tuple[str, int]:
    """The name in a ``<tag=NAME>`` at a position and the position behind it; MORE or NONE as position else."""
    found = tag_at(buf, at, (tag,), final)
    if not found:
        return "", NONE if found is None else MORE
    return tag_name(buf, at + len(tag), final)
