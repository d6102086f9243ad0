"""What a turn gives back: Usage, Timings, Result. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Counts of tokens. ``completion_tokens`` leaves out a final end-of-turn or stop token (C40)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens whose state was reused
    reasoning_tokens: int = 0  # of the completion, up to and with the tag that ends reasoning

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms of the softmax of the raw logits: of the drawn token, and of the best ones, best first."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Timings:
    """llama-server's names (C43). Milliseconds and tokens per second; None for a phase that did not happen (C44)."""

    cache_n: int = 0
    prompt_n: int = 0  # without cached tokens
    prompt_ms: float | None = None
    predicted_n: int = 0  # all drawn tokens
    predicted_ms: float | None = None  # from the first drawn token to the last
    queue_ms: float | None = None
    ttft_ms: float | None = None

    @property
    def prompt_per_token_ms(self) -> float | None:
        """Milliseconds of a prompt token."""
        return None if self.prompt_ms is None or not self.prompt_n else self.prompt_ms / self.prompt_n

    @property
    def prompt_per_second(self) -> float | None:
        """Prompt tokens per second."""
        return None if not self.prompt_ms or not self.prompt_n else 1e3 * self.prompt_n / self.prompt_ms

    @property
    def predicted_per_token_ms(self) -> float | None:
        """Milliseconds of a decode step; the first token belongs to the prompt."""
        return None if self.predicted_ms is None else self.predicted_ms / (self.predicted_n - 1)

    @property
    def predicted_per_second(self) -> float | None:
        """Decode steps per second."""
        return None if not self.predicted_ms else 1e3 * (self.predicted_n - 1) / self.predicted_ms

    def as_dict(self) -> dict[str, float | int | None]:
        """The object that answers carry."""
        return {
            "cache_n": self.cache_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": self.prompt_ms,
            "prompt_per_token_ms": self.prompt_per_token_ms,
            "prompt_per_second": self.prompt_per_second,
            "predicted_n": self.predicted_n,
            "predicted_ms": self.predicted_ms,
            "predicted_per_token_ms": self.predicted_per_token_ms,
            "predicted_per_second": self.predicted_per_second,
            "queue_ms": self.queue_ms,
            "ttft_ms": self.ttft_ms,
        }


@dataclass(frozen=True)
class Delta:
    """One part of a running answer: text that is final, and the tokens drawn since the part before.

    ``prompt_logprobs``: those of the Completion, on the first part of a turn whose plan asked for them. ``timings``: of
    the turn up to this part, None unless the plan asked for them.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    timings: Timings | None = None


@dataclass(frozen=True)
class Completion:
    """A finished turn.

    ``ids``: the counted tokens. ``finish_reason``: "stop", "length" or "cancelled". ``stop_reason``: the stop string or
    stop token id that ended it, else None. ``on_gpu``: measured; true only if every op of every step of this turn ran
    on a GPU, false if no step ran. ``seed``: the one used; the same seed gives the same text again.
    ``prompt_logprobs``: of each prompt token, None for the first; None unless the plan asked for them.
    """

    text: str
    ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    on_gpu: bool
    timings: Timings
    seed: int
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
