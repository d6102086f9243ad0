"""An engine on a fake executable, and a reader of its events."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from qwen35rt.backends.base import Batch, Executable, Float, Limits, StepReport
from qwen35rt.engine.core import Event
from qwen35rt.engine.engine import Engine, EngineSettings
from qwen35rt.engine.result import Completion, Delta
from qwen35rt.plan import Plan, make_plan, sampling_params
from qwen35rt.tokenizer import Tokenizer

LIMITS = Limits(rows=32, out_rows=8, slots=8, pages=64, page_tokens=16)
WAIT = 20.0  # seconds; nothing here takes that long unless it hangs


class Fake:
    """An executable whose next token is always the last one plus 1. A closed gate holds up its steps."""

    state_bytes, page_bytes = 1000, 100

    def __init__(self, n_vocab: int, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False
        self.error: Exception | None = None
        self.steps = 0
        self._logits = np.zeros((limits.out_rows, n_vocab), np.float32)
        self.report = StepReport({"cpu": 1}, 0.0, 1, {}, {})

    def run(self, batch: Batch, keep: object = (), top: int = 0) -> tuple[Float, StepReport]:
        assert self.gate.wait(WAIT)
        self.steps += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        n = len(batch.out_rows)
        self._logits[:n] = 0
        self._logits[np.arange(n), (batch.tokens[batch.out_rows] + 1) % 200] = 9
        return self._logits[:n], self.report

    def full_logits(self, row: int) -> Float:
        raise NotImplementedError

    def copy_page(self, source: int, target: int) -> None:
        pass

    def copy_slot(self, source: int, target: int) -> None:
        raise NotImplementedError

    def read_slot(self, slot: int) -> tuple[Float, Float]:
        raise NotImplementedError

    def write_slot(self, slot: int, delta: Float, conv: Float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


class Reader:
    """A sink that remembers; ``wait`` returns the last event of a turn, of which there may be one only."""

    def __init__(self) -> None:
        self.events: dict[int, list[Event]] = defaultdict(list)
        self.ended: dict[int, threading.Event] = defaultdict(threading.Event)
        self.fault: Exception | None = None

    def __call__(self, index: int, event: Event) -> None:
        self.events[index].append(event)
        if not isinstance(event, Delta):
            self.ended[index].set()
        if self.fault is not None:
            raise self.fault

    def wait(self, index: int = 0) -> Event:
        assert self.ended[index].wait(WAIT)
        last = self.events[index][-1]
        assert [e for e in self.events[index] if not isinstance(e, Delta)] == [last]
        return last

    def completion(self, index: int = 0) -> Completion:
        last = self.wait(index)
        assert isinstance(last, Completion), last
        return last


class Bed:
    """An engine and the fakes that it has opened."""

    def __init__(self, tokenizer: Tokenizer, start: bool = True, **settings: Any) -> None:
        self.tokenizer = tokenizer
        self.fakes: list[Fake] = []
        self.open_error: Exception | None = None
        self.opening = threading.Event()
        self.opening.set()
        settings = {"parallel": 2, "queue": 3, "cache_bytes": 4000, **settings}
        self.engine = Engine(self._open, tokenizer, EngineSettings(**settings))
        if start:
            self.engine.start()
            assert self.engine.wait_ready(WAIT)

    def _open(self) -> Executable:
        assert self.opening.wait(WAIT)
        if self.open_error is not None:
            raise self.open_error
        self.fakes.append(Fake(self.tokenizer.n_vocab))
        return self.fakes[-1]

    @property
    def fake(self) -> Fake:
        return self.fakes[-1]

    def plan(self, ids: list[int] | None = None, max_tokens: int = 4, **options: Any) -> Plan:
        params = sampling_params({"temperature": 0, "ignore_eos": True, **options}, {}, self.tokenizer.n_vocab)
        return make_plan(ids or [1, 2, 3], params, 200, self.tokenizer.n_vocab, max_tokens=max_tokens)

    def submit(self, reader: Reader | None = None, **options: Any) -> tuple[Any, Reader]:
        reader = reader or Reader()
        return self.engine.submit(self.plan(**options), reader), reader

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.001)

    def check_all_returned(self) -> None:
        self.until(lambda: self.engine.snapshot().requests == 0)
        core = self.engine._core
        assert core is not None
        self.until(lambda: not core.running and not core.waiting)
        assert not self.engine._tickets
        assert core.slots.free == core.slots.count - core.cache.entries
        core.cache.clear()
        assert (core.slots.free, core.pages.free) == (core.slots.count, core.pages.count)
