"""SentencePiece vocabularies (the ``llama`` model) through the ``sentencepiece`` library.

The library wants a model file; a GGUF file holds its parts, so the message is written here from them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from typing import Any

from qwen35rt.errors import ModelFileError
from qwen35rt.tokenizer.base import Tokenizer
from qwen35rt.tokenizer.vocab import BYTE, NORMAL, PREFIX, UNDEFINED, UNKNOWN, Vocab

_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_BPE = 2  # TrainerSpec.ModelType


class SpmTokenizer(Tokenizer):
    """Raises ModelFileError for a vocabulary that the library refuses."""

    def __init__(self, vocab: Vocab) -> None:
        super().__init__(vocab)
        self._processor: Any = None

    def warm(self) -> None:
        if self._processor is None:
            import sentencepiece

            try:
                self._processor = sentencepiece.SentencePieceProcessor(model_proto=_model_proto(self.vocab))
            except RuntimeError as e:
                raise ModelFileError(f"{PREFIX}tokens is no usable SentencePiece vocabulary: {e}") from None

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of a whole prompt: without the blank that encoding put in front."""
        text = super().decode(ids, skip_special)
        return text.removeprefix(" ") if self.vocab.add_space_prefix else text

    def _encode_text(self, text: str) -> list[int]:
        self.warm()
        # Every piece between added tokens gets the blank, as at the start of a text.
        ids: list[int] = self._processor.encode((" " if self.vocab.add_space_prefix else "") + text)
        return ids

    def _decode_token(self, token: int, text: str) -> bytes:
        if self.vocab.types[token] == BYTE:
            return bytes([_byte_value(text)])
        return text.replace(_BLANK, " ").encode("utf-8", "replace")


def _byte_value(text: str) -> int:
    match = _BYTE_TOKEN.fullmatch(text)
    if match is None:
        raise ModelFileError(f"{PREFIX}tokens: {text!r} is marked as a byte and is not of the form '<0xNN>'")
    return int(match.group(1), 16)


def _model_proto(vocab: Vocab) -> bytes:
    """A ModelProto message: pieces (1), trainer_spec (2), normalizer_spec (3)."""
    types = list(vocab.types)
    if vocab.unknown is not None:
        types[vocab.unknown] = UNKNOWN  # the library wants exactly one
    pieces = [
        _message(
            1,
            _string(1, token) + b"\x15" + struct.pack("<f", score) + _integer(3, kind if kind != UNDEFINED else NORMAL),
        )
        for token, score, kind in zip(vocab.tokens, vocab.scores, types, strict=True)
    ]
    absent = (1 << 64) - 1  # -1
    trainer = _integer(3, _BPE) + _integer(35, int(BYTE in types))
    for number, token in ((40, vocab.unknown), (41, vocab.bos), (42, vocab.eos), (43, vocab.padding)):
        trainer += _integer(number, absent if token is None else token)
    # No blank in front (done by the caller), blanks kept as they are, blanks written as the block character.
    normalizer = _string(1, "identity") + _integer(3, 0) + _integer(4, 0) + _integer(5, 1)
    return b"".join(pieces) + _message(2, trainer) + _message(3, normalizer)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _message(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _string(number: int, text: str) -> bytes:
    return _message(number, text.encode("utf-8", "replace"))
