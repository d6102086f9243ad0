"""The server under many clients, over a scripted engine and real sockets. Long forms: ``pytest -m long``.

Short forms run the same code with small numbers and without the bounds on time, which other work on a machine breaks.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import psutil
import pytest

from qwen35rt.tokenizer import Tokenizer
from tests.server.fake import FakeEngine
from tests.server.live import Live, eventually, live

pytestmark = pytest.mark.timeout(1800)


def sizes(short: int, long: int) -> pytest.MarkDecorator:
    """A test with a short form and a long one."""
    return pytest.mark.parametrize("n", [short, pytest.param(long, marks=pytest.mark.long)])


def engine_of(server: Live) -> FakeEngine:
    assert server.engine is not None
    return server.engine


async def ask(server: Live, body: dict[str, Any], leave_after: float | None = None) -> tuple[bytes, float]:
    """One request on a connection of its own -> the whole answer and the seconds to its first byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    began = time.monotonic()
    writer.write(head.encode() + raw)
    try:
        if leave_after is not None:
            await asyncio.sleep(leave_after)
            writer.transport.abort()
            return b"", 0.0
        data = await reader.read(1)
        first = time.monotonic() - began
        return data + await reader.read(), first
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def together(work: Iterator[Coroutine[Any, Any, tuple[bytes, float]]]) -> list[tuple[bytes, float]]:
    """Run all at once."""

    async def run() -> list[tuple[bytes, float]]:
        return await asyncio.gather(*work)

    return asyncio.run(run())


def events(answer: bytes) -> list[Any]:
    """The JSON of a stream that ended as it should."""
    assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
    lines = [line[6:] for line in answer.splitlines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@sizes(40, 1000)
def test_streams_at_once(tokenizer: Tokenizer, n: int) -> None:
    """Every byte of every stream arrives; 99 of 100 see their first byte within 3 s (long form)."""
    with live(tokenizer, parallel=n) as server:
        engine = engine_of(server)
        engine.script = lambda plan: engine.ids(b"word ", *[b"BC"] * (plan.ids[-1] % 20), b"DEF")
        server.ready()
        bodies = [{"prompt": [i % 256], "stream": True, "max_tokens": 50} for i in range(n)]
        answers = together(ask(server, body) for body in bodies)
        for i, (answer, _) in enumerate(answers):
            text = "".join(e["choices"][0]["text"] for e in events(answer))
            assert text == "word " + "BC" * (i % 256 % 20) + "DEF"
        eventually(lambda: server.counts() == {("success", "200"): n})
        eventually(lambda: server.idle)
        if n >= 1000:
            assert statistics.quantiles((first for _, first in answers), n=100)[98] < 3


@sizes(100, 10_000)
def test_requests_in_sequence_do_not_grow_the_process(tokenizer: Tokenizer, n: int) -> None:
    with live(tokenizer, parallel=4) as server, server.client() as client:
        server.ready()
        me = psutil.Process()
        sizes = []
        for i in range(n + n // 10):
            if i == n // 10:  # what is built at first use is there
                sizes.append(me.memory_info().rss)
            body = {"prompt": f"hello {i}", "max_tokens": 4}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4
            if i == n // 10:
                engine_of(server).submitted.clear()
        engine_of(server).submitted.clear()
        sizes.append(me.memory_info().rss)
        assert sizes[1] - sizes[0] <= 5 << 20
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
            work.append(ask(server, body, leave_after=rng.random() * 0.3))
        together(iter(work))
        eventually(lambda: server.idle, 10)
        eventually(lambda: not server.service.live, 10)
        eventually(lambda: me.num_fds() <= before + 2, 10)
        assert sum(server.counts().values()) <= n  # a connection that went before its head came is no request
        engine.say(b"BC")
        answer, _ = asyncio.run(ask(server, {"prompt": "x", "max_tokens": 2}))
        assert b'"text":"BC"' in answer


@sizes(40, 1000)
def test_c65_arrivals_beyond_the_queue_are_refused(tokenizer: Tokenizer, n: int) -> None:
    """Slots and queue are filled, the rest is refused (long form: within 50 ms), and the queue keeps its order."""
    slots, queue = (4, 64) if n >= 1000 else (2, 6)
    with live(tokenizer, parallel=slots, queue=queue) as server:
        engine = engine_of(server)
        engine.delay = 0.05
        engine.forever(b"word ")
        server.ready()

        async def run() -> list[tuple[bytes, float]]:
            body = {"max_tokens": 100_000}
            first = [asyncio.ensure_future(ask(server, body | {"prompt": [i]})) for i in range(slots + queue)]
            while len(engine.places) < slots + queue:
                await asyncio.sleep(0.01)
            rest = []
            for i in range(n - slots - queue):
                rest.append(await ask(server, body | {"prompt": [i % 256]}))
            engine.script = lambda plan: engine.ids(b"BC")
            for job in list(engine.running):
                job.script = iter(engine.ids(b"BC"))
            for job in list(engine.waiting):
                job.script = iter(engine.ids(b"BC"))
            engine.delay = 0
            accepted = await asyncio.gather(*first)
            assert all(a.startswith(b"HTTP/1.1 200") for a, _ in accepted)
            return rest

        refused = asyncio.run(run())
        for answer, _ in refused:
            assert answer.startswith(b"HTTP/1.1 503")
            assert b'"code":"queue_full"' in answer
            assert b"retry-after: " in answer.lower()
        wanted = {("success", "200"): slots + queue, ("failure", "503"): n - slots - queue}
        eventually(lambda: server.counts() == wanted)
        assert len(engine.submitted) == slots + queue
        if n >= 1000:
            assert statistics.quantiles((first for _, first in refused), n=100)[98] < 0.05
