"""A text made into chunks of token ids, as perplexity and importance matrices need it. Knows no model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..config import EVALUATION
from ..errors import ConfigError
from ..tokenizer import Tokenizer

Ids = npt.NDArray[np.int32]


def read_text(path: str) -> str:
    """A UTF-8 file, or standard input for "-". Line ends stay as they are. Raises ConfigError."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as e:
        raise ConfigError(f"-f {path}: {e.strerror or e}") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"-f {path}: not a UTF-8 text, byte {e.start} is {data[e.start]:#04x}") from None


def cut_text(tokenizer: Tokenizer, text: str, n_ctx: int, limit: int | None = None) -> Ids:
    """-> ids int32 [chunks, n_ctx]: the text encoded once and cut; a rest shorter than a chunk is left out.

    Where the model wants a BOS token, the text begins with it and it takes the place of the first token of every chunk.
    ``limit``: chunks at most. Raises ConfigError for a text of less than two chunks: its figures would mean little.
    """
    if n_ctx < EVALUATION.min_ctx:
        raise ConfigError(f"chunks of {n_ctx} tokens; at least {EVALUATION.min_ctx} are needed (-c)")
    if limit is not None and limit < 1:
        raise ConfigError(f"{limit} chunks are asked for; at least 1 is needed (--chunks)")
    vocab = tokenizer.vocab
    bos = vocab.bos if vocab.add_bos else None
    ids = tokenizer.encode(text)
    if bos is not None:
        ids = [bos, *ids]
    if len(ids) < 2 * n_ctx:
        fitting = len(ids) // 2
        remedy = f"use -c {fitting} or less, or " if fitting >= EVALUATION.min_ctx else ""
        raise ConfigError(
            f"the text has {len(ids)} tokens and at least {2 * n_ctx} are needed for chunks of {n_ctx}; "
            f"{remedy}give a longer text"
        )
    count = min(len(ids) // n_ctx, limit or len(ids))
    chunks = np.array(ids[: count * n_ctx], np.int32).reshape(count, n_ctx)
    if bos is not None:
        chunks[:, 0] = bos
    return chunks
