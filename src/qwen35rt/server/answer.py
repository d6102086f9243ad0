"""What all generating answers share: the envelope, usage, timings; a Job that buffered and streamed answers run alike.

An endpoint brings one ChoiceWriter per choice, which turns parts and results of its turn into JSON objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..engine.result import Completion, Delta, Timings
from ..plan import Plan

Json = dict[str, Any]


class ChoiceWriter(Protocol):
    """One choice of an answer. The stream's chunks, joined, say what ``whole`` says (C3).

    A streamed choice gets ``begin``, then ``delta`` for each part, then ``finish`` or ``failed``; a buffered one gets
    ``whole`` alone. Each returned object is one entry of ``choices``; a chunk carries one of them.
    """

    def begin(self) -> list[Json]:
        """Chunks before the first event."""

    def delta(self, delta: Delta) -> list[Json]:
        """Chunks of a part; none if nothing of it can be said yet."""

    def finish(self, completion: Completion) -> list[Json]:
        """What was held back, then the terminal chunk, which is the last of the list."""

    def failed(self) -> Json:
        """The choice of an error chunk."""

    def whole(self, completion: Completion) -> Json:
        """The choice of a buffered answer."""


@dataclass
class Job:
    """A request that is ready to run. ``plans`` and ``writers`` are parallel; ``usage`` may add to the counts."""

    id: str
    object: str
    chunk_object: str
    created: int
    model: str
    fingerprint: str
    seed: int
    plans: Sequence[Plan]
    writers: Sequence[ChoiceWriter]
    stream: bool = False
    include_usage: bool = False
    usage_last: bool = False  # with include_usage only the extra chunk has counts, as chat frameworks add them all up
    usage: Callable[[Sequence[Completion]], Json] = field(default_factory=lambda: usage_of)

    def envelope(self, choices: list[Json], *, chunk: bool = False) -> Json:
        """Keys that every answer and every chunk has."""
        return {
            "id": self.id,
            "object": self.chunk_object if chunk else self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def whole(self, completions: Sequence[Completion]) -> Json:
        """The buffered answer."""
        choices = [w.whole(c) for w, c in zip(self.writers, completions, strict=True)]
        return self.envelope(choices) | {
            "seed": self.seed,
            "on_gpu": all(c.on_gpu for c in completions),
            "usage": self.usage(completions),
            "timings": join_timings([c.timings for c in completions]).as_dict(),
        }


def usage_of(completions: Sequence[Completion]) -> Json:
    """Sums over the turns of a request (C40)."""
    prompt = sum(c.usage.prompt_tokens for c in completions)
    completion = sum(c.usage.completion_tokens for c in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(c.usage.cached_tokens for c in completions)},
    }


def join_timings(timings: Sequence[Timings]) -> Timings:
    """Counts are sums, phases those of the request: all turns were accepted at the same moment (C43, C44)."""
    if len(timings) == 1:
        return timings[0]
    queue = min((t.queue_ms for t in timings if t.queue_ms is not None), default=None)
    ttft = min((t.ttft_ms for t in timings if t.ttft_ms is not None), default=None)
    ends = [t.ttft_ms + (t.predicted_ms or 0.0) for t in timings if t.ttft_ms is not None]
    predicted = sum(t.predicted_n for t in timings)
    return Timings(
        cache_n=sum(t.cache_n for t in timings),
        prompt_n=sum(t.prompt_n for t in timings),
        prompt_ms=None if ttft is None or queue is None else ttft - queue,
        predicted_n=predicted,
        predicted_ms=None if ttft is None or predicted < 2 else max(ends) - ttft,
        queue_ms=queue,
        ttft_ms=ttft,
    )
