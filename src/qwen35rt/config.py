"""Every limit, default and environment name of the package. Nothing else reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileLimits:
    """What a GGUF file may state before it is refused. All are far above any real file."""

    max_keys: int = 65_536
    max_tensors: int = 1_000_000
    max_name_bytes: int = 65_535
    max_dims: int = 4
    max_splits: int = 1_024
    min_alignment: int = 8  # bytes
    max_alignment: int = 1 << 20
    max_blocks: int = 4_096  # layers
    max_width: int = 1 << 24  # any one dimension that metadata states: heads, columns, experts, vocabulary


@dataclass(frozen=True)
class EngineDefaults:
    """Sizes of the engine where neither caller nor file gives one."""

    n_ctx: int = 4_096  # tokens of one sequence when the caller names none
    n_batch: int = 512  # rows of one step: a prefill slice
    page_tokens: int = 64  # tokens of one KV page
    max_tokens: int = 256
    logits_rows: int = 64  # rows of one step whose logits can be asked for


@dataclass(frozen=True)
class TemplateLimits:
    """Work that a chat template may do."""

    fuel: int = 2_000_000  # minijinja instructions
    max_output_bytes: int = 4 << 20
    max_depth: int = 128  # of lists and objects in messages, tools and other variables


@dataclass(frozen=True)
class TokenizerLimits:
    """How much text the plain BPE encoder takes before the one that is slow to build replaces it."""

    plain_chars: int = 8_192  # of all texts together
    plain_word_bytes: int = 128  # of one pre-tokeniser word: its work is quadratic in this


@dataclass(frozen=True)
class ToolLimits:
    """How far a tool's schema is followed and how long the names in a call may be."""

    schema_depth: int = 32  # of references and alternatives that lead to a parameter's type
    name_chars: int = 256  # of a function or parameter in a tag; a longer one is no tag
    tag_gap: int = 16  # blanks between two closing tags that end a value without its own


@dataclass(frozen=True)
class SamplingDefaults:
    """Values of sampling fields where neither request, server flag nor model file gives one."""

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    repeat_last_n: int = 64


@dataclass(frozen=True)
class SamplingLimits:
    """Legal values of sampling fields; outside them a request is refused by name."""

    max_temperature: float = 2.0
    max_penalty: float = 2.0  # presence and frequency, either sign
    max_repetition_penalty: float = 10.0
    max_bias: float = 100.0
    max_biases: int = 1_024
    max_stops: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 128
    max_logprobs: int = 20
    max_tokens: int = 2**31 - 1
    max_seed: int = 2**63 - 1
    fresh_seed_bits: int = 53  # a drawn seed passes unchanged through JSON numbers


@dataclass(frozen=True)
class Environment:
    """The QWEN35RT_* variables, read once by ``environment()``."""

    isa: str | None  # QWEN35RT_ISA: scalar, avx2, avx512, avx512bf16, neon
    threads: str | None  # QWEN35RT_THREADS: threads of the CPU backend
    oracle: str | None  # QWEN35RT_ORACLE: folder of the oracle files (tests only)
    cache: str | None  # QWEN35RT_CACHE: where the built example model is kept
    wheel: str | None  # QWEN35RT_WHEEL: a wheel to test in place of a fresh one (tests only)


FILE_LIMITS = FileLimits()
ENGINE = EngineDefaults()
TEMPLATE = TemplateLimits()
TOKENIZER = TokenizerLimits()
TOOLS = ToolLimits()
SAMPLING = SamplingDefaults()
SAMPLING_LIMITS = SamplingLimits()


def environment(source: Mapping[str, str] = os.environ) -> Environment:
    """Read the QWEN35RT_* variables; empty values count as absent."""

    def get(name: str) -> str | None:
        return source.get(f"QWEN35RT_{name}") or None

    return Environment(
        isa=get("ISA"), threads=get("THREADS"), oracle=get("ORACLE"), cache=get("CACHE"), wheel=get("WHEEL")
    )


def cache_dir(source: Mapping[str, str] = os.environ) -> Path:
    """QWEN35RT_CACHE, else the platform's cache folder. Not created here."""
    own = environment(source).cache
    if own:
        return Path(own)
    base = source.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qwen35rt"
