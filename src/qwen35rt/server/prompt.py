"""A conversation to a prompt: text, ids, where later prompts will differ, and where the model stands at its end.

Owns guarding, late system messages and the cut of a continued message. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from ..errors import TemplateError
from ..tokenizer import ChatTemplate, Tokenizer
from ..tokenizer.chat import boundaries, plain_copy, strings_in
from ..tokenizer.guard import Guard, encode_guarded, pick_breaker
from .messages import Conversation, TemplateMessage
from .tags import END_THINK, THINK

# What templates call and what this module sets itself: no request may put something else there.
RESERVED = frozenset(("messages", "tools", "add_generation_prompt", "self", "loop", "caller")).union(
    ("raise_exception", "strftime_now", "range", "dict", "namespace", "debug", "cycler", "joiner", "lipsum")
)


@dataclass(frozen=True)
class ChatPrompt:
    """``source``: of the template. ``text``: what is tokenised. ``keep_at``: the ``boundaries`` of ``ids``.
    ``reasoning``: the prompt ends inside an open ``<think>``; ``opening``: right behind that tag."""

    source: str
    text: str
    ids: tuple[int, ...]
    keep_at: tuple[int, ...]
    reasoning: bool
    opening: bool


@dataclass(frozen=True)
class RenderOptions:
    """``variables``: further ones of the template. ``resume``: the trailing assistant message goes on."""

    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    parse_special: bool = False
    late_system: Literal["user", "merge", "error"] = "user"
    add_generation_prompt: bool = True
    resume: bool = False


class ChatRenderer:
    """Makes the prompts of one model. Safe to use from several threads at once."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template, self.tokenizer = template, tokenizer
        self._guard = Guard(tokenizer.vocab)
        vocab = tokenizer.vocab
        own = [vocab.tokens[i] for i in (vocab.bos, vocab.eos, vocab.padding, vocab.unknown) if i is not None]
        self._own = [template.source, *own]

    def prompt(
        self, conversation: Conversation, options: RenderOptions, check: Callable[[str], None] = lambda text: None
    ) -> ChatPrompt:
        """Render and tokenise. ``check`` is given the text before the work of tokenising it begins.

        Raises TemplateError for what the template raises, RequestError for hostile values.
        """
        return _Rendering(self, conversation, options).prompt(check)

    def marks(self, conversation: Conversation, options: RenderOptions) -> tuple[str, str]:
        """Two characters that occur nowhere in the template and in what it is given: breaker and end mark."""
        given = [self._own, conversation.messages, options.tools, options.variables]
        texts = list(strings_in(given))
        breaker = pick_breaker(iter(texts))
        return breaker, pick_breaker(chain(texts, [breaker]))

    def protect(self, text: str, breaker: str) -> str:
        """Break whatever in a caller's string could become a control token."""
        return self._guard.protect(text, breaker)


class _Rendering:
    """The rendering of one conversation."""

    def __init__(self, renderer: ChatRenderer, conversation: Conversation, options: RenderOptions) -> None:
        self._renderer, self._conversation, self._options = renderer, conversation, options
        self._breaker, self._end = renderer.marks(conversation, options)
        self._tools = self._guarded(options.tools)
        self._variables = self._guarded(options.variables)

    def prompt(self, check: Callable[[str], None]) -> ChatPrompt:
        text = self._continued() if self._options.resume else self._rendered()
        plain = text.replace(self._breaker, "")
        check(plain)
        encoded = encode_guarded(self._renderer.tokenizer, text, self._breaker)
        tail = encoded.tail
        opened = tail.rfind(THINK)
        reasoning = opened >= 0 and opened > tail.rfind(END_THINK)
        return ChatPrompt(
            source=self._renderer.template.source,
            text=plain,
            ids=tuple(encoded.ids),
            keep_at=tuple(boundaries(encoded, self._conversation.messages, self._options.tools)),
            reasoning=reasoning,
            opening=reasoning and tail.endswith(THINK),
        )

    def _continued(self) -> str:
        """The prompt up to the end of the trailing message's text, which a mark behind it shows."""
        name = self._conversation.open
        text = self._rendered(name)
        at = text.rfind(self._end)
        if at < 0:
            raise TemplateError(
                f"the chat template leaves out the last message's {name}, so it cannot be continued; "
                "set continue_final_message to false",
                "messages",
            )
        return text[:at].replace(self._end, "")

    def _rendered(self, marked: str | None = None) -> str:
        conversation, mode = self._conversation, self._options.late_system
        try:
            return self._render(conversation.messages, marked)
        except TemplateError as refused:
            if not conversation.late:
                raise
            changed = conversation.late_merged() if mode == "merge" else conversation.late_as_user()
            text = self._render(changed, marked)
            if mode == "error":  # the late message alone is at fault: as a user's it would pass
                index = conversation.sources[conversation.late[0]]
                raise TemplateError(f"messages[{index}]: {refused}", f"messages[{index}].role") from None
            return text

    def _render(self, messages: list[TemplateMessage], marked: str | None) -> str:
        given = self._guarded(messages)
        if marked is not None:
            given[-1][marked] += self._end
        add = self._options.add_generation_prompt and marked is None
        try:
            return self._renderer.template.render(given, self._tools, add, **self._variables)
        except TemplateError as e:
            raise TemplateError(str(e).replace(self._breaker, "").replace(self._end, ""), e.param) from None

    def _guarded(self, value: Any) -> Any:
        if self._options.parse_special:
            return plain_copy(value, lambda text: text)
        return plain_copy(value, lambda text: self._renderer.protect(text, self._breaker))
