"""A request, validated, tokenised and budgeted before any state is touched. Pure functions; knows no JSON."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .config import ENGINE, SAMPLING_LIMITS, SamplingLimits
from .engine.sampler import SamplingParams, fresh_seed
from .errors import ContextLengthExceeded, RequestError

log = logging.getLogger(__name__)

# Names that callers may also use -> names of SamplingParams.
_ALIASES = {"repeat_penalty": "repetition_penalty"}
# general.sampling.* of a model file -> names of SamplingParams (C10).
_FILE_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "repeat_last_n",
}
SAMPLING_FIELDS = frozenset(f.name for f in fields(SamplingParams)) | set(_ALIASES)


@dataclass(frozen=True)
class Markup:
    """The tags of a chat answer, as token ids; None where the vocabulary has no such token.

    Stop strings act outside reasoning and calls only. ``reasoning``: the prompt ends inside reasoning. ``budget``:
    tokens of reasoning after which the ids ``closing`` are written, -1: no bound. ``one_call``: the answer ends behind
    its first call.
    """

    reasoning: bool = False
    think: int | None = None
    think_end: int | None = None
    call: int | None = None
    call_end: int | None = None
    budget: int = -1
    closing: tuple[int, ...] = ()
    one_call: bool = False


@dataclass(frozen=True)
class Plan:
    """A turn that can run: every limit is checked and the seed is fixed.

    ``budget``: tokens to generate at most (C20). ``keep_at``: positions in the prompt, rising, whose state is worth
    keeping since later prompts are likely to share the tokens before it. ``choice``: which answer to the prompt this
    is; the random number of a token depends on seed, choice and position only (C27). ``prompt_logprobs``: those of
    the prompt's tokens are wanted too. ``timings``: so are those of each part of the answer. ``warm``: the prompt is
    computed even if nothing is to be generated, so that its state is kept (C22). ``banned``: ids that are never drawn.
    """

    ids: tuple[int, ...]
    budget: int
    params: SamplingParams
    seed: int
    include_stop: bool = False
    skip_special: bool = True
    cache: bool = True
    keep_at: tuple[int, ...] = ()
    choice: int = 0
    prompt_logprobs: bool = False
    timings: bool = False
    warm: bool = False
    banned: frozenset[int] = frozenset()
    markup: Markup | None = None


def sampling_params(
    given: Mapping[str, Any], file: Mapping[str, Any], n_vocab: int, limits: SamplingLimits = SAMPLING_LIMITS
) -> SamplingParams:
    """Sampling fields of a request; absent ones and None take the model file's value, else the default (C10).

    ``file``: the model's metadata. Raises RequestError naming the field for unknown names and illegal values.
    """
    values: dict[str, Any] = {}
    for key, name in _FILE_SAMPLING.items():
        found = file.get(f"general.sampling.{key}")
        if isinstance(found, int | float) and not isinstance(found, bool):
            alone: dict[str, Any] = {name: found}
            try:
                SamplingParams(**alone).validate(n_vocab)
            except RequestError as e:
                log.warning("the file's general.sampling.%s is ignored: %s", key, e)
            else:
                values[name] = found
    for name, value in given.items():
        if name not in SAMPLING_FIELDS:
            raise RequestError(f"there is no option '{name}'; known: {', '.join(sorted(SAMPLING_FIELDS))}", name)
        if value is not None:
            values[_ALIASES.get(name, name)] = value
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    params = SamplingParams(**values)
    params.validate(n_vocab, limits)
    return params


def make_plan(
    ids: Sequence[int],
    params: SamplingParams,
    n_ctx: int,
    n_vocab: int,
    *,
    max_tokens: int | None = None,
    include_stop: bool = False,
    skip_special: bool = True,
    cache: bool = True,
    keep_at: Sequence[int] = (),
    **others: Any,
) -> Plan:
    """Check a tokenised prompt against the context and the vocabulary, and fix budget and seed.

    ``max_tokens`` None: 256; -1: up to the end of the context. ``others``: further fields of the plan, as they are.
    Raises RequestError (an empty prompt, an id that the vocabulary lacks: B84) and ContextLengthExceeded (B83, C18).
    """
    limit = ENGINE.max_tokens if max_tokens is None else max_tokens
    if isinstance(limit, bool) or not isinstance(limit, int) or not -1 <= limit <= SAMPLING_LIMITS.max_tokens:
        raise RequestError(f"max_tokens must be an integer from -1 to {SAMPLING_LIMITS.max_tokens}", "max_tokens")
    check_ids(ids, n_vocab)
    if len(ids) >= n_ctx:
        raise ContextLengthExceeded(len(ids), n_ctx)
    room = n_ctx - len(ids)
    seed = fresh_seed() if params.seed is None or params.seed == -1 else params.seed
    return Plan(
        ids=tuple(ids),
        budget=room if limit == -1 else min(limit, room),
        params=replace(params, seed=seed),
        seed=seed,
        include_stop=include_stop,
        skip_special=skip_special,
        cache=cache,
        keep_at=tuple(sorted({at for at in keep_at if 0 < at < len(ids)})),
        **others,
    )


def check_ids(ids: Sequence[int], n_vocab: int) -> None:
    """Raise RequestError if there are no ids, or one is no token of the vocabulary."""
    if not len(ids):
        raise RequestError("the prompt is empty: it has no tokens", "prompt")
    for at, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < n_vocab:
            raise RequestError(f"prompt[{at}] is {token!r}; token ids are integers from 0 to {n_vocab - 1}", "prompt")
