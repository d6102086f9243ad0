"""Streams as they run: keep-alive, failures midway, back-pressure, clients that leave, counting (sections 7 and 9)."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from qwen35rt.engine.turn import Turn
from qwen35rt.errors import (
    BackendError,
    EngineRestarting,
    EngineStopped,
    GenerationFailed,
    OutOfMemory,
    QueueFull,
    Qwen35Error,
    RequestError,
)
from qwen35rt.server.record import Record, _log
from qwen35rt.server.turns import Pace
from tests.server.conftest import Make, Server
from tests.server.fake import Exchange, asynchronous, eventually, make_tokenizer, started


def failing(error: Exception, after: int) -> Any:
    """A fault of every turn at its token number ``after``."""

    def fault(turn: Turn, n: int) -> Any:
        return error if n >= after else None

    return fault


@asynchronous
async def test_c47_text_goes_out_as_it_comes(server: Server) -> None:
    server.engine.forever(b"x")
    server.engine.delay = 0.002
    stream = await started(server.begin({"prompt": "a", "max_tokens": 200, "stream": True}), 3)
    assert server.engine.running
    await stream.end()
    assert stream.text == "x" * 200


@asynchronous
async def test_c50_a_failure_before_the_first_event_is_an_http_error(make: Make) -> None:
    cases = {
        GenerationFailed("NaN at layer 3"): (500, "generation_failed"),
        OutOfMemory("no page"): (503, "out_of_memory"),
        EngineRestarting("boom"): (503, "engine_restarting"),
        BackendError("/secret/path broke"): (503, "engine_restarting"),
        EngineStopped("bye"): (503, "shutting_down"),
    }
    server = make()
    for error, (status, code) in cases.items():
        server.engine.fault = failing(error, 0)
        for stream in (False, True):
            answer = await server.post({"prompt": "a", "stream": stream})
            assert (answer.status, answer.error["code"]) == (status, code)
            assert answer.headers["x-request-id"] in answer.error["message"]
            assert "/secret" not in answer.body.decode()
            assert ("retry-after" in answer.headers) == (status == 503)
            assert answer.headers.get("x-should-retry") == (None if status == 503 else "false")
    server.engine.fault = lambda turn, n: None
    assert (await server.post({"prompt": "a"})).status == 200
    assert server.counts()["failure", "500"] == 2
    assert server.counts()["failure", "503"] == 8


@asynchronous
async def test_c50_a_slow_start_sends_comments(make: Make) -> None:
    """The engine is held up until they have come."""
    go = threading.Event()

    async def slow(server: Server, pings: int) -> Exchange:
        go.clear()
        stream = server.begin({"prompt": "a", "stream": True, "max_tokens": 1})
        await stream.until(lambda: stream.body.count(b": ping\n\n") >= pings)
        await asyncio.sleep(0.15)
        go.set()
        return await stream.end()

    server = make(first_event=0.05, sse_ping=0.05)
    server.engine.script = lambda plan: (token for token in server.engine.ids(b" ") if go.wait(20))
    stream = await slow(server, 3)
    assert (stream.status, stream.text) == (200, " ")
    assert stream.body.startswith(b": ping\n\n")
    server.engine.fault = lambda turn, n: GenerationFailed("late") if go.wait(20) else None
    stream = await slow(server, 1)
    assert (stream.status, stream.events[-1]["error"]["code"]) == (200, "generation_failed")
    quiet = make(first_event=0.05, sse_ping=0)
    quiet.engine.script = lambda plan: (token for token in quiet.engine.ids(b" ") if go.wait(20))
    assert (await slow(quiet, 1)).body.count(b": ping") == 1


@asynchronous
async def test_c51_c60_a_failure_midway_is_the_last_chunk(server: Server) -> None:
    server.engine.fault = failing(GenerationFailed("NaN"), 3)
    stream = await server.post({"prompt": ["a", "b"], "stream": True})
    *chunks, last = stream.events
    assert "[DONE]" not in stream.lines
    assert [(c["index"], c["text"], c["finish_reason"]) for c in last["choices"]] == [
        (0, "", "error"),
        (1, "", "error"),
    ]
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["code"] == "generation_failed"
    assert {e["id"] for e in stream.events} == {last["id"]}
    assert all("error" not in e for e in chunks)
    await eventually(lambda: server.idle)
    whole = await server.post({"prompt": "a"})
    assert (whole.status, whole.error["code"]) == (500, "generation_failed")
    server.engine.fault = lambda turn, n: None
    assert (await server.post({"prompt": "a"})).status == 200
    assert server.counts() == {("failure", "500"): 2, ("success", "200"): 1}


@asynchronous
async def test_c51_choices_that_have_ended_stay_so(server: Server) -> None:
    server.engine.script = lambda plan: server.engine.ids(b"x" * (1 if plan.ids == (70,) else 9))
    server.engine.fault = failing(GenerationFailed("NaN"), 5)
    stream = await server.post({"prompt": [[70], [71, 72]], "stream": True})
    assert [c["index"] for c in stream.events[-1]["choices"]] == [1]


@asynchronous
async def test_c65_a_full_queue_refuses_and_keeps_the_order(make: Make) -> None:
    server = make(parallel=2, queue=3)
    server.engine.script = lambda plan: server.engine.ids(b"x" * 8)
    server.engine.delay = 0.02
    ended: list[int] = []

    async def ask(i: int) -> None:
        if (await requests[i].end()).status == 200:
            ended.append(i)

    requests = [server.begin({"prompt": [70 + i]}) for i in range(12)]
    await asyncio.gather(*(ask(i) for i in range(12)))
    refused = [r for r in requests if r.status != 200]
    assert len(refused) == 7
    for request in refused:
        assert (request.status, request.error["code"]) == (503, "queue_full")
        assert 1 <= int(request.headers["retry-after"]) <= 120
    assert [plan.ids[0] - 70 for plan in server.engine.submitted] == sorted(ended)
    rejected = server.service.metrics.text().decode()
    assert 'admission_rejections_total{engine="0",model_name="tiny",reason="queue_full"} 7.0' in rejected


@asynchronous
async def test_c65_four_slots_four_first_tokens(server: Server) -> None:
    server.engine.forever(b"x")
    server.engine.delay = 0.002
    streams = [server.begin({"prompt": "a", "max_tokens": 100, "stream": True}) for _ in range(5)]
    for stream in streams[:4]:
        await started(stream)
    assert not any(s.task.done() for s in streams[:4])
    assert streams[4].messages == []
    for stream in streams:
        assert (await stream.end()).text == "x" * 100


@asynchronous
async def test_b24_c5_health_and_refusals_come_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come while a step of the engine and the tokenising of a short and of a long text are held up until they
    have come: whatever waits for one of these, or does it in the event loop, waits in vain."""
    go = threading.Event()
    held: list[bool] = []  # whether those that were held up were let go

    def hold() -> bool:
        held.append(False)
        here = len(held) - 1
        held[here] = go.wait(20)
        return True

    own = make_tokenizer()
    server = make(of=own, parallel=4, n_ctx=200_000)
    server.engine.script = lambda plan: (token for token in server.engine.ids(b"x") if hold())
    monkeypatch.setattr(own, "encode", lambda text, special: hold() and [70] * len(text))
    try:
        wait = [server.begin({"prompt": [70]})]
        await eventually(lambda: len(held) == 1)
        wait += [server.begin({"prompt": text}) for text in ("hello", "hello world " * 12_000)]
        await eventually(lambda: len(held) == 3)
        for _ in range(3):
            assert (await server.get("/health")).status == 200
            assert (await server.get("/v1/models")).status == 200
            assert (await server.post({"prompt": "a", "top_p": 7})).status == 400
        assert not any(request.task.done() for request in wait)
    finally:
        go.set()
    for request in wait:
        assert (await request.end()).status == 200
    assert all(held)


@asynchronous
async def test_a_request_that_takes_too_long(make: Make) -> None:
    server = make(request_timeout=0.2)
    server.engine.forever(b"x")
    server.engine.delay = 0.01
    answer = await server.post({"prompt": "a", "n_predict": -1})
    assert (answer.status, answer.error["code"]) == (504, "request_timeout")
    stream = await server.post({"prompt": "a", "n_predict": -1, "stream": True})
    assert stream.events[-1]["error"]["code"] == "request_timeout"
    await eventually(lambda: server.idle)
    assert server.counts() == {("failure", "504"): 2}


@asynchronous
async def test_one_log_line_per_request_without_its_text(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "qwen35rt")
    headers = [("x-api-key", "sesame"), ("x-request-id", "r1")]
    await server.post({"prompt": "secret words", "model": "m\nx"}, headers=headers)
    await server.post({"prompt": "secret words", "stream": True})
    await server.get("/health")
    lines = [r.message for r in caplog.records if "endpoint=" in r.message]
    assert len(lines) == 2
    assert "id=r1 endpoint=/v1/completions status=200 outcome=success model=tiny stream=False prompt_n=" in lines[0]
    assert "finish_reason=stop on_gpu=False client=127.0.0.1" in lines[0]
    assert "stream=True" in lines[1]
    everything = "\n".join(r.getMessage() for r in caplog.records)
    assert "secret" not in everything
    assert "sesame" not in everything
    assert "\nx" not in everything


def test_log_lines_have_no_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    """What stands in them comes from outside: from a proxy's header, a file's name."""
    caplog.set_level(logging.INFO, "qwen35rt")
    record = Record({"client": ("a\nb\x1b[2J\u2028c", 1)})
    _log(record)
    assert caplog.records[-1].message.endswith(r"client=a\nb\x1b[2J\u2028c")


def test_retry_after_follows_the_pace_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: the time until those that are here will have ended, 1 to 120 s."""
    now = 0.0
    monkeypatch.setattr("qwen35rt.server.turns.time", SimpleNamespace(monotonic=lambda: now))
    pace = Pace()
    for _ in range(14):
        pace.begin()
    assert pace.retry_after() == 1
    for _ in range(4):
        now += 2.5
        pace.end()
    assert pace.retry_after() == 25  # ten, one each 2.5 s
    now += 500
    pace.end()
    assert pace.retry_after() == 120
    quick = Pace()
    for _ in range(4):
        quick.begin()
        quick.end()
    assert quick.retry_after() == 1


@asynchronous
async def test_refusals_for_want_of_room_tell_that_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service.pace, "retry_after", lambda: 77)
    for error in (QueueFull("full"), OutOfMemory("no page")):
        server.engine.refuse = error
        assert (await server.post({"prompt": "a"})).headers["retry-after"] == "77"
    server.engine.refuse = EngineRestarting("boom")
    assert (await server.post({"prompt": "a"})).headers["retry-after"] != "77"


@asynchronous
async def test_a_stream_may_last_longer_than_any_write(make: Make) -> None:
    """The framework's own limit for an answer would end it without a word."""
    server = make(write_timeout=0.6)
    server.engine.delay = 0.05
    server.engine.script = lambda plan: server.engine.ids(b"x" * 30)
    stream = await server.post({"prompt": "a", "stream": True})
    assert (stream.text, stream.lines[-1]) == ("x" * 30, "[DONE]")
    assert server.counts() == {("success", "200"): 1}


@asynchronous
async def test_an_unknown_fault_shows_nothing_of_itself(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("/home/secret")

    monkeypatch.setattr(server.engine, "submit_all", broken)
    answer = await server.post({"prompt": "a"})
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "secret" not in answer.body.decode()
    assert answer.headers["x-request-id"] in answer.error["message"]
    assert "ZeroDivisionError" in caplog.text
    await eventually(lambda: server.idle)


@asynchronous
async def test_a_late_refusal_of_the_engine(server: Server) -> None:
    errors: list[Qwen35Error] = [RequestError("bans leave no token", "logit_bias"), EngineStopped("drain")]
    for error, status in zip(errors, (400, 503), strict=True):
        server.engine.refuse = error
        assert (await server.post({"prompt": "a", "stream": True})).status == status


@asynchronous
async def test_draining_lets_requests_end_and_refuses_new_ones(server: Server) -> None:
    server.engine.script = lambda plan: server.engine.ids(b"x" * 20)
    server.engine.delay = 0.01
    stream = await started(server.begin({"prompt": "a", "stream": True}))
    server.service.draining = True
    answer = await server.post({"prompt": "b"})
    assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    assert (await server.get("/readyz")).json["status"] == "draining"
    assert (await server.get("/livez")).status == 200
    assert (await stream.end()).text == "x" * 20


@asynchronous
async def test_what_is_left_after_draining_ends_with_an_error(server: Server) -> None:
    server.engine.forever(b"x")
    server.engine.delay = 0.01
    stream = await started(server.begin({"prompt": "a", "n_predict": -1, "stream": True}))
    whole = server.begin({"prompt": "a", "n_predict": -1})
    await eventually(lambda: len(server.engine.running) == 2)
    server.service.halt()
    assert (await stream.end()).events[-1]["error"]["code"] == "shutting_down"
    assert (await whole.end()).error["code"] == "shutting_down"
    assert server.counts() == {("failure", "503"): 2}


@asynchronous
async def test_c17_short_prompts_do_not_wait_for_long_ones(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = server.engine.tokenizer.encode
    go = threading.Event()

    def slow(text: str, special: bool = False) -> list[int]:
        if len(text) > 1000:
            assert go.wait(10)
        return encode(text[:10], special)

    monkeypatch.setattr(server.engine.tokenizer, "encode", slow)
    long = server.begin({"prompt": "z" * 2000, "x": "y" * 100_000})
    await eventually(lambda: bool(server.engine.places))
    assert (await server.post({"prompt": "a"})).status == 200
    go.set()
    assert (await long.end()).status == 200
