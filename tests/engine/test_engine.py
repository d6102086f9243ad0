"""The worker thread on a fake executable: places, order, cancel, pause; all is returned."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qwen35rt.backends.base import Limits
from qwen35rt.engine.core import Core, Event
from qwen35rt.engine.result import Completion, Delta
from qwen35rt.engine.turn import Turn
from qwen35rt.errors import (
    Cancelled,
    QueueFull,
    RequestError,
)
from qwen35rt.plan import make_plan, sampling_params
from qwen35rt.tokenizer import Tokenizer

from .bed import Bed, Fake, Reader


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
    order: list[int] = []

    def sink(number: int) -> Any:
        return lambda index, event: order.append(number) if isinstance(event, Completion) else None

    for number in range(5):
        bed.engine.submit(bed.plan(), sink(number))
    with pytest.raises(QueueFull):
        bed.submit()
    bed.fake.gate.set()
    bed.until(lambda: len(order) == 5)
    assert order == list(range(5))
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
    assert len(calls) <= 13
    ticket, reader = bed.submit(max_tokens=100)
    ticket.pause()
    bed.until(lambda: not bed.engine._news)
    n = len(calls)
    time.sleep(0.1)
    assert len(calls) <= n + 1  # paused: no polling either
    ticket.resume()
    reader.completion()


def test_a_sink_that_raises_ends_only_its_turn(beds: Callable[..., Bed], caplog: pytest.LogCaptureFixture) -> None:
    bed = beds()
    bad = Reader()
    bad.fault = RuntimeError("no reader")
    with bed.engine._wake:  # both come in the same step
        _, good = bed.submit(max_tokens=30)
        bed.submit(bad, max_tokens=30)
    assert len(good.completion().ids) == 30
    assert len(bad.events[0]) == 1
    assert "the reader of request" in caplog.text
    bed.check_all_returned()


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
