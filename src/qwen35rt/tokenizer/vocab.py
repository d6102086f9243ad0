"""The vocabulary as a model file states it: tokens, their types, and the ids that have a role.

Owns the checks of ``tokenizer.ggml.*`` and the decision which tokens are control tokens and which end
a turn. Knows nothing of how text is cut into tokens, nor of any library that does it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from qwen35rt.errors import ModelFileError, UnsupportedModel

log = logging.getLogger(__name__)

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)

PREFIX = "tokenizer.ggml."
MODELS = ("gpt2", "llama")

# Tokens that a model may write and a user may type: matched in any text, never control tokens.
USER_MARKERS = frozenset(("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"))
_CONTROL_MARKERS = frozenset(
    (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
        "<|box_end|>",
        "<|quad_start|>",
        "<|quad_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<|fim_prefix|>",
        "<|fim_middle|>",
        "<|fim_suffix|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "<|audio_start|>",
        "<|audio_end|>",
        "<|audio_pad|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
    )
)
# C30: these end a turn wherever they are found, besides the ids that the file names.
_END_MARKERS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_LLAMA_IDS = {"bos": 1, "eos": 2, "unknown": 0}
_TEMPLATE_MARKER = re.compile(r"<\|[^|<>\s]{1,64}\|>")


@dataclass(frozen=True, eq=False)
class Vocab:
    """Tokens in id order and the ids with a role. ``types`` are GGUF's (1 normal ... 6 byte), corrected by B45."""

    model: str  # "gpt2" (byte-level BPE) or "llama" (SentencePiece)
    pre: str  # name of the pre-tokeniser, "" where the file has none
    tokens: Sequence[str] = field(repr=False)
    types: Sequence[int] = field(repr=False)
    merges: Sequence[str] = field(repr=False)  # "left right", best first; empty for SentencePiece
    scores: Sequence[float] = field(repr=False)  # one per token; empty for BPE
    bos: int | None
    eos: int | None
    eot: int | None
    eom: int | None
    padding: int | None
    unknown: int | None
    eog: frozenset[int]  # C30
    control: frozenset[int]  # matched only where the caller asks for it, left out of decoded text
    user_defined: frozenset[int]  # matched in any text, always spelled
    unused: frozenset[int]  # padding of the vocabulary: never matched, never sampled
    add_bos: bool
    add_space_prefix: bool

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def index(self) -> dict[str, int]:
        """Token text to id; of equal texts the lowest id."""
        n = len(self.tokens)
        return dict(zip(reversed(self.tokens), range(n - 1, -1, -1), strict=True))


def read_vocab(metadata: Mapping[str, Any]) -> Vocab:
    """Read and check the ``tokenizer.ggml.*`` keys.

    Raises ModelFileError, naming the key, for missing or inconsistent keys and UnsupportedModel for a
    tokeniser of another kind.
    """
    model = metadata.get(PREFIX + "model")
    if model is None:
        raise ModelFileError(f"{PREFIX}model is missing: the file has no tokenizer")
    if model not in MODELS:
        raise UnsupportedModel(f"{PREFIX}model is {model!r}; supported: {', '.join(MODELS)}")
    tokens = _list(metadata, "tokens", str, "texts")
    if not tokens:
        raise ModelFileError(f"{PREFIX}tokens is missing or empty")
    types = _types(metadata, len(tokens))
    ids = {name: _id(metadata, name, model, len(tokens)) for name in (*_END_KEYS, "bos", "padding", "unknown")}
    where = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))
    _correct_types(types, tokens, where, ids, str(metadata.get("tokenizer.chat_template") or ""))
    marks = _END_MARKERS if model == "gpt2" else (*_END_MARKERS, "</s>")
    eog = {ids[name] for name in _END_KEYS} | {where.get(mark) for mark in marks}
    special = [(i, kind) for i, kind in enumerate(types) if kind != NORMAL]
    vocab = Vocab(
        model=model,
        pre=str(metadata.get(PREFIX + "pre") or ""),
        tokens=tokens,
        types=types,
        merges=_merges(metadata) if model == "gpt2" else (),
        scores=_scores(metadata, len(tokens)) if model == "llama" else (),
        bos=ids["bos"],
        eos=ids["eos"],
        eot=ids["eot"],
        eom=ids["eom"],
        padding=ids["padding"],
        unknown=ids["unknown"],
        eog=frozenset(i for i in eog if i is not None),
        control=frozenset(i for i, kind in special if kind == CONTROL),
        user_defined=frozenset(i for i, kind in special if kind == USER_DEFINED),
        unused=frozenset(i for i, kind in special if kind == UNUSED),
        add_bos=bool(metadata.get(PREFIX + "add_bos_token", model == "llama")),
        add_space_prefix=bool(metadata.get(PREFIX + "add_space_prefix", model == "llama")),
    )
    vocab.__dict__["index"] = where  # what the cached property would compute
    if vocab.add_bos and vocab.bos is None:
        raise ModelFileError(f"{PREFIX}add_bos_token is true and {PREFIX}bos_token_id is missing")
    return vocab


def _list(metadata: Mapping[str, Any], name: str, kind: type, what: str) -> list[Any]:
    value = metadata.get(PREFIX + name)
    if value is None:
        return []
    if isinstance(value, str | bytes | int | float):
        raise ModelFileError(f"{PREFIX}{name} is not a list")
    values = list(value)
    if values and type(values[0]) is not kind:  # the container has one type per array
        raise ModelFileError(f"{PREFIX}{name} is not a list of {what}")
    return values


def _types(metadata: Mapping[str, Any], n: int) -> list[int]:
    types: list[int] = _list(metadata, "token_type", int, "integers") or [NORMAL] * n
    if len(types) != n:
        raise ModelFileError(f"{PREFIX}token_type has {len(types)} entries for {n} tokens")
    if not set(types) <= set(range(BYTE + 1)):
        raise ModelFileError(f"{PREFIX}token_type holds a value outside 0..{BYTE}")
    return types


def _scores(metadata: Mapping[str, Any], n: int) -> list[float]:
    scores = [float(s) for s in _list(metadata, "scores", float, "numbers")]
    if len(scores) != n:
        raise ModelFileError(f"{PREFIX}scores has {len(scores)} entries for {n} tokens")
    return scores


def _merges(metadata: Mapping[str, Any]) -> list[str]:
    merges = _list(metadata, "merges", str, "texts")
    if not merges:
        raise ModelFileError(f"{PREFIX}merges is missing or empty")
    # The GPT-2 alphabet has no blank, so exactly one separates the two parts. Counting once is ten times quicker
    # than looking at 248,000 strings; a file that gets past it fails when its merges are used.
    if " ".join(merges).count(" ") != 2 * len(merges) - 1:
        bad = next(m for m in merges if m.count(" ") != 1)
        raise ModelFileError(f"{PREFIX}merges: {bad!r} is not of the form 'left right'")
    return merges


def _id(metadata: Mapping[str, Any], name: str, model: str, n: int) -> int | None:
    key = f"{PREFIX}{name}_token_id"
    value = metadata.get(key)
    if value is None:
        default = _LLAMA_IDS.get(name) if model == "llama" else None
        return default if default is not None and default < n else None
    if type(value) is not int:
        shown = repr(value)
        raise ModelFileError(f"{key} is {shown if len(shown) <= 60 else shown[:57] + '...'}; a token id is needed")
    if not 0 <= value < n:
        raise ModelFileError(f"{key} is {value}, outside 0..{n - 1}")
    return value


def _correct_types(
    types: list[int],
    tokens: Sequence[str],
    where: Mapping[str, int],
    ids: Mapping[str, int | None],
    template: str,
) -> None:
    """B45: a marker stored as an ordinary token would be cut to pieces in a prompt and printed in an answer."""
    named = [ids[name] for name in ("eos", "eot", "eom")]
    spelled = (where.get(mark) for mark in _CONTROL_MARKERS.union(_TEMPLATE_MARKER.findall(template)))
    wrong = sorted(
        {
            i
            for i in (*named, *spelled)
            if i is not None and types[i] in (UNDEFINED, NORMAL, USER_DEFINED) and tokens[i] not in USER_MARKERS
        }
    )
    if wrong:
        log.warning(
            "%stoken_type stores markers as ordinary tokens; treated as control tokens: %s",
            PREFIX,
            ", ".join(f"{i} {tokens[i]!r}" for i in wrong),
        )
    for i in wrong:
        types[i] = CONTROL
