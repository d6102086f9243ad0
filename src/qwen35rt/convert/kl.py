"""KL divergence of a model from a base: what quantisation, a backend or a type of pages does to the predictions.

The base P is a file written from one model; Q is the model at hand, on the same tokens. Both are compared at each
scored position over the whole vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..api import Model
from ..backends.base import Float
from ..errors import ConfigError, ModelFileError
from .kl_file import BaseFile, BaseWriter, decode, vocabulary_digest
from .perplexity import Double, Mean, Perplexity, ProgressFn, chunks_of, exp_or_inf, score

# Shares of the positions at which divergences and changes of probability are reported.
KLD_QUANTILES = (0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01)
DELTA_QUANTILES = (0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01, 0.001)


@dataclass(frozen=True)
class Divergence:
    """Q against the base P over ``ppl.scored`` positions; divergences in nats, probabilities from 0 to 1.

    ``kld``: KL(P || Q). ``delta_p``: Q's probability of the right token less P's. ``same_top``: share of positions
    whose most likely token is the same. ``ln_ratio``: ln(PPL(Q) / PPL(P)); ``ratio`` and ``difference`` likewise;
    ``correlation``: of the two models' log-likelihoods, None if one does not vary.
    """

    ppl: Perplexity
    ppl_base: Mean
    correlation: float | None
    ln_ratio: Mean
    ratio: Mean
    difference: Mean
    kld: Mean
    kld_max: float
    kld_min: float
    kld_quantiles: dict[float, float]
    delta_p: Mean
    delta_p_max: float
    delta_p_min: float
    delta_p_quantiles: dict[float, float]
    delta_p_rms: Mean
    same_top: Mean


def write_base(
    model: Model,
    text: str,
    path: Path,
    n_ctx: int | None = None,
    chunks: int | None = None,
    progress: ProgressFn | None = None,
) -> Perplexity:
    """Write the model's predictions on a text as a base; -> its perplexity. See ``perplexity`` for the arguments."""
    ids = chunks_of(model, text, n_ctx, chunks)
    with BaseWriter(path, ids, model.tokenizer) as writer:
        return score(model, ids, progress, writer.add)


def compare(
    model: Model,
    base: BaseFile,
    text: str | None = None,
    chunks: int | None = None,
    progress: ProgressFn | None = None,
) -> Divergence:
    """Compare a model with a base on the base's tokens.

    ``text``: checked to be the base's, where one is given. ``chunks``: only so many from the start.
    Raises ModelFileError for a base of another vocabulary, text or context.
    """
    check_base(model, base, text)
    ids = base.ids[:chunks]
    if not len(ids):
        raise ConfigError(f"{chunks} chunks are asked for; at least 1 is needed (--chunks)")
    kld: list[float] = []
    nll: list[float] = []
    nll_base: list[float] = []
    same: list[bool] = []
    records = base.records()

    def see(logits: Float, found: Double) -> None:
        nll.extend(found.tolist())
        for row, record in zip(logits, records, strict=False):  # the logits end first
            divergence, agree = compare_row(decode(record), row)
            kld.append(divergence)
            same.append(agree)
            nll_base.append(float(record["nll"]))

    ppl = score(model, ids, progress, see)
    return statistics(ppl, np.array(kld), np.array(nll), np.array(nll_base), np.array(same))


def check_base(model: Model, base: BaseFile, text: str | None = None) -> None:
    """Raise ModelFileError if a base does not belong to this vocabulary, context or text."""
    if base.n_vocab != model.n_vocab:
        raise ModelFileError(
            f"{base.path}: a base of {base.n_vocab} tokens; the model's vocabulary has {model.n_vocab}"
        )
    if base.digest != vocabulary_digest(model.tokenizer):
        raise ModelFileError(f"{base.path}: the base's vocabulary has other tokens than the model's")
    if base.n_ctx > model.n_ctx:
        raise ModelFileError(f"{base.path}: chunks of {base.n_ctx} tokens; the model's context holds {model.n_ctx}")
    if text is not None:
        ids = chunks_of(model, text, base.n_ctx, base.chunks)
        if ids.shape != base.ids.shape or (ids != base.ids).any():
            raise ModelFileError(f"{base.path}: written for another text; leave -f out to use the base's own tokens")


def compare_row(p: Float, logits: Float) -> tuple[float, bool]:
    """-> KL(P || Q) in nats, and whether the most likely token is the same.

    ``p``: log-probabilities less the greatest one, ``logits``: of Q; float32 [n_vocab].
    """
    q = logits - logits.max()
    weight = np.exp(p)
    sum_p, sum_q = weight.sum(dtype=np.float64), np.exp(q).sum(dtype=np.float64)
    gap = np.multiply(weight, p - q, dtype=np.float64).sum() / sum_p - (math.log(sum_p) - math.log(sum_q))
    # Rounding can bring a divergence of equal rows below 0, which no divergence is.
    return max(float(gap), 0.0), bool(p.argmax() == q.argmax())


def statistics(ppl: Perplexity, kld: Double, nll: Double, nll_base: Double, same: Double) -> Divergence:
    """All figures from the values of each position: arrays [n]."""
    base = Mean.of(nll_base)
    ln_ratio = Mean.of(nll - nll_base)
    ratio = exp_or_inf(ln_ratio.value)
    ppl_base = exp_or_inf(base.value)
    cov = float(np.cov(nll, nll_base)[0, 1]) / len(nll) if len(nll) > 1 else 0.0
    spread = ppl.nll.error * base.error
    variance = (ppl.value * ppl.nll.error) ** 2 + (ppl_base * base.error) ** 2 - 2 * ppl.value * ppl_base * cov
    delta = np.exp(-nll) - np.exp(-nll_base)
    square = Mean.of(delta**2)
    rms = math.sqrt(square.value)
    return Divergence(
        ppl=ppl,
        ppl_base=Mean(ppl_base, ppl_base * base.error),
        correlation=cov / spread if spread > 0 else None,
        ln_ratio=ln_ratio,
        ratio=Mean(ratio, ratio * ln_ratio.error),
        difference=Mean(ppl.value - ppl_base, math.sqrt(max(variance, 0.0))),
        kld=Mean.of(kld),
        kld_max=float(kld.max()),
        kld_min=float(kld.min()),
        kld_quantiles=_quantiles(kld, KLD_QUANTILES),
        delta_p=Mean.of(delta),
        delta_p_max=float(delta.max()),
        delta_p_min=float(delta.min()),
        delta_p_quantiles=_quantiles(delta, DELTA_QUANTILES),
        delta_p_rms=Mean(rms, square.error / (2 * rms) if rms else 0.0),
        same_top=Mean.of(same.astype(np.float64)),
    )


def _quantiles(values: Double, shares: tuple[float, ...]) -> dict[float, float]:
    return dict(zip(shares, (float(v) for v in np.quantile(values, shares)), strict=True))
