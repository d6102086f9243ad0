"""Every flag of the server as one frozen object. Knows where values come from; nothing of what they do."""

from __future__ import annotations

import dataclasses
import ipaddress
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

import msgspec

from ..config import (
    ENGINE,
    SAMPLING,
    SAMPLING_LIMITS,
    SERVER,
    SERVER_LIMITS,
    SamplingLimits,
    server_environment,
)
from ..errors import ConfigError, RequestError

SAMPLING_FIELDS = tuple(f.name for f in dataclasses.fields(SAMPLING))  # those that a request and a flag can set


@dataclass(frozen=True)
class ServerSettings:
    """A field ``max_body`` is the flag ``--max-body``, the variable QWEN35RT_MAX_BODY and the config file's key
    ``max-body`` or ``max_body``. Times are in seconds, sizes in bytes unless the name says otherwise."""

    # The model and the engine's sizes; None: decided when the model is loaded.
    model: str | None = None
    hf_repo: str | None = None  # USER/REPO or USER/REPO:QUANT, in place of a model
    hf_file: str | None = None
    alias: tuple[str, ...] = ()  # the first is the model's id
    device: Literal["auto", "cpu", "cuda", "reference"] = "auto"
    n_gpu_layers: int | Literal["all"] = -1  # layers on the GPU; -1: all
    threads: int | None = None
    isa: str | None = None
    ctx_size: int | None = None
    parallel: int = ENGINE.parallel
    batch_size: int = ENGINE.n_batch
    kv_dtype: Literal["f16", "f32"] = "f16"
    cache_ram: int | None = None  # MiB of kept states and pages; 0: reuse is off, None: a quarter of free memory
    queue: int | None = None  # waiting requests; None: max(64, 4 x parallel)

    # Where it listens and who may ask.
    host: str = SERVER.host
    port: int = SERVER.port
    metrics_port: int | None = None
    ssl_cert_file: str | None = None
    ssl_key_file: str | None = None
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    allow_unauthenticated: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()

    # Times.
    sse_ping: float = SERVER.sse_ping
    first_event: float = SERVER.first_event
    write_timeout: float = SERVER.write_timeout
    request_timeout: float = SERVER.request_timeout
    body_timeout: float = SERVER.body_timeout
    keep_alive: float = SERVER.keep_alive
    shutdown_timeout: float = SERVER.shutdown_timeout

    # Limits.
    max_body: int = SERVER_LIMITS.body_bytes
    max_header: int = SERVER_LIMITS.header_bytes
    max_headers: int = SERVER_LIMITS.header_fields
    max_json_depth: int = SERVER_LIMITS.json_depth
    max_messages: int = SERVER_LIMITS.messages
    max_tools: int = SERVER_LIMITS.tools
    max_prompts: int = SERVER_LIMITS.prompts
    max_stops: int = SAMPLING_LIMITS.max_stops
    max_stop_token_ids: int = SAMPLING_LIMITS.max_stop_token_ids
    max_logit_bias: int = SAMPLING_LIMITS.max_biases
    max_logprobs: int = SAMPLING_LIMITS.max_logprobs
    max_open: int = SERVER_LIMITS.open_requests
    max_stream_buffer: int = SERVER_LIMITS.stream_bytes

    # What requests mean.
    strict_model: bool = False
    strict_fields: bool = False
    max_tokens_default: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    sampling_preset: Literal["general", "precise", "reasoning", "off"] | None = None
    chat_template: str | None = None
    chat_template_file: str | None = None
    allow_request_template: bool = False
    late_system: Literal["user", "merge", "error"] = "user"
    reasoning: Literal["on", "off", "auto"] = "auto"
    reasoning_budget: int = -1
    reasoning_budget_message: str = ""
    reasoning_field: Literal["both", "reasoning_content", "reasoning", "none"] = "both"

    # What it tells.
    no_slots: bool = False
    metrics_compat: tuple[Literal["vllm", "llamacpp"], ...] = ()
    log_jsonl: str | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling fields that a flag sets: they stand before the model file's (C10)."""
        return {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}

    @property
    def sampling_limits(self) -> SamplingLimits:
        """What the sampling fields of a request may hold."""
        return dataclasses.replace(
            SAMPLING_LIMITS,
            max_stops=self.max_stops,
            max_stop_token_ids=self.max_stop_token_ids,
            max_biases=self.max_logit_bias,
            max_logprobs=self.max_logprobs,
        )

    @property
    def queue_places(self) -> int:
        """Requests that may wait beside those that run."""
        return max(ENGINE.queue, SERVER.queue_per_slot * self.parallel) if self.queue is None else self.queue

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    def keys(self) -> frozenset[str]:
        """All API keys. Raises ConfigError for a key file that cannot be read, and where only empty ones are named."""
        found = {key.strip() for key in self.api_key}
        if self.api_key_file is not None:
            try:
                found |= {line.strip() for line in Path(self.api_key_file).read_text(encoding="utf-8").splitlines()}
            except (OSError, UnicodeDecodeError) as e:
                raise ConfigError(f"--api-key-file {self.api_key_file}: {e}") from None
        found.discard("")
        if not found and (self.api_key or self.api_key_file is not None):
            # Whoever names keys does not mean a server that needs none.
            raise ConfigError("--api-key and --api-key-file hold no key; give one, or leave them out")
        return frozenset(found)


def is_loopback(host: str) -> bool:
    """Whether an address or a name of one means this machine only."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def read_settings(
    flags: Mapping[str, Any], config: str | None = None, environment: Mapping[str, str] | None = None
) -> ServerSettings:
    """Flag, else environment, else config file, else default.

    ``flags``: those given, by field name; None counts as absent. ``config``: path of a TOML file. ``environment``:
    variables in place of the process's own. Raises ConfigError naming the source and the setting.
    """
    names = [f.name for f in dataclasses.fields(ServerSettings)]
    found = server_environment(names) if environment is None else server_environment(names, environment)
    values: dict[str, Any] = {}
    for source, given in (
        ("config file", _read_file(config)),
        ("environment", found),
        ("flag", {k: v for k, v in flags.items() if v is not None}),
    ):
        values |= _convert(given, names, source)
    settings = ServerSettings(**values)
    _check(settings)
    return settings


def _read_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"--config {path}: {e}") from None
    return {name.replace("-", "_"): value for name, value in table.items()}


def _convert(given: Mapping[str, Any], names: Iterable[str], source: str) -> dict[str, Any]:
    """Values of their field's type; texts of the environment are read as that type, lists are split at commas."""
    types = get_type_hints(ServerSettings)
    values = {}
    for name, value in given.items():
        if name not in names:
            raise ConfigError(f"{source}: there is no setting '{name}'")
        if isinstance(value, str) and getattr(types[name], "__origin__", None) is tuple:
            value = [part.strip() for part in value.split(",") if part.strip()]
        try:
            values[name] = msgspec.convert(value, types[name], strict=source != "environment")
        except msgspec.ValidationError as e:
            raise ConfigError(f"{source}: {name.replace('_', '-')}: {e}") from None
    return values


def _check(settings: ServerSettings) -> None:
    """Raise ConfigError for values that cannot be used."""
    smallest = {
        "n_gpu_layers": -1,
        "threads": 1,
        "ctx_size": 0,
        "parallel": 1,
        "batch_size": 1,
        "cache_ram": 0,
        "queue": 0,
        "port": 0,
        "max_tokens_default": 0,
        "reasoning_budget": -1,
    }
    smallest |= {
        f.name: 1 for f in dataclasses.fields(settings) if f.name.startswith("max_") and f.name not in smallest
    }
    smallest |= {f.name: 0 for f in dataclasses.fields(settings) if f.name.endswith("_timeout")}
    smallest |= {"sse_ping": 0, "first_event": 0, "keep_alive": 0}
    for name, low in smallest.items():
        value = getattr(settings, name)
        if isinstance(value, int | float) and not value >= low:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; at least {low} is needed")
    if settings.sampling:
        from ..engine.sampler import SamplingParams  # imports numpy, which a server should not wait for

        try:
            SamplingParams(**(dataclasses.asdict(SAMPLING) | settings.sampling)).validate(1)
        except RequestError as e:
            raise ConfigError(f"--{e}") from None
    if (settings.ssl_cert_file is None) != (settings.ssl_key_file is None):
        raise ConfigError("--ssl-cert-file and --ssl-key-file go together")
    if not settings.loopback and not settings.keys() and not settings.allow_unauthenticated:
        raise ConfigError(
            f"--host {settings.host} can be reached from other machines: give --api-key, or --allow-unauthenticated"
        )
