"""Owns the sampling fields of a request and the draw of one token: penalties' counts, bans, seed.

Knows token ids and logits only: no text, no state of the model. The arithmetic is csrc/sampler.c.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from qwen35rt import _native
from qwen35rt.backends.base import Best, Logits
from qwen35rt.config import SAMPLING, SAMPLING_LIMITS, SamplingLimits
from qwen35rt.errors import GenerationFailed, RequestError

_NOTHING = np.empty(0, np.int32)
GREEDY = 1e-5  # temperatures below: arg-max, as in csrc/sampler.c


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a turn are drawn and where it ends; names and ranges are those of the HTTP fields.

    Build it with values of any kind, then call ``validate``: nothing else checks them.
    """

    temperature: float = SAMPLING.temperature  # below 1e-5: arg-max
    top_k: int = SAMPLING.top_k  # 0 and -1: off
    top_p: float = SAMPLING.top_p
    min_p: float = SAMPLING.min_p
    presence_penalty: float = SAMPLING.presence_penalty
    frequency_penalty: float = SAMPLING.frequency_penalty
    repetition_penalty: float = SAMPLING.repetition_penalty
    repeat_last_n: int = SAMPLING.repeat_last_n  # tokens of prompt and output; -1: all
    seed: int | None = None  # None and -1: a fresh one
    logit_bias: Mapping[int, float | Literal[False]] = field(default_factory=dict)  # False: never drawn
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None  # best tokens reported beside the drawn one; None: no log-probabilities at all

    def validate(self, n_vocab: int, limits: SamplingLimits = SAMPLING_LIMITS) -> None:
        """Raise RequestError with ``param`` set to the first field whose type or range is not legal."""
        _number("temperature", self.temperature, 0, limits.max_temperature)
        _integer("top_k", self.top_k, -1)
        _number("top_p", self.top_p, 0, 1)
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -limits.max_penalty, limits.max_penalty)
        _number("frequency_penalty", self.frequency_penalty, -limits.max_penalty, limits.max_penalty)
        _number("repetition_penalty", self.repetition_penalty, 0, limits.max_repetition_penalty)
        if self.repetition_penalty == 0:
            raise _refused("repetition_penalty", f"a number above 0, to {limits.max_repetition_penalty:g}")
        _integer("repeat_last_n", self.repeat_last_n, -1)
        if self.seed is not None:
            _integer("seed", self.seed, -1, limits.max_seed)
        _check_bias(self.logit_bias, n_vocab, limits)
        _check_stops(self.stop, limits)
        _check_list("stop_token_ids", self.stop_token_ids, limits.max_stop_token_ids)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, n_vocab - 1)
        _boolean("ignore_eos", self.ignore_eos)
        _integer("min_tokens", self.min_tokens, 0, limits.max_tokens)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, limits.max_logprobs)


def _refused(name: str, legal: str) -> RequestError:
    return RequestError(f"{name} must be {legal}", name)


def _is_number(value: object, low: float, high: float) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and low <= value <= high


def _number(name: str, value: object, low: float, high: float) -> None:
    if not _is_number(value, low, high):
        raise _refused(name, f"a number from {low:g} to {high:g}")


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise _refused(name, f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}")


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _refused(name, "true or false")


def _check_list(name: str, value: object, most: int) -> None:
    if not isinstance(value, list | tuple) or len(value) > most:
        raise _refused(name, f"a list of at most {most}")


def _check_stops(stops: Sequence[object], limits: SamplingLimits) -> None:
    _check_list("stop", stops, limits.max_stops)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= limits.max_stop_chars:
            raise _refused("stop", f"a list of strings of 1 to {limits.max_stop_chars} characters")


def _check_bias(biases: object, n_vocab: int, limits: SamplingLimits) -> None:
    if not isinstance(biases, Mapping) or len(biases) > limits.max_biases:
        raise _refused("logit_bias", f"a map of at most {limits.max_biases} token ids to biases")
    for token, bias in biases.items():
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < n_vocab:
            raise _refused("logit_bias", f"a map whose token ids are integers from 0 to {n_vocab - 1}")
        if bias is not False and not _is_number(bias, -limits.max_bias, limits.max_bias):
            legal = f"numbers from {-limits.max_bias:g} to {limits.max_bias:g}, or false"
            raise _refused("logit_bias", f"a map whose biases are {legal}")


def fresh_seed() -> int:
    """A random seed for a request that gives none."""
    return secrets.randbits(SAMPLING_LIMITS.fresh_seed_bits)


class Sampled(NamedTuple):
    """One drawn token. Log-probabilities are of the raw logits over the whole vocabulary, whatever was done to draw."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] | None  # the best (id, log-probability), best first, as many as were asked for


class _Tally:
    """Distinct ids and their counts in arrays; adding and taking away cost the same at any length."""

    def __init__(self) -> None:
        self.ids = np.zeros(64, np.int32)
        self.counts = np.zeros(64, np.int32)
        self.n = 0
        self._place: dict[int, int] = {}

    def add(self, token: int) -> None:
        place = self._place.get(token)
        if place is None:
            if self.n == len(self.ids):
                self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
                self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
            place = self._place[token] = self.n
            self.ids[place], self.counts[place] = token, 0
            self.n += 1
        self.counts[place] += 1

    def take(self, token: int) -> None:
        place = self._place[token]
        self.counts[place] -= 1
        if self.counts[place] == 0:  # the last entry moves into the gap
            self.n -= 1
            last = int(self.ids[self.n])
            self.ids[place], self.counts[place] = last, self.counts[self.n]
            self._place[last] = place
            del self._place[token]


class Sampler:
    """Draws the tokens of one choice of one turn. Each drawn token that stands is handed back with ``accept``.

    params: validated. banned: ids the file marks unused. eog: ids that end generation; with ``ignore_eos`` and
    before ``min_tokens`` they are banned (the latter holds for ``stop_token_ids`` too). prompt: seen by the
    repetition penalty only. workspace: bytes of ``workspace(n_vocab)``, shared by the samplers of one thread.
    Raises RequestError where bans leave no token at all.
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        banned: Iterable[int] = (),
        eog: Iterable[int] = (),
        *,
        prompt: Sequence[int] = (),
        choice: int = 0,
        workspace: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        self.params = params
        self.seed = fresh_seed() if params.seed is None or params.seed == -1 else params.seed
        self._n_vocab = n_vocab
        self._n_generated = 0
        self._workspace = make_workspace(n_vocab) if workspace is None else workspace
        self._room = self._workspace[: 4 * n_vocab].view(np.int32)  # csrc/sampler.c takes more, leaves anything
        biases = {token: bias for token, bias in params.logit_bias.items() if bias is not False}
        never = {token for token, bias in params.logit_bias.items() if bias is False}
        never.update(banned)
        ends = set(eog)
        if params.ignore_eos:
            never |= ends
        self._banned = _ids(never)
        self._banned_early = _ids(never | ends | set(params.stop_token_ids))
        self._check_some_left()
        self._biased = np.fromiter(biases.keys(), np.int32, len(biases))
        self._biases = np.fromiter(biases.values(), np.float32, len(biases))
        self._choice = choice
        self._native = self._make_native(self._biased, self._biases)
        self._ban(self._banned_early if params.min_tokens > 0 else self._banned)
        self._looked_up: tuple[Best, _native.Sampling, npt.NDArray[np.int32]] | None = None
        self._generated = _Tally() if params.presence_penalty != 0 or params.frequency_penalty != 0 else None
        self._window = _Tally() if params.repetition_penalty != 1 and params.repeat_last_n != 0 else None
        self._recent: deque[int] = deque()  # what the window holds, oldest first
        if self._window is not None:
            for token in prompt if params.repeat_last_n < 0 else prompt[-params.repeat_last_n :]:
                self._extend_window(self._window, token)
        n_top = -1 if params.logprobs is None else min(params.logprobs, n_vocab)
        self._n_top = n_top
        raises = (
            any(bias > 0 for bias in biases.values())
            or min(params.presence_penalty, params.frequency_penalty) < 0
            or params.repetition_penalty < 1
        )
        best = 1 if params.temperature < GREEDY else max(params.top_k, 0)
        self._needs_best = 0 if raises or n_top >= 0 else best
        self._top_ids = np.empty(max(n_top, 1), np.int32)
        self._top_logprobs = np.empty(max(n_top, 1), np.float32)

    def _make_native(self, biased: npt.NDArray[np.int32], biases: npt.NDArray[np.float32]) -> _native.Sampling:
        params = self.params
        return _native.Sampling(
            params.temperature,
            min(params.top_k, self._n_vocab),
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            self.seed,
            self._choice,
            biased,
            biases,
        )

    def _check_some_left(self) -> None:
        early = self._banned_early if self.params.min_tokens > 0 else self._banned
        if len(early) >= self._n_vocab:
            raise RequestError("logit_bias, ignore_eos and min_tokens leave no token to draw", "logit_bias")

    def _extend_window(self, window: _Tally, token: int) -> None:
        window.add(token)
        if self.params.repeat_last_n > 0:
            self._recent.append(token)
            if len(self._recent) > self.params.repeat_last_n:
                window.take(self._recent.popleft())

    def accept(self, token: int) -> None:
        """Count a drawn token: it is part of the output from now on."""
        self._looked_up = None
        self._n_generated += 1
        if self._n_generated == self.params.min_tokens:
            self._ban(self._banned)
        if self._generated is not None:
            self._generated.add(token)
        if self._window is not None:
            self._extend_window(self._window, token)

    def _ban(self, banned: npt.NDArray[np.int32]) -> None:
        self._native.set_banned(banned)
        self._banned_now = banned

    @property
    def needs_best(self) -> int:
        """A draw is decided by so many best logits of a row, if bans, biases and penalties leave them as they are.

        0: all logits are needed, as nothing bounds which tokens are drawn, logits other than those are raised, or
        log-probabilities are asked for.
        """
        return self._needs_best

    def enough(self, best: Best) -> bool:
        """Whether the largest logits of a row [k] give the very token that the whole row would give.

        What is not there comes behind all that is there, and is only lowered: it stays behind those that nothing
        changes. (Where there are -inf, that is the whole row.) ``top_k`` must be below k, as it is below n_vocab:
        csrc/sampler.c draws in another way where it keeps all.
        """
        k = len(best.ids)
        if not 0 < self._needs_best < k:
            return False
        _, changed = self._look_up(best)
        return self._needs_best <= k - int(np.count_nonzero(best.logits[changed] != -np.inf))

    def _ready(self, logits: Logits) -> tuple[_native.Sampling, npt.NDArray[np.float32]]:
        """What csrc/sampler.c draws by, and from: for it the largest logits are a vocabulary of their own, whose ids
        are places among them. Those rise with the ids, so ties go the same way."""
        if isinstance(logits, Best):
            return self._look_up(logits)[0], logits.logits
        if logits.shape != (self._n_vocab,):
            raise ValueError(f"logits have shape {logits.shape}, not ({self._n_vocab},)")
        # The arrays move when they grow, and their length changes with each token.
        if self._window is not None:
            self._native.set_window(self._window.ids, self._window.n)
        if self._generated is not None:
            self._native.set_generated(self._generated.ids, self._generated.counts, self._generated.n)
        return self._native, logits

    def _look_up(self, best: Best) -> tuple[_native.Sampling, npt.NDArray[np.int32]]:
        """Settings by places among the largest logits, and the places of what they change; kept until ``accept``."""
        if self._looked_up is not None and self._looked_up[0] is best:
            return self._looked_up[1:]
        lists = [self._banned_now, self._biased]
        if self._window is not None:
            lists.append(self._window.ids[: self._window.n])
        if self._generated is not None:
            lists.append(self._generated.ids[: self._generated.n])
        wanted = np.concatenate(lists)
        self._room[best.ids] = np.arange(len(best.ids), dtype=np.int32)
        places = self._room.take(wanted)  # of ids that are not there: anything
        there = best.ids.take(places, mode="clip") == wanted
        ends = list(accumulate(map(len, lists)))
        spans = [slice(end - len(ids), end) for ids, end in zip(lists, ends, strict=True)]
        found = [places[span][there[span]] for span in spans]
        native = self._make_native(found[1], self._biases[there[spans[1]]])
        native.set_banned(found[0])
        if self._window is not None:
            native.set_window(found[2], len(found[2]))
        if self._generated is not None:
            counts = self._generated.counts[: self._generated.n]
            native.set_generated(found[-1], counts[there[spans[-1]]], len(found[-1]))
        self._looked_up = best, native, places[there]
        return self._looked_up[1:]

    def sample(self, logits: Logits, position: int) -> Sampled:
        """Draw a token; logits: contiguous float32 [n_vocab], left as they are, or the largest if they are ``enough``.

        position: which token of the output this is; the random number depends on seed, choice and position only.
        Raises GenerationFailed where logits are NaN or +Inf, or where no token is left.
        """
        native, row = self._ready(logits)
        status, token, logprob = _native.sample(
            row, native, position, self._workspace, self._n_top, self._top_ids, self._top_logprobs
        )
        _raise_for(status)
        if isinstance(logits, Best):
            token = int(logits.ids[token])
        if self._n_top < 0:
            return Sampled(token, None, None)
        n = self._n_top
        return Sampled(
            token, logprob, tuple(zip(self._top_ids[:n].tolist(), self._top_logprobs[:n].tolist(), strict=True))
        )

    def distribution(self, logits: Logits) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """The kept ids and their probabilities (sum 1) that ``sample`` would draw from; raises like it."""
        native, row = self._ready(logits)
        ids, probs = np.empty(len(row), np.int32), np.empty(len(row), np.float64)
        status, n = _native.sample_distribution(row, native, self._workspace, ids, probs)
        _raise_for(status)
        return logits.ids[ids[:n]] if isinstance(logits, Best) else ids[:n], probs[:n]


def logprob_of(logits: npt.NDArray[np.float32], token: int, n_top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Natural logarithm of the softmax of raw logits [n_vocab] at a token, and of the ``n_top`` best, best first (all
    of them where there are fewer).

    Raises GenerationFailed where logits are NaN or +Inf.
    """
    top, n_top = check_finite(logits), min(n_top, len(logits))
    total = top + float(np.log(np.exp(logits - top, dtype=np.float64).sum()))
    if not n_top:
        return float(logits[token]) - total, ()
    best = np.argpartition(-logits, n_top - 1)[:n_top]
    best = best[np.lexsort((best, -logits[best]))]
    return float(logits[token]) - total, tuple((int(i), float(logits[i]) - total) for i in best)


def check_finite(logits: Logits) -> float:
    """The largest of raw logits [n_vocab]. Raises GenerationFailed where logits are NaN or +Inf."""
    top = float((logits.logits if isinstance(logits, Best) else logits).max())  # NaN, where there is one
    if not np.isfinite(top):
        _raise_for(_native.SAMPLE_NOT_FINITE)
    return top


def make_workspace(n_vocab: int) -> npt.NDArray[np.uint8]:
    """Memory for draws from n_vocab logits; one thread may share it among all its samplers."""
    return np.empty(_native.sampler_workspace_bytes(n_vocab), np.uint8)


def _ids(tokens: set[int]) -> npt.NDArray[np.int32]:
    return np.array(sorted(tokens), np.int32) if tokens else _NOTHING


def _raise_for(status: int) -> None:
    if status == 0:
        return
    if status == _native.SAMPLE_NOT_FINITE:
        raise GenerationFailed("the model produced logits that are not finite; the turn was ended")
    if status == _native.SAMPLE_NO_TOKEN:
        raise GenerationFailed("bias and bans leave no token with a probability above 0; the turn was ended")
    raise ValueError("a token id is outside the vocabulary")
