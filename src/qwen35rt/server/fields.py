"""Fields that all generating endpoints share: their types, ranges, second names, and those of later stages (C7)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from ..config import SAMPLING_LIMITS, SamplingLimits
from ..engine.sampler import SamplingParams
from ..errors import RequestError
from .body import Fields, neutral
from .errors import UnsupportedParameter
from .settings import SAMPLING_FIELDS


class StreamOptions(msgspec.Struct):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # S2


class ResponseFormat(msgspec.Struct):
    """``response_format``; only plain text until structured output is built."""

    type: str
    json_schema: Any = None  # S2, as is the next
    schema: Any = None


class SamplingRequest(msgspec.Struct, kw_only=True):
    """Fields that all generating endpoints share. Types only: ranges are checked where the values mean something."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Any] | list[Any] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    skip_special_tokens: bool = True
    cache_prompt: bool | None = None
    return_token_ids: bool = False
    timings_per_token: bool = False

    def sampling(self, limits: SamplingLimits) -> dict[str, Any]:
        """Fields for ``sampling_params``: those that are given."""
        names = (*SAMPLING_FIELDS, "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        for name in ("top_k", "repeat_last_n"):
            if name in given:  # beyond this the value says the same and no C integer holds it
                given[name] = min(given[name], SAMPLING_LIMITS.max_tokens)
        if isinstance(self.stop, str):
            given["stop"] = [self.stop]
        if self.logit_bias is not None:
            given["logit_bias"] = read_bias(self.logit_bias, limits.max_biases)
        return given


LATER = {
    "grammar": neutral(""),
    "json_schema": neutral(),
    "structured_outputs": neutral(),
    "samplers": neutral(),
    "sampler_order": neutral("", "llama"),
    "penalty_scope": neutral("llama"),
    "typical_p": neutral(1),
    "top_n_sigma": neutral(0, -1),
    "dry_multiplier": neutral(0),
    "dry_base": neutral(1.75),
    "dry_allowed_length": neutral(2),
    "dry_penalty_last_n": neutral(0, -1),
    "dry_sequence_breakers": neutral(["\n", ":", '"', "*"]),
    "xtc_probability": neutral(0),
    "xtc_threshold": neutral(0.1),
    "n_probs": neutral(0),
    "min_keep": neutral(0, 1),
    "allowed_token_ids": neutral(),
    "bad_words": neutral(),
    "truncate_prompt_tokens": neutral(-1),
    "prompt_logprobs": neutral(),
    "post_sampling_probs": neutral(False),
    "return_progress": neutral(False),
    "t_max_predict_ms": neutral(0, -1),
    "priority": neutral(0),
    "cache_salt": neutral(""),
    "n": neutral(1),
    "best_of": neutral(1),
    "suffix": neutral(""),
    "lora": neutral(),
    "mirostat": neutral(0),
    "mirostat_tau": neutral(5),
    "mirostat_eta": neutral(0.1),
    "dynatemp_range": neutral(0),
    "dynatemp_exponent": neutral(1),
}
SECOND = {
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
INERT = frozenset(("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"))
FIELDS = Fields(LATER, SECOND, INERT)


@contextmanager
def named_as_sent(names: Mapping[str, str]) -> Iterator[None]:
    """Faults raised inside carry the name that the client used for a field. ``names``: first name -> that one."""
    try:
        yield
    except RequestError as e:
        e.param = names.get(e.param or "", e.param)
        raise


def check_common(request: SamplingRequest, names: Mapping[str, str], limits: SamplingLimits) -> None:
    """Ranges that no vocabulary is needed for; faults carry the name that the client used."""
    with named_as_sent(names):
        _check_common(request, names, limits)


def _check_common(request: SamplingRequest, names: Mapping[str, str], limits: SamplingLimits) -> None:
    most = SAMPLING_LIMITS.max_tokens
    asked, low = request.max_tokens, -1 if names.get("max_tokens") == "n_predict" else 0
    if asked is not None and not low <= asked <= most:
        name = names.get("max_tokens", "max_tokens")
        raise RequestError(f"{name} must be an integer from {low} to {most}", "max_tokens")
    if request.min_tokens is not None and asked is not None and 0 <= asked < request.min_tokens:
        raise RequestError("min_tokens is larger than max_tokens", "min_tokens")
    options = request.stream_options
    if options is not None:
        if not request.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        if options.continuous_usage_stats:
            name = "stream_options.continuous_usage_stats"
            raise UnsupportedParameter(f"{name} is not supported by this server", name)
    form = request.response_format
    if form is not None and (form.type != "text" or form.json_schema is not None or form.schema is not None):
        raise UnsupportedParameter("response_format other than text is not supported by this server", "response_format")
    params: dict[str, Any] = request.sampling(limits)
    SamplingParams(**params).validate(most, limits)


def read_bias(given: dict[str, Any] | list[Any], most: int) -> dict[int, Any]:
    """Token id -> bias, from either form, at most so many; values are checked later."""
    pairs = list(given.items()) if isinstance(given, dict) else given
    if len(pairs) > most:
        raise RequestError(f"logit_bias must have at most {most} entries", "logit_bias")
    biases: dict[int, Any] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RequestError("logit_bias must be a map of ids to biases or a list of [id, bias]", "logit_bias")
        token, bias = pair
        if isinstance(token, str) and token.isdecimal() and token.isascii() and len(token) <= 10:
            token = int(token)
        biases[token if isinstance(token, int) else -1] = bias
    return biases
