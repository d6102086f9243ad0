"""A whole server in a thread, with real sockets; and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import httpx

from qwen35rt.engine.engine import EngineSnapshot, RunningTurn, Sink
from qwen35rt.plan import Plan
from qwen35rt.server.incoming import BODIES, Bodies
from qwen35rt.server.listen import listen
from qwen35rt.server.model import Loaded
from qwen35rt.server.run import Process
from qwen35rt.server.service import Service
from qwen35rt.server.settings import ServerSettings
from qwen35rt.tokenizer import Tokenizer
from tests.server.fake import FakeEngine, Job, loaded

TERM = 15
LONG = {"prompt": "hello", "max_tokens": 100_000, "stream": True}


class CountedEngine(FakeEngine):
    """A scripted engine that tells what it is doing."""

    def submit_all(self, plans: Sequence[Plan], sink: Sink, *, request_id: str, **options: Any) -> list[Job]:
        jobs = super().submit_all(plans, sink, request_id=request_id, **options)
        for job in jobs:
            job.request_id = request_id
        return jobs

    def snapshot(self) -> EngineSnapshot:
        running = tuple(
            RunningTurn(j.request_id, len(t.plan.ids), len(t.plan.ids), j.draws, t.paused)
            for j in list(self.running)
            for t in [j.turn]
        )
        return EngineSnapshot("ready", "", self.slots, running, len(self.waiting), len(self.places))


class Live:
    """A server on 127.0.0.1. ``code`` or ``error``: how its process would have ended; ``exits``: forced ends.
    ``imported``: set when what the application needs is there; None: it is there at once."""

    def __init__(
        self,
        service: Service,
        engine: FakeEngine | None = None,
        metrics: bool = False,
        imported: threading.Event | None = None,
    ) -> None:
        self.service, self.engine = service, engine
        self.lines: list[str] = []
        self.exits: list[int] = []
        self.code: int | None = None
        self.error: BaseException | None = None
        pages = listen("127.0.0.1", 0) if metrics else None
        self.metrics_url = "" if pages is None else f"http://127.0.0.1:{pages.getsockname()[1]}"
        listener = listen("127.0.0.1", 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # else megabytes fit before anybody waits

        def make() -> Service:
            if imported is not None:
                imported.wait(20)
            return service

        self.process = Process(service.settings, make, listener, self.lines.append, pages, self.exits.append)
        self.url = self.process.url
        self.port = int(self.url.rsplit(":", 1)[1])
        self.loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        async def main() -> int:
            self.loop = asyncio.get_running_loop()
            return await self.process.main()

        try:
            self.code = asyncio.run(main())
        except BaseException as e:
            self.error = e

    def __enter__(self) -> Live:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._thread.is_alive():
            self.process.received(TERM)
            self.process.received(TERM)
        self.join()
        if isinstance(self.engine, FakeEngine):
            self.engine.stop()

    def signal(self) -> None:
        """SIGTERM."""
        self.process.received(TERM)

    def join(self, seconds: float = 20) -> int | None:
        """Wait for its end."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the server does not end"
        return self.code

    def ready(self, seconds: float = 30) -> Live:
        """Wait until it says so."""
        eventually(lambda: any("ready on" in line for line in self.lines) or self.error is not None, seconds)
        assert self.error is None
        return self

    @property
    def bodies(self) -> Bodies:
        """What it holds of bodies."""
        assert self.process.app is not None
        found = self.process.app.extensions[BODIES]
        assert isinstance(found, Bodies)
        return found

    @property
    def open(self) -> int:
        """Requests in flight."""
        assert self.process.app is not None
        return len(self.process.app.extensions["qwen35rt"].open)

    @property
    def idle(self) -> bool:
        """Nothing is held any more."""
        assert self.engine is not None
        return not (self.engine.places or self.engine.running or self.engine.waiting or self.service.pace.running)

    def counts(self) -> dict[tuple[str, str], int]:
        """(outcome, status) -> generating requests."""
        page = self.service.metrics.text().decode()
        found: dict[tuple[str, str], int] = {}
        for line in page.splitlines():
            if line.startswith("qwen35rt:requests_total{") and 'endpoint="/v1/completions"' in line:
                labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
                found[labels["outcome"], labels["status"]] = int(float(line.rsplit(" ", 1)[1]))
        return found

    def client(self, **options: Any) -> httpx.Client:
        """An HTTP client of this server."""
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def connect(
        self, body: Any = None, path: str = "/v1/completions", narrow: bool = False, **headers: str
    ) -> socket.socket:
        """A raw connection on which a request was sent; without ``body`` nothing was. ``narrow``: it takes little."""
        found = socket.socket()
        if narrow:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        found.settimeout(30)
        found.connect(("127.0.0.1", self.port))
        if body is not None:
            raw = json.dumps(body).encode()
            lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(raw)}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            found.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
        return found


def live(tokenizer: Tokenizer, *, delay: float = 0.0, metrics: bool = False, **settings: Any) -> Live:
    """A server over a scripted engine with ``delay`` seconds a step."""
    chosen = ServerSettings(**settings)
    engine = CountedEngine(tokenizer, chosen.parallel, chosen.queue_places)
    engine.delay = delay
    return Live(Service(chosen, lambda: loaded(engine, n_ctx=1 << 20)), engine, metrics)


def failing(error: Exception, **settings: Any) -> Live:
    """A server whose model cannot be loaded."""

    def open_model() -> Loaded:
        raise error

    return Live(Service(ServerSettings(**settings), open_model))


def engine_of(server: Live) -> FakeEngine:
    """Of a server that has a scripted one."""
    assert server.engine is not None
    return server.engine


def reset(connection: socket.socket) -> None:
    """Break a connection off, as a client that is killed does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_events(connection: socket.socket, n: int) -> bytes:
    """Read until so many events of a stream have come."""
    data = b""
    while data.count(b"data: ") < n:
        piece = connection.recv(4096)
        assert piece, data
        data += piece
    return data


def eventually(test: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
