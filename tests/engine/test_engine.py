"""The worker thread on a fake executable: places, faults and restarts, drain, stop, cancel, pause; all is returned."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35rt.backends.base import Batch, Executable, Float, Limits, StepReport
from qwen35rt.engine.core import Core, Event
from qwen35rt.engine.engine import Engine, EngineSettings
from qwen35rt.engine.result import Completion, Delta
from qwen35rt.engine.turn import Turn
from qwen35rt.errors import (
    BackendError,
    Cancelled,
    EngineLoading,
    EngineRestarting,
    EngineStopped,
    QueueFull,
    RequestError,
)
from qwen35rt.parts import open_tokenizer
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

    def run(self, batch: Batch, keep: object = ()) -> tuple[Float, StepReport]:
        assert self.gate.wait(WAIT)
        self.steps += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        n = len(batch.out_rows)
        self._logits[:n] = 0
        self._logits[np.arange(n), (batch.tokens[batch.out_rows] + 1) % 200] = 9
        return self._logits[:n], self.report

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


@pytest.fixture(scope="module")
def tokenizer(tiny_dense: Path) -> Tokenizer:
    return open_tokenizer(tiny_dense)


@pytest.fixture
def beds(tokenizer: Tokenizer) -> Iterator[Callable[..., Bed]]:
    made: list[Bed] = []

    def make(**options: Any) -> Bed:
        made.append(Bed(tokenizer, **options))
        return made[-1]

    yield make
    for bed in made:
        bed.opening.set()
        for fake in bed.fakes:
            fake.gate.set()
        bed.engine.stop()
        assert all(f.closed for f in bed.fakes)


def test_a_turn_runs_to_its_end(beds: Callable[..., Bed]) -> None:
    bed = beds()
    _, reader = bed.submit()
    done = reader.completion()
    assert (done.ids, done.finish_reason) == ([4, 5, 6, 7], "length")
    assert [e.ids for e in reader.events[0] if isinstance(e, Delta)] == [(4,), (5,), (6,), (7,)]
    assert bed.engine.counters.generated_tokens == 4
    bed.check_all_returned()


def test_c52_the_place_is_free_when_the_last_event_comes(beds: Callable[..., Bed]) -> None:
    bed = beds(parallel=1, queue=0)
    seen: list[tuple[int, int]] = []

    def sink(index: int, event: Event) -> None:
        if isinstance(event, Completion):
            core = bed.engine._core
            assert core is not None
            seen.append((bed.engine.snapshot().requests, len(core.running)))

    bed.engine.submit(bed.plan(), sink)
    bed.until(lambda: bool(seen))
    assert seen == [(0, 0)]


def test_c15_prompts_of_one_request_share_a_place(beds: Callable[..., Bed]) -> None:
    bed = beds(parallel=2, queue=0)
    bed.fake.gate.clear()
    reader = Reader()
    bed.engine.submit_all([bed.plan([i + 1]) for i in range(5)], reader)
    assert bed.engine.snapshot().requests == 1
    bed.fake.gate.set()
    assert [reader.completion(i).ids[0] for i in range(5)] == [2, 3, 4, 5, 6]
    bed.check_all_returned()


def test_c65_places_are_bounded_and_served_in_order(beds: Callable[..., Bed]) -> None:
    bed = beds(parallel=2, queue=3)
    bed.fake.gate.clear()
    readers = [bed.submit()[1] for _ in range(5)]
    with pytest.raises(QueueFull):
        bed.submit()
    bed.fake.gate.set()
    ends = [r.completion() for r in readers]
    times = [e.timings.queue_ms or 0 for e in ends]
    assert min(times[2:]) > max(times[:2])
    place = bed.engine.reserve()
    place.release()
    place.release()
    assert bed.engine.snapshot().requests == 0
    place = bed.engine.reserve()
    reader = Reader()
    bed.engine.submit(bed.plan(), reader, place=place)
    reader.completion()
    bed.check_all_returned()


def test_a_refused_plan_gives_its_place_back(beds: Callable[..., Bed]) -> None:
    bed = beds()
    everything = dict.fromkeys(range(bed.tokenizer.n_vocab), False)
    with pytest.raises(RequestError):
        bed.submit(logit_bias=everything)
    assert bed.engine.snapshot().requests == 0


def test_c61_cancel_waiting_running_and_ended(beds: Callable[..., Bed]) -> None:
    bed = beds(parallel=1)
    bed.fake.gate.clear()
    running, first = bed.submit(max_tokens=100)
    waiting, second = bed.submit()
    bed.until(lambda: bool(bed.engine.snapshot().running))
    waiting.cancel()
    running.cancel()
    bed.fake.gate.set()
    assert isinstance(first.wait(), Cancelled)
    assert isinstance(second.wait(), Cancelled)
    assert second.events[0] == [second.wait()]
    assert bed.fake.steps == 1
    _, third = bed.submit()
    third.completion()
    running.cancel()
    bed.check_all_returned()


def test_c53_pause_and_resume(beds: Callable[..., Bed]) -> None:
    bed = beds(parallel=1)
    ticket, slow = bed.submit(max_tokens=60)
    ticket.pause()
    _, other = bed.submit()
    assert other.completion().ids == [4, 5, 6, 7]
    n = len(slow.events[0])
    time.sleep(0.02)
    assert len(slow.events[0]) == n < 60
    ticket.resume()
    assert slow.completion().ids == list(range(4, 64))
    bed.check_all_returned()


def test_an_idle_worker_sleeps(beds: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch) -> None:
    bed = beds(parallel=1)
    calls = []
    step = Core.step

    def counted(core: Core) -> Any:
        calls.append(1)
        return step(core)

    monkeypatch.setattr(Core, "step", counted)
    ticket, reader = bed.submit(max_tokens=10)
    reader.completion()
    time.sleep(0.05)
    n = len(calls)
    assert n <= 13
    ticket, reader = bed.submit(max_tokens=100)
    ticket.pause()
    time.sleep(0.05)
    n = len(calls)
    time.sleep(0.1)
    assert len(calls) == n  # paused: no polling either
    ticket.resume()
    reader.completion()


def test_a_sink_that_raises_ends_only_its_turn(beds: Callable[..., Bed], caplog: pytest.LogCaptureFixture) -> None:
    bed = beds()
    bad = Reader()
    bad.fault = RuntimeError("no reader")
    _, good = bed.submit(max_tokens=30)
    bed.submit(bad, max_tokens=30)
    assert len(good.completion().ids) == 30
    assert len(bad.events[0]) == 1
    assert "the reader of request" in caplog.text
    bed.check_all_returned()


def test_c60_a_fault_fails_what_runs_keeps_what_waits_and_starts_anew(beds: Callable[..., Bed]) -> None:
    bed = beds(parallel=2, queue=5)
    bed.fake.gate.clear()
    first = bed.fake
    readers = [bed.submit()[1] for _ in range(4)]
    bed.until(lambda: len(bed.engine.snapshot().running) == 2)
    bed.opening.clear()
    first.error = BackendError("made to fail")
    first.gate.set()
    for reader in readers[:2]:
        assert isinstance(reader.wait(), EngineRestarting)
    assert bed.engine.state == "restarting"
    assert "made to fail" in bed.engine.reason
    with pytest.raises(EngineRestarting):
        bed.submit()
    bed.opening.set()
    for reader in readers[2:]:
        assert reader.completion().ids == [4, 5, 6, 7]
    assert first.closed
    assert (len(bed.fakes), bed.engine.restarts, bed.engine.state) == (2, 1, "ready")
    assert bed.submit()[1].completion().ids == [4, 5, 6, 7]
    bed.check_all_returned()


def test_faults_without_end_stop_the_engine(beds: Callable[..., Bed]) -> None:
    bed = beds(queue=10)
    for i in range(4):
        bed.fake.error = RuntimeError("a bug")
        _, reader = bed.submit()
        error = reader.wait()
        assert isinstance(error, EngineRestarting if i < 3 else BackendError)
        bed.engine.wait_ready(WAIT)
    assert (bed.engine.state, bed.engine.reason) == ("failed", "RuntimeError")
    with pytest.raises(EngineStopped, match="failed"):
        bed.submit()
    assert len(bed.fakes) == 4


def test_faults_long_ago_do_not_count(beds: Callable[..., Bed]) -> None:
    bed = beds(restart_window=0.0)
    for _ in range(6):
        bed.fake.error = BackendError("again")
        assert isinstance(bed.submit()[1].wait(), EngineRestarting)
        assert bed.engine.wait_ready(WAIT)


def test_c2_states_while_loading_and_after_a_failed_start(beds: Callable[..., Bed]) -> None:
    bed = beds(start=False)
    assert bed.engine.state == "loading"
    with pytest.raises(EngineLoading):
        bed.submit()
    bed.open_error = BackendError("no device")
    bed.engine.start()
    assert not bed.engine.wait_ready(WAIT)
    assert (bed.engine.state, bed.engine.reason, bed.fakes) == ("failed", "no device", [])
    with pytest.raises(EngineStopped, match="no device"):
        bed.submit()


def test_drain_serves_what_is_there_and_refuses_what_comes(beds: Callable[..., Bed]) -> None:
    bed = beds(parallel=1)
    bed.fake.gate.clear()
    readers = [bed.submit()[1] for _ in range(3)]
    thread = threading.Thread(target=bed.engine.drain, args=(WAIT,))
    thread.start()
    bed.until(lambda: bed.engine.state == "draining")
    with pytest.raises(EngineStopped, match="draining"):
        bed.submit()
    bed.fake.gate.set()
    thread.join(WAIT)
    assert [r.completion().finish_reason for r in readers] == ["length"] * 3
    assert bed.engine.state == "stopped"


def test_drain_ends_the_rest_after_its_time(beds: Callable[..., Bed]) -> None:
    bed = beds(parallel=1)
    ticket, reader = bed.submit(max_tokens=50)
    ticket.pause()
    bed.engine.drain(0.01)
    assert isinstance(reader.wait(), EngineStopped)
    assert bed.engine.state == "stopped"
    ticket.cancel()
    with pytest.raises(EngineStopped):
        bed.submit()


def test_stop_ends_what_runs_and_what_waits(beds: Callable[..., Bed]) -> None:
    bed = beds(parallel=1)
    readers = [bed.submit(max_tokens=10_000)[1] for _ in range(3)]
    bed.engine.stop()
    assert [type(r.wait()) for r in readers[1:]] == [EngineStopped] * 2
    assert isinstance(readers[0].wait(), EngineStopped | Completion)
    bed.engine.stop()


def test_500_random_submits_and_cancels_return_everything(beds: Callable[..., Bed]) -> None:
    bed, rng = beds(parallel=3, queue=500), random.Random(21)
    live: list[tuple[Any, Reader]] = []
    full = 0
    for _ in range(500):
        n = rng.choice([1, 5, 20, 60])
        ids = [*range(n), *(rng.randrange(200) for _ in range(rng.randrange(4))), 1]
        try:
            live.append(bed.submit(ids=ids, max_tokens=rng.randrange(0, 8)))
        except QueueFull:
            full += 1
        ticket = rng.choice(live)[0]
        rng.choice([ticket.cancel, ticket.pause, ticket.resume, lambda: None, lambda: None])()
        if rng.random() < 0.05:
            time.sleep(0.001)
    for ticket, _ in live:
        ticket.resume()
    kinds = {type(reader.wait()) for _, reader in live}
    assert kinds == {Completion, Cancelled}
    assert full == 0
    bed.check_all_returned()


def test_snapshot_shows_what_runs(beds: Callable[..., Bed]) -> None:
    bed = beds(parallel=1)
    bed.fake.gate.clear()
    reader = Reader()
    bed.engine.submit(bed.plan(list(range(40))), reader, request_id="r1")
    bed.submit()
    bed.until(lambda: bool(bed.engine.snapshot().running))
    shot = bed.engine.snapshot()
    assert (shot.state, shot.waiting, shot.requests) == ("ready", 1, 2)
    assert (shot.running[0].request_id, shot.running[0].prompt_tokens) == ("r1", 40)
    assert shot.pages_free < shot.pages
    bed.fake.gate.set()
    reader.completion()


def test_work_of_a_step_beside_the_model_is_small(tokenizer: Tokenizer) -> None:
    """8 sequences that decode: what the core does for each, without the model and without the draw, is under 150 us.
    The best of some hundred steps counts, in processor time: other processes do not."""
    core = Core(Fake(tokenizer.n_vocab, Limits(16, 16, 8, 2048, 64)), tokenizer, parallel=8)
    params = sampling_params({"temperature": 0, "ignore_eos": True}, {}, tokenizer.n_vocab)
    ids = [i % 200 for i in range(3000)]
    turns = [Turn(make_plan(ids, params, 8192, tokenizer.n_vocab, max_tokens=400), tokenizer) for _ in range(8)]
    for turn in turns:
        core.add(turn)
    while any(t.generated < 2 for t in turns):
        core.step()
    best = 1.0
    for _ in range(150):
        began = time.thread_time()
        core.step()
        best = min(best, time.thread_time() - began)
    drawing = 1.0
    for _ in range(50):
        began = time.thread_time()
        for turn in turns:
            turn._sampler.sample(np.zeros(tokenizer.n_vocab, np.float32), 1)
        drawing = min(drawing, time.thread_time() - began)
    assert (best - drawing) / 8 < 150e-6
