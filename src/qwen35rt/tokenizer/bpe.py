"""Byte-level BPE of the ``gpt2`` model with the Qwen pre-tokenisers.

Two encoders give the same ids: the ``tokenizers`` model, whose construction from a 248,320-token
vocabulary takes most of a second, and a plain one over the merge ranks, ready at once and slow for long
text. The plain one serves until more text has come than building the other is worth.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from qwen35rt.config import TOKENIZER
from qwen35rt.errors import ModelFileError, UnsupportedModel
from qwen35rt.tokenizer.base import Tokenizer
from qwen35rt.tokenizer.vocab import PREFIX, Vocab

if TYPE_CHECKING:
    import tokenizers

# Words of an apostrophe, letters, digits, symbols with their line ends, white space. Qwen3.5 counts combining
# marks as letters; Qwen2 does not.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letter}]+|\p{{N}}| ?[^\s{letter}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "qwen35": _PATTERN.format(letter=r"\p{L}\p{M}"),
    "qwen2": _PATTERN.format(letter=r"\p{L}"),
}


def _byte_chars() -> list[str]:
    """GPT-2's printable character of each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(0x100)]


_CHARS = _byte_chars()
_TO_CHARS = dict(enumerate(_CHARS))
_TO_BYTES = {ord(c): b for b, c in enumerate(_CHARS)}


class BpeTokenizer(Tokenizer):
    """Raises UnsupportedModel for an unknown pre-tokeniser and ModelFileError for an unusable vocabulary."""

    def __init__(self, vocab: Vocab) -> None:
        super().__init__(vocab)
        if vocab.pre not in PATTERNS:
            raise UnsupportedModel(f"{PREFIX}pre is {vocab.pre!r}; supported: {', '.join(PATTERNS)}")
        if missing := [b for b, c in enumerate(_CHARS) if c not in vocab.index]:
            raise ModelFileError(f"{PREFIX}tokens lacks the token of byte 0x{missing[0]:02x}")
        self._build_lock = threading.Lock()
        self._plain_lock = threading.Lock()
        self._plain: _PlainBpe | None = None
        self._full: tokenizers.Tokenizer | None = None
        self._plain_chars = 0

    def warm(self) -> None:
        """Build the encoder for long text: most of a second, in which short texts are still served."""
        with self._build_lock:
            if self._full is None:
                self._full = _build_full(self.vocab)
        with self._plain_lock:
            self._plain = None

    def _encode_text(self, text: str) -> list[int]:
        if self._full is None:
            ids = self._encode_plain(text)
            if ids is not None:
                return ids
            self.warm()
        assert self._full is not None
        # The batch call is the one that computes no offsets: 1.6 times as fast.
        return self._full.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode_plain(self, text: str) -> list[int] | None:
        with self._plain_lock:
            if self._plain_chars + len(text) > TOKENIZER.plain_chars:
                return None
            self._plain_chars += len(text)
            self._plain = self._plain or _PlainBpe(self.vocab)
            return self._plain.encode(text)

    def _decode_token(self, token: int, text: str) -> bytes:
        try:
            return bytes(_TO_BYTES[ord(c)] for c in text)
        except KeyError:  # not in the alphabet: an added token that the file stores as a normal one
            return text.encode("utf-8", "replace")


def _build_full(vocab: Vocab) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    merges: list[tuple[str, str]] = [tuple(m.split(" ")) for m in vocab.merges]  # type: ignore[misc]
    try:
        model = models.BPE(vocab.index, merges)
    except Exception as e:  # the library raises plain Exception with its reason
        raise ModelFileError(f"{PREFIX}merges and {PREFIX}tokens do not fit: {e}") from None
    full = Tokenizer(model)
    full.normalizer = normalizers.NFC()
    full.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[vocab.pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return full


class _PlainBpe:
    """BPE by merge rank over the pre-tokeniser's words; quadratic in the length of a word, not thread-safe."""

    def __init__(self, vocab: Vocab) -> None:
        from tokenizers import Regex, normalizers, pre_tokenizers

        self._index = vocab.index
        self._ranks = dict(zip(vocab.merges, range(len(vocab.merges)), strict=True))
        self._normalizer = normalizers.NFC()
        self._words = pre_tokenizers.Split(Regex(PATTERNS[vocab.pre]), "isolated")
        self._word = lru_cache(maxsize=4096)(self._encode_word)

    def encode(self, text: str) -> list[int] | None:
        """Ids of ``text``; None if it has a word too long for this encoder."""
        normal = self._normalizer.normalize_str(text)
        words = [word.encode() for word, _ in self._words.pre_tokenize_str(normal)]
        if max(map(len, words), default=0) > TOKENIZER.plain_word_bytes:
            return None
        return [i for word in words for i in self._word(word)]

    def _encode_word(self, word: bytes) -> tuple[int, ...]:
        parts = list(word.decode("latin-1").translate(_TO_CHARS))
        never = len(self._ranks)
        while len(parts) > 1:
            ranks = [self._ranks.get(f"{a} {b}", never) for a, b in pairwise(parts)]
            best = min(ranks)
            if best == never:
                break
            at = ranks.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        try:
            return tuple(self._index[part] for part in parts)
        except KeyError as e:
            raise ModelFileError(f"{PREFIX}merges makes {e.args[0]!r}, which is not in {PREFIX}tokens") from None
