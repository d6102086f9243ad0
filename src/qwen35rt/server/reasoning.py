"""Thinking on or off, its budget, and the sampling defaults that go with it (server_api.md, sections 6 and 14)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ..config import CHAT_SAMPLING
from ..errors import RequestError
from ..plan import Markup
from ..tokenizer import Tokenizer
from .prompt import RESERVED, ChatPrompt
from .tags import CALL, END_CALL, END_THINK, THINK
from .tools import ToolUse

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Switch = Literal["on", "off", "auto"]


class Thinking(msgspec.Struct):
    """The object form of the switch; ``budget_tokens`` is a budget like the others."""

    type: Literal["enabled", "disabled"]
    budget_tokens: int | None = None


def template_variables(
    kwargs: Mapping[str, Any] | None,
    enable_thinking: bool | None,
    thinking: Thinking | None,
    effort: Effort | None,
    default: Switch,
) -> dict[str, Any]:
    """``chat_template_kwargs`` with the switch and the effort in it. Raises RequestError for names no request may set.

    The first switch that is present wins; None and ``default`` "auto" leave the choice to the template.
    """
    variables = {name: value for name, value in (kwargs or {}).items() if value is not None}
    for name in variables:
        if name in RESERVED:
            raise RequestError(f"chat_template_kwargs may not set {name}", f"chat_template_kwargs.{name}")
    own = variables.get("enable_thinking")
    if own is not None and not isinstance(own, bool):
        where = "chat_template_kwargs.enable_thinking"
        raise RequestError(f"{where} must be true or false", where)
    switches = (
        own,
        enable_thinking,
        None if thinking is None else thinking.type == "enabled",
        None if effort is None else effort != "none",
        None if default == "auto" else default == "on",
    )
    switch = next((s for s in switches if s is not None), None)
    if switch is not None:
        variables["enable_thinking"] = switch
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    return variables


def markup_of(tokenizer: Tokenizer, prompt: ChatPrompt, tools: ToolUse, budget: int, message: str) -> Markup:
    """What the engine must know of an answer's tags. ``message``: text before the tag that a spent budget closes."""
    index = tokenizer.vocab.index
    return Markup(
        reasoning=prompt.reasoning,
        think=index.get(THINK),
        think_end=index.get(END_THINK),
        call=index.get(CALL) if tools.calls else None,
        call_end=index.get(END_CALL) if tools.calls else None,
        budget=budget,
        closing=tuple(tokenizer.encode(f"{message}\n{END_THINK}\n\n")) if budget >= 0 else (),
        one_call=tools.one_call,
    )


def banned_ids(tokenizer: Tokenizer, tools: ToolUse) -> frozenset[int]:
    """Tokens that the model must not draw: the one that begins a call where none is wanted."""
    token = tokenizer.vocab.index.get(CALL)
    return frozenset((token,)) if tools.banned and token is not None else frozenset()


def chat_defaults(
    preset: str, reasoning: bool, flags: Mapping[str, Any], file: Mapping[str, Any]
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Sampling below the request's own: flags, then the model file's, then the published row.

    -> values that stand before the file's, and those of the file with the row below them, both for ``sampling_params``.
    """
    rows = CHAT_SAMPLING.get(preset)
    if rows is None:
        return dict(flags), file
    row = rows[0] if reasoning else rows[1]
    below = {
        "general.sampling.temp": row.temperature,
        "general.sampling.top_k": row.top_k,
        "general.sampling.top_p": row.top_p,
        "general.sampling.min_p": row.min_p,
        "general.sampling.penalty_repeat": row.repetition_penalty,
    }
    # By name: a copy of all keys would decode the vocabulary, a quarter of a second for each request.
    own = {key: file[key] for key in file if key.startswith("general.sampling.")}
    # No key of a file stands for this one.
    return {"presence_penalty": row.presence_penalty, **flags}, below | own
