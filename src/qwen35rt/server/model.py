"""A loaded model as the server sees it: facts for answers and reports, tokeniser, template, engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .. import __version__
from ..config import SERVER_LIMITS
from ..errors import Qwen35Error
from ..tokenizer import ChatTemplate, Tokenizer
from ..tokenizer.vocab import NORMAL
from .messages import Conversation
from .prompt import ChatRenderer, RenderOptions
from .turns import Engine


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model once it is loaded. ``n_ctx``: tokens of one request (C19); ``hash``: of its file;
    ``preset``: the row of recommended sampling values that suits it, where no flag names one. ``device``: the backend's
    name, ``device_name`` as its maker calls it; ``n_gpu_layers`` of its ``n_layers`` are on a GPU."""

    id: str
    n_ctx: int
    n_vocab: int
    device: str
    aliases: tuple[str, ...] = ()
    file_name: str = ""
    hash: str = ""
    reason: str = ""  # why that device
    device_name: str = ""
    n_gpu_layers: int = 0
    n_layers: int = 0
    isa: str = ""
    quant: str = ""
    threads: int = 0
    vocab_type: str = ""
    n_ctx_train: int = 0
    n_embd: int = 0
    n_params: int = 0
    size: int = 0  # bytes
    created: int = 0  # seconds since 1970
    preset: str = "general"
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def fingerprint(self) -> str:
        """Build, model and backend (C39)."""
        return "-".join(filter(None, ("qwen35rt", __version__, self.hash[:8], self.device)))

    @property
    def names(self) -> frozenset[str]:
        """Names that requests may use for it."""
        return frozenset((self.id, *self.aliases))


@dataclass(frozen=True)
class Loaded:
    """``close``: stops the engine and releases what loading took; called once."""

    facts: ModelFacts
    tokenizer: Tokenizer
    engine: Engine
    template: ChatTemplate | None = None
    close: Callable[[], None] = lambda: None

    @cached_property
    def chat(self) -> ChatRenderer | None:
        """Makes chat prompts; None where the model has no template."""
        return None if self.template is None else ChatRenderer(self.template, self.tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token."""
        vocab = self.tokenizer.vocab
        # A normal token of a byte-level vocabulary has one character for each byte.
        plain = vocab.model == "gpt2"
        spelled = zip(vocab.tokens, vocab.types, strict=True)
        return max(len(text) if plain and kind == NORMAL else len(text.encode()) for text, kind in spelled)

    def prepare(self) -> None:
        """Make what requests would otherwise make at first use: that belongs to loading (C6)."""
        self.longest_token  # noqa: B018
        if self.chat is not None:
            with suppress(Qwen35Error):  # a template may refuse this conversation and take others
                self.chat.prompt(Conversation([{"role": "user", "content": "Hello"}], (0,)), RenderOptions())

    def fewest_tokens(self, text: str) -> int:
        """Tokens that a text has at least, from its size alone (C17)."""
        shrink = 1 if text.isascii() else SERVER_LIMITS.normal_shrink
        if self.tokenizer.vocab.model != "gpt2" or not text:
            return 0  # SentencePiece may drop blanks
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        return -(-size // (shrink * self.longest_token))
