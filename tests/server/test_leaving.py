"""Clients that leave or do not read, and how requests are counted (section 9)."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time

import pytest

from qwen35rt.config import SERVER_LIMITS
from qwen35rt.engine.result import Delta
from qwen35rt.server import incoming
from qwen35rt.server.turns import Turns
from tests.server.conftest import Make, Server
from tests.server.fake import FakeEngine, asynchronous, eventually, make_tokenizer, started


@asynchronous
async def test_b21_c61_a_stream_that_is_left_ends_at_once(server: Server) -> None:
    server.engine.forever(b"x")
    server.engine.delay = 0.005
    other = server.begin({"prompt": "b", "max_tokens": 100, "stream": True})
    stream = await started(server.begin({"prompt": "a", "n_predict": -1, "stream": True}), 3)
    stream.leave()
    await stream.end()
    await eventually(lambda: len(server.engine.running) == 1)
    assert (await other.end()).text == "x" * 100
    assert server.counts() == {("cancelled", "499"): 1, ("success", "200"): 1}
    assert server.idle


@asynchronous
async def test_b21_c61_a_buffered_request_that_is_left(server: Server) -> None:
    server.engine.forever(b"x")
    server.engine.delay = 0.005
    for held in ({}, {"stop": ["x" * 250]}):
        request = server.begin({"prompt": "a", "n_predict": -1, **held})
        await eventually(lambda: len(server.engine.running) == 1)
        request.leave()
        await request.end()
        assert request.messages == []
        await eventually(lambda: server.idle)
    assert server.counts() == {("cancelled", "499"): 2}
    began = time.monotonic()
    assert (await server.post({"prompt": "a", "max_tokens": 4})).status == 200
    assert time.monotonic() - began < 3


@asynchronous
async def test_b21_c61_a_waiting_request_that_is_left_never_runs(make: Make) -> None:
    server = make(parallel=1)
    server.engine.forever(b"x")
    server.engine.delay = 0.005
    first = await started(server.begin({"prompt": "a", "n_predict": -1, "stream": True}))
    waiting = [server.begin({"prompt": "b", "stream": stream}) for stream in (False, True)]
    await eventually(lambda: len(server.engine.waiting) == 2)
    for request in waiting:
        request.leave()
        await request.end()
        assert request.messages == []
    await eventually(lambda: not server.engine.waiting)
    assert len(server.engine.running) == 1
    assert len(server.engine.places) == 1
    first.leave()
    await first.end()
    assert server.counts() == {("cancelled", "499"): 3}


@asynchronous
async def test_c61_a_client_that_leaves_while_its_prompt_is_tokenised(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = server.engine.tokenizer.encode

    def slow(text: str, special: bool = False) -> list[int]:
        time.sleep(0.2)
        return encode(text, special)

    monkeypatch.setattr(server.engine.tokenizer, "encode", slow)
    request = server.begin({"prompt": "a"})
    await eventually(lambda: bool(server.engine.places))
    request.leave()
    await request.end()
    assert not server.engine.places
    await asyncio.sleep(0.3)
    assert server.engine.submitted == []


@asynchronous
async def test_c61_requests_left_at_random_points_leave_nothing(make: Make) -> None:
    server = make(parallel=2, queue=100)
    server.engine.script = lambda plan: server.engine.ids(b"x" * 30)
    server.engine.delay = 0.001
    requests = [server.begin({"prompt": "a", "stream": i % 2 == 0}) for i in range(60)]
    for i, request in enumerate(requests):
        if i % 3:
            await asyncio.sleep(0.001 * (i % 7))
            request.leave()
    for request in requests:
        await request.end(30)
    await eventually(lambda: server.idle)
    counts = server.counts()
    assert sum(counts.values()) == 60
    assert set(counts) <= {("success", "200"), ("cancelled", "499")}
    assert counts["success", "200"] >= 20
    left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    assert left == []
    assert server.service.pace.running == 0


@asynchronous
async def test_c62_every_request_is_counted_once(server: Server) -> None:
    await server.post({"prompt": "a"})
    await server.post({"prompt": "a", "stream": True})
    await server.post({"prompt": "a", "top_p": 3})
    await server.post(b"{")
    server.engine.state = "restarting"
    await server.post({"prompt": "a"})
    assert server.counts() == {("success", "200"): 2, ("failure", "400"): 2, ("failure", "503"): 1}
    recorder = server.app.extensions["qwen35rt"]
    assert not recorder.open


@asynchronous
async def test_c63_closing_after_the_terminal_chunk_is_a_success(server: Server) -> None:
    stream = server.begin({"prompt": "a", "stream": True}, stop_at=b'"finish_reason":"stop"')
    await stream.until(lambda: b'"finish_reason":"stop"' in stream.body)
    assert stream.messages[-1]["more_body"]
    stream.leave()
    await stream.end()
    assert server.counts() == {("success", "200"): 1}


@asynchronous
async def test_c53_a_client_that_does_not_read_pauses_its_own_turn(make: Make) -> None:
    server = make(max_stream_buffer=4096, n_ctx=4000)
    server.engine.forever(b"x")
    stream = server.begin({"prompt": "a", "n_predict": -1, "stream": True})
    await started(stream, 1)
    stream.gate.clear()
    await eventually(lambda: bool(server.engine.running) and server.engine.running[0].turn.paused)
    await asyncio.sleep(0.05)  # for the step under way
    drawn = server.engine.running[0].draws
    other = await server.post({"prompt": "b", "max_tokens": 50})
    assert other.json["usage"]["completion_tokens"] == 50
    assert server.engine.running[0].draws == drawn
    assert (drawn - len(stream.lines)) * 250 < 4096, "more is held than the buffer allows"
    stream.gate.set()
    await stream.end(60)
    assert stream.text == "x" * 3999
    assert server.counts() == {("success", "200"): 2}


class _SlowTicket:
    """Its turn is paused only after the reader had time to catch up."""

    def __init__(self) -> None:
        self.pausing, self.paused = threading.Event(), False

    def cancel(self) -> None: ...

    def pause(self) -> None:
        self.pausing.set()
        time.sleep(0.2)
        self.paused = True

    def resume(self) -> None:
        self.paused = False


@asynchronous
async def test_c53_a_reader_that_catches_up_while_its_turn_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread pauses, the loop resumes: in whatever order they come, the turn goes on."""
    ticket = _SlowTicket()
    engine = FakeEngine(make_tokenizer())
    monkeypatch.setattr(engine, "submit_all", lambda plans, sink, **others: [ticket])
    turns = Turns(engine, [], engine.reserve(), accepted=0.0, deadline=time.perf_counter() + 60, max_bytes=1000)
    turns._sink(0, Delta("x" * 100, ()))  # near the bound; the next one is beyond it
    beyond = asyncio.create_task(asyncio.to_thread(turns._sink, 0, Delta("y", ())))
    assert await asyncio.to_thread(ticket.pausing.wait, 5)
    assert [await turns.next(), await turns.next()]
    await beyond
    assert (ticket.paused, turns.held_bytes) == (False, 0)
    engine.stop()


@asynchronous
async def test_c53_a_client_that_never_reads_is_given_up(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    server = make(write_timeout=0.15, max_stream_buffer=4096, n_ctx=4000)
    server.engine.forever(b"x")
    stream = await started(server.begin({"prompt": "a", "n_predict": -1, "stream": True}))
    stream.gate.clear()
    await stream.end()
    await eventually(lambda: server.idle)
    assert server.counts() == {("cancelled", "499"): 1}
    assert stream.messages[-1]["more_body"]


@asynchronous
async def test_c52_the_turn_is_over_before_its_last_chunks_are_read(make: Make) -> None:
    server = make(parallel=1, queue=0)
    stream = server.begin({"prompt": "a", "stream": True})
    await started(stream)
    stream.gate.clear()
    await eventually(lambda: server.idle)
    assert (await server.post({"prompt": "b"})).status == 200
    stream.gate.set()
    await stream.end()
    assert stream.lines[-1] == "[DONE]"


@asynchronous
async def test_c62_an_end_that_is_never_read_is_no_success(make: Make) -> None:
    server = make(write_timeout=0.15)
    server.engine.delay = 0.05
    stream = server.begin({"prompt": "a", "stream": True, "max_tokens": 2}, stop_at=b'"text":" "')
    await stream.end()
    assert len(stream.lines) == 1
    assert server.counts() == {("cancelled", "499"): 1}


@asynchronous
async def test_c63_a_body_whose_end_is_never_read_holds_nothing(make: Make) -> None:
    server = make(write_timeout=0.15)
    stream = server.begin({"prompt": "a", "stream": True}, stop_at=b"[DONE]")
    await stream.end()
    assert stream.messages[-1]["more_body"]
    assert server.counts() == {("success", "200"): 1}


@asynchronous
async def test_c47_events_that_are_here_leave_together(server: Server) -> None:
    """A client that was slow gets what has come meanwhile at once, and not more than a bounded piece."""
    server.engine.forever(b"x")
    stream = server.begin({"prompt": "a", "max_tokens": 200, "stream": True}, stop_at=b'"text":"x"')
    await stream.until(lambda: not stream.gate.is_set())
    await eventually(lambda: server.idle)
    before = len(stream.messages)
    stream.go_on()
    await stream.end()
    assert stream.text == "x" * 200
    pieces = [len(m["body"]) for m in stream.messages[before + 1 :]]
    assert len(pieces) < 30
    assert max(pieces) < 8192


@asynchronous
async def test_bodies_that_come_at_once_are_bounded_together(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that would be too much is refused; the others go on, and what they took is free when they end."""
    limits = dataclasses.replace(SERVER_LIMITS, bodies_bytes=1500)
    monkeypatch.setattr(incoming, "SERVER_LIMITS", limits)
    server = make(max_body=1000)
    bodies = server.app.extensions[incoming.BODIES]
    slow = [server.begin(b" " * 600, complete=False) for _ in range(2)]
    await eventually(lambda: bodies.held == 1200)
    refused = await server.begin(b" " * 600, complete=False).end()
    assert (refused.status, refused.error["code"]) == (503, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    assert (await server.post({"prompt": "a"})).status == 200
    for request in slow:
        request.leave()
        await request.end()
    assert bodies.held == 0
    assert (await server.post(b" " * 1001)).status == 413
    assert bodies.held == 0
    assert server.counts()["cancelled", "499"] == 2
