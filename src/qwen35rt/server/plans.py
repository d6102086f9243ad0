"""What all generating endpoints do with a request's shared fields: faults by the client's names, plans, the job.

Knows no endpoint's own fields, no template and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ..config import SamplingLimits
from ..engine.result import Completion
from ..engine.sampler import SamplingParams, fresh_seed
from ..errors import ContextLengthExceeded, RequestError
from ..plan import Plan, make_plan, sampling_params
from .answer import ChoiceWriter, Job, Json, usage_of
from .errors import TokenizerFailed
from .fields import SamplingRequest
from .model import ModelFacts
from .record import Record, random_letters


@contextmanager
def tokenizing(what: str = "prompt") -> Iterator[None]:
    """A fault of the tokeniser inside is a TokenizerFailed with its cause (C16)."""
    try:
        yield
    except RequestError:
        raise
    except Exception as e:
        raise TokenizerFailed(f"the tokenizer failed on the {what} ({type(e).__name__}: {str(e)[:200]})") from e


def check_length(n_tokens: int, n_ctx: int, *, exact: bool = False) -> None:
    """Refuse a prompt of so many tokens, or at least so many, before it is tokenised (C17)."""
    if n_tokens >= n_ctx:
        error = ContextLengthExceeded(n_tokens, n_ctx)
        if not exact:
            error.args = (str(error).replace(" has ", " has at least ", 1),)
        raise error


@dataclass(frozen=True)
class AnswerKind:
    """How an endpoint's answers are named and counted; the last two are the Job's."""

    id_prefix: str
    object: str
    chunk_object: str
    usage_last: bool = False
    usage: Callable[[Sequence[Completion]], Json] = usage_of


@dataclass(frozen=True)
class Planner:
    """Makes the plans of one request and the job that runs them. ``limit``: tokens to generate, -1: no limit of its
    own; the seed of ``params`` is fixed, so that all choices share it."""

    request: SamplingRequest
    facts: ModelFacts
    params: SamplingParams
    limit: int

    @classmethod
    def of(
        cls,
        request: SamplingRequest,
        facts: ModelFacts,
        flags: Mapping[str, Any],
        file: Mapping[str, Any],
        default_limit: int,
        limits: SamplingLimits,
    ) -> Planner:
        """``flags`` and ``file`` are sampling values in the order of C10; ``default_limit``: without max_tokens.

        Raises RequestError for values that this model cannot take.
        """
        params = sampling_params({**flags, **request.sampling(limits)}, file, facts.n_vocab, limits)
        if params.seed is None or params.seed == -1:
            params = replace(params, seed=fresh_seed())
        limit = default_limit if request.max_tokens is None else request.max_tokens
        if 0 <= limit < params.min_tokens:
            raise RequestError("min_tokens is larger than max_tokens", "min_tokens")
        return cls(request, facts, params, limit)

    def plan(self, ids: Sequence[int], **others: Any) -> Plan:
        """The plan of one turn. ``others``: fields of it that the endpoint decides. Raises what make_plan does."""
        request = self.request
        return make_plan(
            ids,
            self.params,
            self.facts.n_ctx,
            self.facts.n_vocab,
            max_tokens=self.limit,
            include_stop=request.include_stop_str_in_output,
            skip_special=request.skip_special_tokens,
            cache=request.cache_prompt is not False,
            timings=request.timings_per_token,
            warm=self.limit == 0 and request.cache_prompt is True,
            **others,
        )

    def job(self, kind: AnswerKind, record: Record, plans: Sequence[Plan], writers: Sequence[ChoiceWriter]) -> Job:
        """The job of all plans, each with its writer."""
        request, options = self.request, self.request.stream_options
        assert self.params.seed is not None
        return Job(
            id=kind.id_prefix + random_letters(),
            object=kind.object,
            chunk_object=kind.chunk_object,
            created=record.created,
            model=self.facts.id if request.model is None else request.model,
            fingerprint=self.facts.fingerprint,
            seed=self.params.seed,
            plans=plans,
            writers=writers,
            stream=request.stream,
            include_usage=bool(options and options.include_usage),
            usage_last=kind.usage_last,
            usage=kind.usage,
        )
