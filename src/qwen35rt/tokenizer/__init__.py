"""Text in and out: vocabulary, encoding, incremental decoding, chat templates.

Importing this package loads none of the libraries behind it; they are loaded at first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen35rt.tokenizer.base import Tokenizer
from qwen35rt.tokenizer.bpe import BpeTokenizer
from qwen35rt.tokenizer.chat import ChatTemplate, read_chat_template
from qwen35rt.tokenizer.detok import Detokenizer
from qwen35rt.tokenizer.spm import SpmTokenizer
from qwen35rt.tokenizer.vocab import Vocab, read_vocab

__all__ = ["ChatTemplate", "Detokenizer", "Tokenizer", "Vocab", "build_tokenizer", "read_chat_template", "read_vocab"]


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokeniser that a model file's ``tokenizer.ggml.*`` keys describe.

    Raises ModelFileError naming the key at fault, or UnsupportedModel for another kind of tokeniser.
    """
    vocab = read_vocab(metadata)
    return BpeTokenizer(vocab) if vocab.model == "gpt2" else SpmTokenizer(vocab)
