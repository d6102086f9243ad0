"""What every tokeniser shares: cutting text at added tokens, bytes of ids, decoding.

Subclasses turn ordinary text into ids and ids into bytes; they know nothing of added tokens.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from qwen35rt.errors import RequestError
from qwen35rt.tokenizer.vocab import CONTROL, UNUSED, USER_DEFINED, Vocab

_RAW = frozenset((CONTROL, USER_DEFINED, UNUSED))  # stored as plain text, not in the model's alphabet


class Tokenizer(ABC):
    """Text to ids and back. Safe to use from several threads at once.

    ``encode`` never adds a beginning-of-text token: ``vocab.add_bos`` says whether a prompt needs one (C13).
    """

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        self._always = _Cutter(vocab, vocab.user_defined)
        self._special = _Cutter(vocab, vocab.user_defined | vocab.control)
        self._control = _Cutter(vocab, vocab.control)
        self._bytes: dict[int, bytes] = {}

    @property
    def n_vocab(self) -> int:
        return len(self.vocab)

    @property
    def eog(self) -> frozenset[int]:
        """Ids that end a turn (C30)."""
        return self.vocab.eog

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of ``text``; ``special`` also matches control tokens (C14). User-defined tokens are always matched.

        Raises RequestError for text that is not valid Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise RequestError(f"the text holds a lone surrogate at character {e.start}", "prompt") from None
        ids: list[int] = []
        for piece in (self._special if special else self._always).cut(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                # After the start and after an added token a SentencePiece text begins anew.
                ids += self._encode_text(piece)
        return ids

    def cut_control(self, text: str) -> Iterator[str | int]:
        """Control tokens of ``text`` as ids and the text between them, in order."""
        return self._control.cut(text)

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token stands for; control and unused tokens as spelled. Raises RequestError out of range."""
        known = self._bytes.get(token)
        if known is not None:
            return known
        if not 0 <= token < len(self.vocab):
            raise RequestError(f"token id {token} is outside 0..{len(self.vocab) - 1}")
        text = self.vocab.tokens[token]
        data = text.encode("utf-8", "replace") if self.vocab.types[token] in _RAW else self._decode_token(token, text)
        self._bytes[token] = data
        return data

    def hidden(self, token: int) -> bool:
        """True for tokens that decoded text leaves out: control and unused ones (C37)."""
        return token in self.vocab.control or token in self.vocab.unused

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ``ids``; each maximal broken piece of UTF-8 becomes one U+FFFD (C36)."""
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special and self.hidden(i)))
        return data.decode("utf-8", "replace")

    def warm(self) -> None:  # noqa: B027 - optional for subclasses
        """Build now what would otherwise be built at first use."""

    @abstractmethod
    def _encode_text(self, text: str) -> Sequence[int]:
        """Ids of a non-empty text without added tokens."""

    @abstractmethod
    def _decode_token(self, token: int, text: str) -> bytes:
        """Bytes of an ordinary token spelled ``text`` in the vocabulary."""


class _Cutter:
    """Cuts text at a set of tokens: the longest that matches, at each place from left to right."""

    def __init__(self, vocab: Vocab, ids: Iterable[int]) -> None:
        spelled = {vocab.tokens[i]: i for i in sorted(ids, reverse=True) if vocab.tokens[i]}
        self._ids = spelled
        self._pattern = (
            re.compile("|".join(map(re.escape, sorted(spelled, key=len, reverse=True)))) if spelled else None
        )

    def cut(self, text: str) -> Iterator[str | int]:
        at = 0
        if self._pattern is not None:
            for match in self._pattern.finditer(text):
                if match.start() > at:
                    yield text[at : match.start()]
                yield self._ids[match.group()]
                at = match.end()
        if at < len(text):
            yield text[at:]
