"""The server under many clients, over a scripted engine and real sockets. Long forms: ``pytest -m long``.

Short forms run the same code with small numbers and without the bounds on time, which other work on a machine breaks.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from qwen35rt.server.run import _allow_descriptors, spare_collector
from qwen35rt.tokenizer import Tokenizer
from tests import ahead
from tests.fixtures import write_tiny
from tests.implementations import native
from tests.server.chat_templates import QUIET
from tests.server.crowd import Answer, ask, crowd, together
from tests.server.live import engine_of, eventually, live, reset
from tests.server.soak import GROWTH, soak

pytestmark = pytest.mark.timeout(1800)
needs_native = pytest.mark.skipif(native() is None, reason="the compiled module qwen35rt._native is not built")


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """Pipes of other processes would count as descriptors."""
    with ahead.paused():
        yield


def sizes(short: int, long: int) -> pytest.MarkDecorator:
    """A test with a short form and a long one."""
    return pytest.mark.parametrize("n", [short, pytest.param(long, marks=pytest.mark.long)])


@contextmanager
def spared_collector() -> Iterator[None]:
    """Python's collector of cycles as the server sets it for its own process."""
    before = gc.get_threshold()
    spare_collector()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


async def count_tasks() -> int:
    """Of the running event loop, beside this one."""
    return len(asyncio.all_tasks()) - 1


def events(answer: bytes) -> list[Any]:
    """The JSON of a stream that ended as it should."""
    assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
    lines = [line[6:] for line in answer.splitlines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@sizes(40, 1000)
def test_streams_at_once(tokenizer: Tokenizer, n: int) -> None:
    """Every byte of every stream arrives; 99 of 100 see their first byte within 3 s (long form: steps take time, as for
    so many rows, and the best of three rounds counts, as other work on a machine only adds)."""
    seconds = []
    with live(tokenizer, parallel=n, delay=0.2 if n >= 1000 else 0) as server, spared_collector():
        engine = engine_of(server)
        engine.script = lambda plan: engine.ids(b"word ", *[b"BC"] * (plan.ids[-1] % 20), b"DEF")
        server.ready()
        bodies = [{"prompt": [i % 256], "stream": True, "max_tokens": 50} for i in range(n)]
        rounds = 3 if n >= 1000 else 1
        for done in range(1, rounds + 1):
            answers = crowd(server.port, bodies)
            for i, a in enumerate(answers):
                text = "".join(e["choices"][0]["text"] for e in events(a.data))
                assert text == "word " + "BC" * (i % 256 % 20) + "DEF"
            eventually(lambda done=done: server.counts() == {("success", "200"): n * done})  # type: ignore[misc]
            eventually(lambda: server.idle)
            seconds.append(statistics.quantiles((a.first for a in answers), n=100)[98])
        if n >= 1000:
            print("seconds to the first byte, 99th percentile:", *(f"{s:.2f}" for s in seconds))
            assert min(seconds) < 3


@sizes(300, 10_000)
def test_requests_in_sequence_do_not_grow_the_process(tokenizer: Tokenizer, n: int) -> None:
    """Memory, objects, descriptors, threads, tasks and places after ``n`` requests are those after the first tenth."""
    with live(tokenizer, parallel=4) as server, server.client() as client:
        server.ready()
        me = psutil.Process()

        def held() -> dict[str, int]:
            eventually(lambda: server.idle)
            for _ in range(3):
                gc.collect()
            tasks = asyncio.run_coroutine_threadsafe(count_tasks(), server.loop).result(10)
            return {
                "tasks": tasks,
                "descriptors": me.num_fds(),
                "threads": me.num_threads(),
                "objects": len(gc.get_objects()),
                "rss": me.memory_info().rss,
            }

        for i in range(n + n // 10):
            if i == n // 10:  # what is built at first use is there
                before = held()
            engine_of(server).submitted.clear()
            body = {"prompt": f"hello {i}", "max_tokens": 4, "stream": i % 4 == 0}
            answer = client.post("/v1/completions", json=body)
            assert answer.is_success
            if not body["stream"]:
                assert answer.json()["usage"]["completion_tokens"] == 4
        after = held()
        print(f"{n} requests: {before} -> {after}")
        assert after.pop("rss") - before.pop("rss") <= 5 << 20
        # Of a record that stays there are several; caches of other tests in this process come and go meanwhile.
        assert after.pop("objects") - before.pop("objects") < max(n, 3_000)
        assert after == before
        assert not server.service.live
        eventually(lambda: server.counts() == {("success", "200"): n + n // 10})


@sizes(30, 500)
def test_b21_disconnects_at_random_points_leave_nothing(tokenizer: Tokenizer, n: int) -> None:
    """No slot, place, stream or descriptor is left, and each request was counted once."""
    rng = random.Random(21)
    with live(tokenizer, parallel=4, queue=n, delay=0.001) as server:
        engine = engine_of(server)
        engine.forever(b"word ")
        server.ready()
        me = psutil.Process()
        before = me.num_fds()
        work = []
        for i in range(n):
            body = {"prompt": "x" * rng.randint(1, 300), "max_tokens": rng.choice([2, 100_000]), "stream": i % 3 > 0}
            work.append(ask(server.port, body, leave_after=rng.random() * 0.3))
        together(iter(work))
        eventually(lambda: server.idle, 10)
        eventually(lambda: not server.service.live, 10)
        eventually(lambda: me.num_fds() <= before + 2, 10)
        assert sum(server.counts().values()) <= n  # a connection that went before its head came is no request
        engine.say(b"BC")
        answer = asyncio.run(ask(server.port, {"prompt": "x", "max_tokens": 2}))
        assert b'"text":"BC"' in answer.data


@sizes(40, 1000)
def test_c65_arrivals_beyond_the_queue_are_refused(tokenizer: Tokenizer, n: int) -> None:
    """Slots and queue are filled, the rest is refused (long form: within 50 ms), and the queue keeps its order."""
    slots, queue = (4, 64) if n >= 1000 else (2, 6)
    with live(tokenizer, parallel=slots, queue=queue) as server:
        engine = engine_of(server)
        engine.delay = 0.05
        engine.forever(b"word ")
        server.ready()

        async def run() -> list[Answer]:
            body = {"max_tokens": 100_000}
            first = [asyncio.ensure_future(ask(server.port, body | {"prompt": [i]})) for i in range(slots + queue)]
            while len(engine.places) < slots + queue:
                await asyncio.sleep(0.01)
            rest = []
            for i in range(n - slots - queue):
                rest.append(await ask(server.port, body | {"prompt": [i % 256]}))
            engine.script = lambda plan: engine.ids(b"BC")
            for job in list(engine.running):
                job.script = iter(engine.ids(b"BC"))
            for job in list(engine.waiting):
                job.script = iter(engine.ids(b"BC"))
            engine.delay = 0
            accepted = await asyncio.gather(*first)
            assert all(a.data.startswith(b"HTTP/1.1 200") for a in accepted)
            return rest

        refused = asyncio.run(run())
        for answer in refused:
            assert answer.data.startswith(b"HTTP/1.1 503")
            assert b'"code":"queue_full"' in answer.data
            assert b"retry-after: " in answer.data.lower()
        wanted = {("success", "200"): slots + queue, ("failure", "503"): n - slots - queue}
        eventually(lambda: server.counts() == wanted)
        assert len(engine.submitted) == slots + queue
        if n >= 1000:
            assert statistics.quantiles((a.first for a in refused), n=100)[98] < 0.05


@sizes(8, 50)
def test_c53_readers_that_stop_slow_nobody(tokenizer: Tokenizer, n: int) -> None:
    """Beside ``n`` streams that nobody reads the others are complete, what the server holds for the former is bounded,
    and (long form, rounds in turn) the same work of this process gives the latter at least 90 of 100 tokens (medians),
    and where a step takes 5 ms the 99th percentile between their tokens grows by at most a tenth (best rounds)."""
    buffer = 64 << 10
    with live(tokenizer, parallel=n + 4, write_timeout=600, max_stream_buffer=buffer) as server, spared_collector():
        engine = engine_of(server)
        engine.script = lambda plan: itertools.cycle(engine.ids(b"longer"))
        server.ready()
        tokens = 5000 if n >= 50 else 100
        bodies = [{"prompt": [i], "stream": True, "max_tokens": tokens} for i in range(4)]

        def rate() -> float:
            """Tokens per second of this process's work, which says more than the clock: it has two busy threads."""
            began = time.process_time()
            answers = crowd(server.port, bodies)
            worked = time.process_time() - began
            for a in answers:
                assert "".join(e["choices"][0]["text"] for e in events(a.data)) == "longer" * tokens
            return tokens * len(bodies) / worked

        def between() -> float:
            engine.delay = 0.005
            answers = crowd(server.port, [body | {"max_tokens": tokens // 10} for body in bodies])
            engine.delay = 0
            return 1e3 * max(a.between for a in answers)

        def block() -> list[socket.socket]:
            found = [
                server.connect({"prompt": "x", "stream": True, "max_tokens": 1_000_000}, narrow=True) for _ in range(n)
            ]
            steps = -1
            while steps != engine.steps:  # what they have is written until nothing more goes out
                steps = engine.steps
                eventually(lambda: sum(job.turn.paused for job in list(engine.running)) == n, 60)
                time.sleep(0.3)
            return found

        alone, beside, gaps_alone, gaps_beside = [], [], [], []
        for _ in range(5 if n >= 50 else 1):
            alone.append(rate())
            gaps_alone.append(between())
            blocked = block()
            before = psutil.Process().memory_info().rss
            beside.append(rate())
            gaps_beside.append(between())
            assert sum(job.turn.paused for job in list(engine.running)) == n
            assert all(turns.held_bytes <= buffer for turns in server.service.live)
            assert psutil.Process().memory_info().rss - before < 16 << 20
            for connection in blocked:
                reset(connection)
            eventually(lambda: server.idle, 10)
        rates = [f"{statistics.median(found):.0f}" for found in (alone, beside)]
        print(f"tokens per second of work: {rates[0]} alone, {rates[1]} beside {n}")
        told = [f"{min(gaps):.2f}" for gaps in (gaps_alone, gaps_beside)]
        print(f"99th percentile between tokens, ms, best of rounds: {told[0]} alone, {told[1]} beside {n}")
        if n >= 50:
            assert statistics.median(beside) >= 0.9 * statistics.median(alone)
            assert min(gaps_beside) <= 1.1 * min(gaps_alone)


@sizes(100, 500)
def test_slow_bodies_hold_nobody_up(tokenizer: Tokenizer, n: int) -> None:
    """``n`` uploads that drip: others are served meanwhile, each of the slow ones ends with 408, nothing is left."""
    with live(tokenizer, body_timeout=2.0) as server, server.client() as client:
        server.ready()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
        slow = [server.connect() for _ in range(n)]
        for connection in slow:
            connection.sendall(head)
        before = psutil.Process().memory_info().rss
        for piece in b'{"prompt":':
            for connection in slow:
                connection.sendall(bytes([piece]))
            assert client.post("/v1/completions", json={"prompt": "x"}).is_success
        assert psutil.Process().memory_info().rss - before < 16 << 20
        for connection in slow:
            answer = b""
            while piece_of := connection.recv(4096):
                answer += piece_of
            assert answer.startswith(b"HTTP/1.1 408")
            assert b'"code":"body_timeout"' in answer
            connection.close()
        eventually(lambda: server.counts() == {("success", "200"): 10, ("failure", "408"): n})
        eventually(lambda: server.idle)
        assert server.bodies.held == 0
        assert client.post("/v1/completions", json={"prompt": "x"}).is_success


@sizes(20, 500)
def test_clients_that_wait_hold_nobody_up(tokenizer: Tokenizer, n: int) -> None:
    """Beside ``n`` idle connections, ``n`` that stop within their header and ``n / 5`` within their body requests are
    served (long form: in at most twice the time, medians of rounds in turn), and nothing of the others stays."""
    _allow_descriptors()
    with live(tokenizer, keep_alive=900.0, body_timeout=900.0) as server, server.client() as client:
        server.ready()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        sent = [b""] * n + [head[:40]] * n + [head + b'{"prompt":'] * (n // 5)
        before = psutil.Process().num_fds()

        def ask() -> float:
            """Milliseconds, the middle of many."""
            times = []
            for _ in range(200 if n >= 500 else 5):
                began = time.perf_counter()
                assert client.post("/v1/completions", json={"prompt": "x"}).is_success
                times.append(1e3 * (time.perf_counter() - began))
            return statistics.median(times)

        ask()
        alone, beside = [], []
        for _ in range(3 if n >= 500 else 1):
            alone.append(ask())
            waiting = [server.connect() for _ in sent]
            for connection, data in zip(waiting, sent, strict=True):
                connection.sendall(data)
            eventually(lambda: server.open == n // 5, 30)
            beside.append(ask())
            for connection in waiting:
                reset(connection)
            eventually(lambda: server.open == 0, 30)
        eventually(lambda: server.idle)
        eventually(lambda: psutil.Process().num_fds() <= before + 2, 30)
        print(f"ms a request: {statistics.median(alone):.2f} alone, {statistics.median(beside):.2f} beside {len(sent)}")
        if n >= 500:
            assert statistics.median(beside) <= 2 * statistics.median(alone)


@needs_native
@pytest.mark.parametrize("seconds", [2, pytest.param(120, marks=pytest.mark.long)])
def test_eight_clients_of_a_real_model(tmp_path: Path, seconds: int) -> None:
    """No failure, nothing left, and in the long form no growth; for hours: tests/server/soak.py."""
    model = write_tiny(tmp_path / "tiny.gguf", metadata={"tokenizer.chat_template": QUIET})
    found = soak(model, seconds)
    print(found)
    assert not found.failures
    assert found.answered
    if seconds >= 60:
        assert found.left
        assert found.growth <= GROWTH
