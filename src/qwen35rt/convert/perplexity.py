"""Perplexity of a model on a text, in chunks that each begin with an empty state.

The first half of a chunk is context, the second is scored: each token there is predicted from at least n_ctx / 2
others. Logits are looked at slice by slice, so that memory does not grow with the chunk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..api import Model
from ..backends.base import Float
from ..config import EVALUATION
from ..errors import ConfigError, GenerationFailed
from .text import Ids, cut_text

Double = npt.NDArray[np.float64]
SliceFn = Callable[[Float, Double], None]


@dataclass(frozen=True)
class Mean:
    """A mean of independent values and its standard error (0 for a single value)."""

    value: float
    error: float

    @staticmethod
    def of(values: Double) -> Mean:
        """Mean of values [n], n >= 1."""
        n = len(values)
        return Mean(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0)


@dataclass(frozen=True)
class Perplexity:
    """``value`` = exp(mean negative log-likelihood of the scored tokens), ``error`` its standard error.

    ``nll`` is that mean in nats. ``tokens`` were run in ``seconds``, ``scored`` of them were predicted.
    """

    value: float
    error: float
    nll: Mean
    chunks: int
    n_ctx: int
    scored: int
    tokens: int
    seconds: float
    device: str

    @property
    def tokens_per_second(self) -> float:
        """Tokens run in a second, the scoring included."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


ProgressFn = Callable[[Perplexity, int], None]


def perplexity(
    model: Model,
    text: str,
    n_ctx: int | None = None,
    chunks: int | None = None,
    progress: ProgressFn | None = None,
) -> Perplexity:
    """Perplexity of a text.

    ``n_ctx``: tokens of a chunk, at most the model's context; default 512. ``chunks``: at most so many. ``progress``:
    called after each chunk with the estimate so far and the number of chunks.
    Raises ConfigError for a text that is too short, GenerationFailed for logits that are not finite.
    """
    return score(model, chunks_of(model, text, n_ctx, chunks), progress)


def chunks_of(model: Model, text: str, n_ctx: int | None = None, chunks: int | None = None) -> Ids:
    """The chunks int32 [chunks, n_ctx] of a text for a model. Raises ConfigError."""
    n_ctx = min(EVALUATION.n_ctx, model.n_ctx) if n_ctx is None else n_ctx
    if n_ctx > model.n_ctx:
        raise ConfigError(f"chunks of {n_ctx} tokens do not fit in the context of {model.n_ctx}")
    return cut_text(model.tokenizer, text, n_ctx, chunks)


def score(model: Model, ids: Ids, progress: ProgressFn | None = None, see: SliceFn | None = None) -> Perplexity:
    """Perplexity of chunks int32 [chunks, n_ctx].

    ``see`` is called for each slice of scored positions with the logits float32 [n, n_vocab], which it must not keep or
    change, and the negative log-likelihoods [n] of the right tokens.
    """
    count, n_ctx = ids.shape
    nll = np.empty(count * scored_per_chunk(n_ctx))
    began, at = time.perf_counter(), 0

    def so_far(chunks: int) -> Perplexity:
        mean = Mean.of(nll[:at])
        value = exp_or_inf(mean.value)
        spent = time.perf_counter() - began
        # The last token of a chunk is predicted and never run.
        tokens = chunks * (n_ctx - 1)
        return Perplexity(value, value * mean.error, mean, chunks, n_ctx, at, tokens, spent, model.device)

    for chunk in range(count):
        for right, logits in _scored_slices(model, ids[chunk]):
            found = negative_log_likelihood(logits, right)
            if not np.isfinite(found).all():
                raise GenerationFailed(f"chunk {chunk + 1} of {count}: the model's logits are not finite")
            if see is not None:
                see(logits, found)
            nll[at : at + len(right)] = found
            at += len(right)
        if progress is not None:
            progress(so_far(chunk + 1), count)
    return so_far(count)


def scored_per_chunk(n_ctx: int) -> int:
    """Predicted tokens of a chunk: those after position n_ctx // 2."""
    return n_ctx - 1 - n_ctx // 2


def _scored_slices(model: Model, chunk: Ids) -> Iterator[tuple[Ids, Float]]:
    first = len(chunk) // 2
    at = first + 1
    for logits in model.logits_slices(chunk[:-1], first):
        yield chunk[at : at + len(logits)], logits
        at += len(logits)


def negative_log_likelihood(logits: Float, right: Ids) -> Double:
    """-log softmax(logits)[right] of each row; logits float32 [n, n_vocab], right int32 [n]; NaN or inf if a row is."""
    out = np.empty(len(right))
    with np.errstate(all="ignore"):
        for row, values in enumerate(logits):  # one row at a time: temporaries stay in cache
            top = values.max()
            out[row] = np.log(np.exp(values - top).sum(dtype=np.float64)) + (float(top) - float(values[right[row]]))
    return out


def exp_or_inf(x: float) -> float:
    """exp(x), infinite where a float is too small for it."""
    return math.exp(x) if x < 700 else math.inf
