"""Every limit, default and environment name of the package. Nothing else reads the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


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
    top_k_on_device: int = 256  # largest logits that leave the GPU: top_k up to half, penalties may touch the others
    keep_every: int = 1_024  # tokens of a long prompt after which its state is kept for later prompts
    prefill_rows_beside_decode: int = 256  # rows of prompts in a step in which others decode
    cache_states: int = 4  # states that a Model keeps for later prompts, with the pages of one context
    max_cache_states: int = 256  # states that any cache keeps at most
    keep_messages: int = 4  # last messages of a conversation behind which the state is kept
    keep_least: int = 32  # tokens of a system prompt from which on its state is kept
    parallel: int = 4  # turns that run at once in a server
    queue: int = 64  # requests that wait for a place at most
    max_restarts: int = 3  # after faults of a backend, within ...
    restart_window: int = 600  # ... so many seconds


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
class SamplingRow:
    """One row of the values that are published for the model family: for general work in thinking."""

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 20
    min_p: float = 0.0
    presence_penalty: float = 1.5
    repetition_penalty: float = 1.0


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
class EvaluationDefaults:
    """Sizes of perplexity, KL divergence and importance matrices."""

    n_ctx: int = 512  # tokens of a chunk
    min_ctx: int = 4  # the shortest chunk that has something to score
    base_exact: int = 256  # most likely tokens of a position that a KL base keeps as float32
    workspace_bytes: int = 1_073_741_824  # of an importance matrix's steps, where no batch size is named


@dataclass(frozen=True)
class ServerDefaults:
    """Settings of the HTTP server where neither flag, environment nor config file gives one. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8_080
    queue_per_slot: int = 4  # waiting requests, if that is more than the engine's own number
    sse_ping: float = 15.0  # silence in a stream after which a comment is sent; 0: never
    first_event: float = 15.0  # a stream's status line waits so long for the first event
    write_timeout: float = 60.0  # a client that does not read for so long is given up
    request_timeout: float = 3_600.0
    body_timeout: float = 60.0
    keep_alive: float = 5.0  # idle connections and slow headers
    shutdown_timeout: float = 30.0
    backlog: int = 2_048  # connections that wait to be accepted
    descriptors: int = 65_536  # that the process asks the system for
    collector: int = 50_000  # new objects after which Python's collector of cycles comes
    keep_alive_requests: int = 10_000  # of one connection
    tls_handshake: float = 10.0
    end_timeout: float = 0.8  # streams that are ended at a shutdown may write their last chunk for so long
    exit_timeout: float = 3.0  # then the process ends, whatever still runs
    cache_share: int = 4  # kept states and pages take at most free memory divided by this
    short_body: int = 64 << 10  # bytes; longer bodies are worked on in a thread of their own


@dataclass(frozen=True)
class ServerLimits:
    """What one request and one client may take; beyond them a request is refused."""

    body_bytes: int = 32 << 20
    bodies_bytes: int = 256 << 20  # of all bodies that are being received, together; at least the largest one
    header_bytes: int = 16 << 10
    header_fields: int = 100
    json_depth: int = 64
    messages: int = 4_096
    tools: int = 128
    prompts: int = 1_024
    open_requests: int = 4_096
    stream_bytes: int = 256 << 10  # of a stream that its client has not read yet
    error_bytes: int = 2_048  # of an error's message
    ignored_names: int = 16  # in the header x-ignored-fields
    ignored_name_chars: int = 64
    request_id_chars: int = 128
    max_retry_after: int = 120  # seconds
    normal_shrink: int = 4  # bytes of a text are at most so many times those of its NFC form


@dataclass(frozen=True)
class ConvertLimits:
    """Work of ``qwen35rt convert``."""

    piece_bytes: int = 16 << 20  # of float32 that a tensor is read and written in
    max_json_bytes: int = 256 << 20  # of a JSON file of a checkpoint, and of the header of a shard


@dataclass(frozen=True)
class Environment:
    """The QWEN35RT_* variables, read once by ``environment()``."""

    isa: str | None  # QWEN35RT_ISA: scalar, avx2, avx512, avx512bf16, neon
    threads: str | None  # QWEN35RT_THREADS: threads of the CPU backend
    n_gpu_layers: str | None  # QWEN35RT_N_GPU_LAYERS: layers for the GPU, "all" or -1: all of them
    oracle: str | None  # QWEN35RT_ORACLE: folder of the oracle files (tests only)
    wheel: str | None  # QWEN35RT_WHEEL: a wheel to test in place of a fresh one (tests only)


FILE_LIMITS = FileLimits()
ENGINE = EngineDefaults()
TEMPLATE = TemplateLimits()
TOKENIZER = TokenizerLimits()
EVALUATION = EvaluationDefaults()
TOOLS = ToolLimits()
SAMPLING = SamplingDefaults()
SAMPLING_LIMITS = SamplingLimits()
CONVERT = ConvertLimits()

_ANSWERING = SamplingRow(temperature=0.7, top_p=0.8)
# Preset of a chat -> row for prompts that end inside reasoning, row for others. "off" has none.
CHAT_SAMPLING: Mapping[str, tuple[SamplingRow, SamplingRow]] = {
    "general": (SamplingRow(), _ANSWERING),
    "precise": (SamplingRow(temperature=0.6, presence_penalty=0.0), _ANSWERING),
    "reasoning": (SamplingRow(), SamplingRow(top_p=1.0, top_k=40, presence_penalty=2.0)),
}

SERVER = ServerDefaults()
SERVER_LIMITS = ServerLimits()


def environment(source: Mapping[str, str] = os.environ) -> Environment:
    """Read the QWEN35RT_* variables; empty values count as absent."""

    def get(name: str) -> str | None:
        return source.get(f"QWEN35RT_{name}") or None

    return Environment(
        isa=get("ISA"),
        threads=get("THREADS"),
        n_gpu_layers=get("N_GPU_LAYERS"),
        oracle=get("ORACLE"),
        wheel=get("WHEEL"),
    )


def server_environment(names: Iterable[str], source: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Flags of the server that are set as QWEN35RT_<FLAG>; empty values count as absent."""
    return {name: value for name in names if (value := source.get(f"QWEN35RT_{name.upper()}"))}
