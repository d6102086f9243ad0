"""Cores on tiny models, and shortcuts for the tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, overload

import numpy as np

from qwen35rt.backends.base import Backend, Batch, Best, Executable, Float, Limits, Logits, StepReport
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.engine.core import Core, Event
from qwen35rt.engine.result import Completion, Delta
from qwen35rt.engine.sampler import make_workspace
from qwen35rt.engine.turn import Turn
from qwen35rt.errors import BackendError, Qwen35Error
from qwen35rt.model.source import open_source
from qwen35rt.plan import Plan, make_plan, sampling_params
from qwen35rt.tokenizer import build_tokenizer

from ..implementations import cpu_backend, isa_levels

N_CTX = 512
PAGE = 16


def best_of(logits: Float, top: int) -> Best:
    """The ``top`` largest numbers of rows or of one, ties to the lower id, NaN first."""
    ids = np.argsort(-np.where(np.isnan(logits), np.inf, logits), -1, kind="stable")[..., :top].astype(np.int32)
    ids.sort(-1)
    return Best(ids, np.take_along_axis(logits, ids, -1))


def check_best(found: Logits, logits: Float, top: int) -> None:
    """They are the ``top`` largest of ``logits``, and nothing else is there."""
    assert isinstance(found, Best)
    want = best_of(logits, top)
    np.testing.assert_array_equal(found.ids, want.ids, strict=True)
    np.testing.assert_array_equal(found.logits, want.logits, strict=True)


class Spy:
    """An executable that notes the rows of each step and can lie about its device or fail.

    ``only_best``: no logits but those that a step asks for. ``tops``: how many, by step; ``whole``: rows that were
    asked for in whole, by step.
    """

    def __init__(self, inner: Executable) -> None:
        self.inner, self.limits = inner, inner.limits
        self.state_bytes, self.page_bytes = inner.state_bytes, inner.page_bytes
        self.steps: list[int] = []
        self.devices: Iterator[str] | None = None
        self.fail_at = -1
        self.only_best = self.fail_whole = False
        self.tops: list[int] = []
        self.whole: list[list[int]] = []

    @overload
    def run(self, batch: Batch, keep: Sequence[str] = ()) -> tuple[Float, StepReport]: ...

    @overload
    def run(self, batch: Batch, keep: Sequence[str] = (), *, top: int) -> tuple[Logits, StepReport]: ...

    def run(self, batch: Batch, keep: Sequence[str] = (), top: int = 0) -> tuple[Logits, StepReport]:
        if len(self.steps) == self.fail_at:
            self.fail_at = -1
            raise BackendError("made to fail")
        self.steps.append(len(batch.tokens))
        self.tops.append(top)
        self.whole.append([])
        logits, report = self.inner.run(batch, keep, top=top)
        if self.only_best and top and not isinstance(logits, Best):
            logits = best_of(logits, top)
        if self.devices is not None:
            report = replace(report, devices={next(self.devices): 1})
        return logits, report

    def full_logits(self, row: int) -> Float:
        if self.fail_whole:
            raise BackendError("made to fail")
        self.whole[-1].append(row)
        return self.inner.full_logits(row)

    def copy_slot(self, source: int, target: int) -> None:
        self.inner.copy_slot(source, target)

    def copy_page(self, source: int, target: int) -> None:
        self.inner.copy_page(source, target)

    def read_slot(self, slot: int) -> tuple[Float, Float]:
        return self.inner.read_slot(slot)

    def write_slot(self, slot: int, delta: Float, conv: Float) -> None:
        self.inner.write_slot(slot, delta, conv)

    def close(self) -> None:
        self.inner.close()


ANSWER: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


class Rig:
    """A core, by default of one place on the reference backend with room for 8 kept states."""

    def __init__(
        self,
        path: Path,
        *,
        backend: Backend | None = None,
        rows: int = 16,
        parallel: int = 1,
        states: int = 8,
        pages: int | None = None,
        cache_bytes: int | None = None,
        beside_decode: int = 256,
    ) -> None:
        source = open_source(path)
        self.tokenizer = build_tokenizer(source.file.metadata)
        whole = -(-N_CTX // PAGE) + 1
        limits = Limits(
            rows=rows,
            out_rows=max(rows, parallel),
            slots=parallel + states,
            pages=pages or (parallel + states) * whole,
            page_tokens=PAGE,
            kv_dtype="f32",
        )
        self.spy = Spy((backend or ReferenceBackend()).compile(source.program, limits))
        bound = 1 << 40 if cache_bytes is None else cache_bytes
        self.core = Core(self.spy, self.tokenizer, parallel, bound, beside_decode)
        self.workspace = make_workspace(self.tokenizer.n_vocab)
        self.events: dict[Turn, list[Event]] = {}

    def plan(self, prompt: str | Sequence[int], **options: Any) -> Plan:
        ids = self.tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else list(prompt)
        fields = {"max_tokens", "include_stop", "skip_special", "cache", "keep_at", "choice", "prompt_logprobs", "warm"}
        own = {n: options.pop(n) for n in (fields | {"markup", "banned", "timings"}) if n in options}
        params = sampling_params({"temperature": 0, **options}, {}, self.tokenizer.n_vocab)
        return make_plan(ids, params, N_CTX, self.tokenizer.n_vocab, **own)

    def add(self, prompt: str | Sequence[int], **options: Any) -> Turn:
        turn = Turn(self.plan(prompt, **options), self.tokenizer, workspace=self.workspace)
        self.events[turn] = []
        self.core.add(turn)
        return turn

    def step(self) -> bool:
        """One step; -> whether anything happened. Bounds are checked after it."""
        before = self.core.counters.steps
        events = self.core.step()
        for turn, event in events:
            self.events[turn].append(event)
        assert self.core.cache.bytes <= self.core.cache.limit_bytes
        return bool(events) or self.core.counters.steps > before

    def finish(self, *turns: Turn) -> list[Completion]:
        """Step until nothing happens any more; -> the results of the turns."""
        while self.step():
            pass
        return [self.result(turn) for turn in turns]

    def result(self, turn: Turn) -> Completion:
        """The completion of a turn that has ended, which its deltas must add up to; raises its error."""
        *parts, last = self.events[turn]
        deltas = [e for e in parts if isinstance(e, Delta)]
        assert len(deltas) == len(parts)
        if isinstance(last, Qwen35Error):
            raise last
        assert isinstance(last, Completion)
        assert "".join(d.text for d in deltas) == last.text
        assert [i for d in deltas for i in d.ids] == last.ids
        return last

    def run(self, prompt: str | Sequence[int], **options: Any) -> Completion:
        return self.finish(self.add(prompt, **options))[0]

    def texts(self, turn: Turn) -> list[str]:
        return [e.text for e in self.events[turn] if isinstance(e, Delta)]

    def check_all_returned(self) -> None:
        """Only the cache holds slots and pages, and without it none are taken."""
        core = self.core
        assert not core.running
        assert core.slots.free == core.slots.count - core.cache.entries
        assert all(e.pins == 0 for e in core.cache._entries)
        core.cache.clear()
        assert (core.slots.free, core.pages.free) == (core.slots.count, core.pages.count)


def random_ids(n: int, seed: int = 7) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 256, n)]


def until(condition: Callable[[], bool], step: Callable[[], object]) -> None:
    for _ in range(10_000):
        if condition():
            return
        step()
    raise AssertionError("it never came to that")


@cache
def best_backend() -> Backend:
    """One thread of the best level: much faster than the reference, and what serves in the end."""
    return cpu_backend(isa_levels()[-1], threads=1) if isa_levels() else ReferenceBackend()


def fast_rig(path: Path, **options: Any) -> Rig:
    return Rig(path, **{"backend": best_backend(), "rows": 64, "parallel": 4, **options})


def alone(path: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Ids of the answer to each prompt, each from an empty state."""
    cold = fast_rig(path, parallel=1, states=0, cache_bytes=0)
    return [cold.run(p, **{**ANSWER, **options}).ids for p in prompts]


def prompts_of(lengths: list[int], seed: int = 18) -> list[list[int]]:
    return [random_ids(n, seed + i) for i, n in enumerate(lengths)]


MIXED = [3, 300, 17, 64, 1, 129, 40, 250]
