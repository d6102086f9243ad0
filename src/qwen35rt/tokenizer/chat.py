"""The model's own chat template: messages to a prompt, in a sandbox with a work limit.

Owns the environment that templates expect (that of transformers) and the copy of a caller's data that a
template sees. Knows nothing of HTTP; what a template raises is a TemplateError with the template's text.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from qwen35rt.config import ENGINE, TEMPLATE
from qwen35rt.errors import ModelFileError, RequestError, TemplateError
from qwen35rt.tokenizer.base import Tokenizer
from qwen35rt.tokenizer.guard import Encoded, Guard, encode_guarded, pick_breaker
from qwen35rt.tokenizer.vocab import Vocab

Message = Mapping[str, Any]

# Marks of training templates around an answer; in rendering they are a block that is always shown.
_GENERATION = (
    (re.compile(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})"), r"\1if true\2"),
    (re.compile(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})"), r"\1endif\2"),
)


class ChatTemplate:
    """A chat template; compiled at first use. ``variables`` are its own, such as ``bos_token``.

    Rendering raises TemplateError for what the template raises, for its faults, and for work or output over
    ``config.TEMPLATE``; RequestError for values that no template can be given.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        self._environment: Any = None
        self._lock = threading.Lock()
        self._guard: tuple[Vocab, Guard] | None = None

    def check(self) -> None:
        """Raise TemplateError if the source is no template."""
        import minijinja

        try:
            self._compiled()
        except minijinja.TemplateError as e:
            raise TemplateError(f"it is no chat template: {e.message}", "messages") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt as text. ``kwargs`` are further template variables."""
        given = _variables(messages, tools, kwargs)
        return self._render(plain_copy(given, lambda text: text), add_generation_prompt, None)

    def render_ids(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        parse_special: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """The prompt as ids.

        Control tokens spelled in the caller's strings stay plain text unless ``parse_special``; those that the
        template writes are matched (B52). User-defined tokens are matched everywhere.
        """
        if parse_special:
            return tokenizer.encode(self.render(messages, tools, add_generation_prompt, **kwargs), special=True)
        given = _variables(messages, tools, kwargs)
        breaker, copy = self._guarded(tokenizer, given)
        return encode_guarded(tokenizer, self._render(copy, add_generation_prompt, breaker), breaker).ids

    def chat_prompt(
        self, tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """The ids of ``render_ids`` that a model answers, and their ``boundaries``."""
        breaker, copy = self._guarded(tokenizer, _variables(messages, tools, kwargs))
        encoded = encode_guarded(tokenizer, self._render(copy, True, breaker), breaker)
        return encoded.ids, boundaries(encoded, copy["messages"], tools)

    def _guarded(self, tokenizer: Tokenizer, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """A breaker, and a copy of the variables in which it keeps control tokens from being spelled."""
        breaker = pick_breaker(strings_in([self.source, self._variables, given]))
        if self._guard is None or self._guard[0] is not tokenizer.vocab:
            self._guard = (tokenizer.vocab, Guard(tokenizer.vocab))
        guard = self._guard[1]
        return breaker, plain_copy(given, lambda text: guard.protect(text, breaker))

    def _render(self, given: dict[str, Any], add_generation_prompt: bool, breaker: str | None) -> str:
        import minijinja

        variables = {**self._variables, **given, "add_generation_prompt": add_generation_prompt}
        try:
            text: str = self._compiled().render_template("chat", **variables)
        except _Raised as e:
            raise TemplateError(_without(str(e), breaker), "messages") from None
        except minijinja.TemplateError as e:
            if e.kind == "OutOfFuel":
                raise TemplateError("the chat template ran over its work limit", "messages") from None
            raise TemplateError(f"the chat template failed: {_without(e.message, breaker)}", "messages") from None
        except (TypeError, ValueError, RecursionError) as e:  # from our own filters
            raise TemplateError(f"the chat template failed: {_without(str(e), breaker)}", "messages") from None
        if len(text.encode()) > TEMPLATE.max_output_bytes:
            raise TemplateError(f"the chat template wrote more than {TEMPLATE.max_output_bytes} bytes", "messages")
        return text

    def _compiled(self) -> Any:
        with self._lock:
            if self._environment is None:
                self._environment = _environment(self.source)
            return self._environment


def read_chat_template(metadata: Mapping[str, Any], vocab: Vocab) -> ChatTemplate | None:
    """The file's ``tokenizer.chat_template``, or None where it has none. ModelFileError if it is no text."""
    source = metadata.get("tokenizer.chat_template")
    if not source:
        return None
    if not isinstance(source, str):
        raise ModelFileError("tokenizer.chat_template is not a text")
    names = {"bos_token": vocab.bos, "eos_token": vocab.eos, "pad_token": vocab.padding, "unk_token": vocab.unknown}
    return ChatTemplate(source, {name: vocab.tokens[i] for name, i in names.items() if i is not None})


def boundaries(encoded: Encoded, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
    """Positions in a chat prompt that later prompts are likely to share, rising: where the control token stands with
    which the last turn begins. That is behind the system prompt and tools where they are worth it, and behind each of
    the last messages, so before the answer too."""
    found = [i for i, token in enumerate(encoded.ids) if token == encoded.control and i > 0]
    last = found[-ENGINE.keep_messages :]
    first = messages[0] if messages else None
    led = bool(tools) or (isinstance(first, Mapping) and first.get("role") in ("system", "developer"))
    head = [i for i in found[:1] if led and i not in last and i >= ENGINE.keep_least]
    return head + last


class _Raised(Exception):
    """What a template passed to raise_exception."""


class _Spelled:
    """A float that the engine would write otherwise than Python does, such as 1e-07; it hands 2.0 to filters as 2."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __str__(self) -> str:
        return repr(self.value)


def _environment(source: str) -> Any:
    import minijinja

    environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True, fuel=TEMPLATE.fuel, debug=False)
    environment.add_filter("tojson", tojson)
    environment.add_global("raise_exception", _raise_exception)
    environment.add_global("strftime_now", lambda form: datetime.now().strftime(form))
    for pattern, replacement in _GENERATION:
        source = pattern.sub(replacement, source)
    environment.add_template("chat", source)
    return environment


def _raise_exception(text: Any = "") -> None:
    raise _Raised(str(text))


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as ``json.dumps(value, ensure_ascii=False)`` writes it (B66): no HTML escapes, keys in their order."""
    pair = (str(separators[0]), str(separators[1])) if separators else None
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=pair, sort_keys=sort_keys, default=_json_default
    )
    if ensure_ascii:
        # A breaker must come through as it is: escaped it could not be taken out again.
        text = re.sub("[^\x00-\x7f\U000f0000-\U000ffffd]", lambda m: json.dumps(m.group())[1:-1], text)
    return text


def _json_default(value: Any) -> Any:
    if isinstance(value, _Spelled):
        return value.value
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _variables(messages: Sequence[Message], tools: Sequence[Any] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**kwargs, "messages": messages, "tools": tools}


def _without(text: str, breaker: str | None) -> str:
    return text if breaker is None else text.replace(breaker, "")


def plain_copy(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """A copy of plain data, so that a template can neither alter the caller's nor reach other objects."""
    if isinstance(value, str):
        return change(_checked(value))
    if value is None or isinstance(value, bool | int | _Spelled):
        return value
    if isinstance(value, float):
        # A variable of its own stays a number, which templates may compare.
        return value if _is_plain(value, whole=depth < 2) else _Spelled(value)
    if depth >= TEMPLATE.max_depth:
        raise RequestError(f"messages or tools are nested more than {TEMPLATE.max_depth} deep", "messages")
    if isinstance(value, Mapping):
        return {change(_checked(str(k))): plain_copy(v, change, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(v, change, depth + 1) for v in value]
    raise RequestError(f"a chat template cannot be given a {type(value).__name__}", "messages")


def _checked(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("the messages hold a lone surrogate", "messages") from None
    return text


def _is_plain(value: float, whole: bool) -> bool:
    spelled = repr(value)
    return not ("e" in spelled or "n" in spelled or (spelled.endswith(".0") and not whole))


def strings_in(value: Any, depth: int = 0) -> Iterator[str]:
    """Every string of plain data, names of fields included."""
    if isinstance(value, str):
        yield value
    elif depth <= TEMPLATE.max_depth + 1:
        if isinstance(value, Mapping):
            for k, v in value.items():
                yield str(k)
                yield from strings_in(v, depth + 1)
        elif isinstance(value, list | tuple):
            for v in value:
                yield from strings_in(v, depth + 1)
