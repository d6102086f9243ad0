"""Runs one benchmark test on an executable: prefill or decode at a depth, steps as the engine asks for them. Prints
nothing."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..backends.base import Batch, Executable, StepReport
from ..config import ENGINE
from ..model.source import Source, kv_bytes_per_token, products_per_token, weight_bytes_per_token


@dataclass(frozen=True)
class Case:
    """``prompt`` tokens in slices of ``batch``, or ``generate`` single steps, behind ``depth`` tokens; never both."""

    prompt: int
    generate: int
    depth: int
    batch: int

    @property
    def name(self) -> str:
        """llama-bench's name of the test."""
        base = f"pp{self.prompt}" if self.prompt else f"tg{self.generate}"
        return f"{base} @ d{self.depth}" if self.depth else base

    @property
    def tokens(self) -> int:
        """Tokens that are timed."""
        return self.prompt or self.generate


@dataclass
class Result:
    """Seconds of each repetition, where the steps ran, and the time of each op kind when profiling."""

    case: Case
    seconds: list[float] = field(default_factory=list)
    on_gpu: bool = True
    op_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [self.case.tokens / s for s in self.seconds]


def mean(values: Sequence[float]) -> float:
    """The mean."""
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    m = mean(values)
    return math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - 1))


class Bench:
    """Tests on one executable, which has two slots: the second keeps the state at the depth between repetitions."""

    def __init__(self, executable: Executable, n_vocab: int, seed: int = 1) -> None:
        self.executable, self.n_vocab = executable, n_vocab
        self.rng = np.random.default_rng(seed)
        self.pages = np.arange(executable.limits.pages, dtype=np.int32)

    def run(self, case: Case, repetitions: int, warmup: bool = True) -> Result:
        """Fill the depth once, then time each repetition from there."""
        result = Result(case)
        self._feed(self._tokens(case.depth), 0, case.batch)
        self.executable.copy_slot(0, 1)
        if warmup:
            self._feed(self._tokens(min(case.prompt, case.batch) or 1), case.depth, case.batch)
        for _ in range(repetitions):
            self.executable.copy_slot(1, 0)
            ids = self._tokens(case.tokens)
            began = time.perf_counter()
            reports = self._feed(ids, case.depth, case.batch if case.prompt else 1)
            result.seconds.append(time.perf_counter() - began)
            for report in reports:
                result.on_gpu &= report.on_gpu
                for kind, spent in report.op_seconds.items():
                    result.op_seconds[kind] += spent
        return result

    def _tokens(self, n: int) -> npt.NDArray[np.int32]:
        return self.rng.integers(0, self.n_vocab, n, np.int32)

    def _feed(self, ids: npt.NDArray[np.int32], start: int, rows: int) -> list[StepReport]:
        reports = []
        for at in range(0, len(ids), rows):
            piece = ids[at : at + rows]
            end = start + at + len(piece)
            pages = self.pages[: -(-end // self.executable.limits.page_tokens)]
            reports.append(self.executable.run(Batch.single(piece, start + at, pages), top=ENGINE.top_k_on_device)[1])
        return reports


def bandwidth_share(source: Source, case: Case, rate: float, probe_gb_s: float) -> float | None:
    """Bytes of weights and stored keys and values that decoding reads a second, over what the machine can read."""
    if not case.generate or probe_gb_s <= 0:
        return None
    read = weight_bytes_per_token(source.program) + kv_bytes_per_token(source.program, case.depth + case.generate / 2)
    return rate * read / (probe_gb_s * 1e9)


def int8_share(source: Source, case: Case, rate: float, probe_gop_s: float) -> float | None:
    """Operations a second of the linear layers in a prefill (two for each product), over the int8 peak."""
    if not case.prompt or probe_gop_s <= 0:
        return None
    rows, wanted = products_per_token(source.program)
    slices = -(-case.prompt // case.batch)
    operations = 2 * (rows + wanted * slices / case.prompt)
    return rate * operations / (probe_gop_s * 1e9)
