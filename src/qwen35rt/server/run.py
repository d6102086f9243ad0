"""The server's process: listens, loads, says that it is ready, drains and ends. Hypercorn runs in-process.

Owns sockets, signals and exit codes. Prints nothing: lines for people go to ``notify``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config

from ..config import SERVER
from ..errors import ConfigError
from .app import create_app
from .errors import HostNotAllowed
from .metrics import CONTENT_TYPE
from .record import Asgi, Message, Receive, Send
from .service import Service
from .settings import ServerSettings

log = logging.getLogger(__name__)

Notify = Callable[[str], None]
_WATCH_SECONDS = 0.25  # how soon an engine that has failed for good is noticed
_LOAD_SECONDS = 0.02


def url_of(listener: socket.socket, settings: ServerSettings) -> str:
    """The address that clients use."""
    host, port = listener.getsockname()[:2]
    return f"http{'s' if settings.ssl_cert_file else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def run(service: Service, listener: socket.socket, notify: Notify, metrics: socket.socket | None = None) -> int:
    """Serve until a signal or a fault ends it; -> exit code. To be called in the main thread.

    ``listener`` and ``metrics`` are closed. Raises the error that kept the model from being loaded, and ConfigError.
    """
    process = Process(service, listener, notify, metrics)
    before = {n: signal.signal(n, process.received) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        return asyncio.run(process.main())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Process:
    """The life of a server around one event loop. ``end``: ends the process at once with an exit code."""

    def __init__(
        self,
        service: Service,
        listener: socket.socket,
        notify: Notify,
        metrics: socket.socket | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._service, self._notify, self._end = service, notify, end
        self.url = url_of(listener, service.settings)
        apps: list[tuple[socket.socket, Any]] = [(listener, create_app(service))]
        if metrics is not None:
            apps.append((metrics, metrics_app(service)))
        self._servers = [(app, _config(s, service.settings, tls=s is listener)) for s, app in apps]
        self._received = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signal = asyncio.Event()
        service.on_failure = lambda error: None  # raised by main

    def received(self, number: int, frame: FrameType | None = None) -> None:
        """A signal came, in any thread. The third ends the process at once, even if the event loop hangs."""
        self._received += 1
        if self._received >= 3:
            self._end(128 + number)
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._signal.set)

    async def main(self) -> int:
        """Serve until the end; -> exit code. Raises what kept the model from being loaded."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_loop_exception)
        stop = asyncio.Event()
        servers = [
            asyncio.create_task(hypercorn_serve(app, config, shutdown_trigger=stop.wait))
            for app, config in self._servers
        ]
        life = asyncio.create_task(self._live())
        code = 1
        try:
            await asyncio.wait([life, *servers], return_when=asyncio.FIRST_COMPLETED)
            for server in servers:
                if server.done():  # it cannot end by itself but by a fault
                    server.result()
            code = await life
            return code
        finally:
            life.cancel()
            # A step or a client that holds the server up must not keep the process.
            last = threading.Timer(SERVER.exit_timeout, self._end, (code,))
            last.daemon = True
            last.start()
            stop.set()
            await asyncio.wait(servers)
            last.cancel()

    async def _live(self) -> int:
        """Until the server is to stop; -> exit code. Requests have ended then, or had their time."""
        service = self._service
        while not service.loaded.is_set():
            if await self._signalled(1, _LOAD_SECONDS):
                service.draining = True
                return 0
        if service.failure is not None:
            raise service.failure
        facts = service.model.facts
        self._notify(f"ready on {self.url}, model {facts.id}, context {facts.n_ctx}, device {_device(service)}")
        while not await self._signalled(1, _WATCH_SECONDS):
            if service.model.engine.state == "failed":
                self._notify("the engine failed too often; the server ends")
                await self._until_idle(2, SERVER.end_timeout)
                return 1
        service.draining = True
        n, seconds = service.pace.running, service.settings.shutdown_timeout
        if n:
            self._notify(f"shutting down: {n} requests may go on for {seconds:g} s; a second signal ends them")
        if not await self._until_idle(2, seconds):
            service.halt()
            await self._until_idle(3, SERVER.end_timeout)
        return 0

    async def _until_idle(self, signals: int, seconds: float) -> bool:
        """Wait until no generating request is left, so many signals came, or time is over; -> whether none is left."""
        end = time.monotonic() + seconds
        while self._service.pace.running:
            if await self._signalled(signals, 0.02) or time.monotonic() >= end:
                return not self._service.pace.running
        return True

    async def _signalled(self, count: int, seconds: float) -> bool:
        """Wait for so many signals in all, or so long; -> whether they came."""
        if self._received < count:
            self._signal.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._signal.wait()
        return self._received >= count


def _device(service: Service) -> str:
    facts = service.model.facts
    where = facts.device
    if facts.isa:
        where += f" ({facts.isa}, {facts.threads} {'thread' if facts.threads == 1 else 'threads'})"
    return f"{where}: {facts.reason}"


def _config(listener: socket.socket, settings: ServerSettings, tls: bool) -> Config:
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.backlog = SERVER.backlog
    config.workers = 1
    config.accesslog = None  # requests are logged where they are counted
    config.errorlog = logging.getLogger("qwen35rt.server.hypercorn")
    config.include_server_header = False
    config.h11_max_incomplete_size = settings.max_header
    config.keep_alive_timeout = settings.keep_alive
    config.keep_alive_max_requests = SERVER.keep_alive_requests
    config.graceful_timeout = SERVER.end_timeout  # requests have ended before the server is stopped
    config.shutdown_timeout = SERVER.exit_timeout
    if tls and settings.ssl_cert_file is not None:
        config.certfile, config.keyfile = settings.ssl_cert_file, settings.ssl_key_file
        config.alpn_protocols = ["h2", "http/1.1"]
        config.ssl_handshake_timeout = SERVER.tls_handshake
        try:
            config.create_ssl_context()
        except (OSError, ssl.SSLError) as e:
            raise ConfigError(f"--ssl-cert-file {settings.ssl_cert_file}: {e}") from None
    return config


def metrics_app(service: Service) -> Asgi:
    """ASGI application of --metrics-port: the page of metrics, without a key, and nothing else."""

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            status, text = _metrics_page(service, scope)
            kind = CONTENT_TYPE if status == 200 else "text/plain"
            headers = [(b"content-type", kind.encode()), (b"content-length", str(len(text)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": text})

    return app


def _metrics_page(service: Service, scope: Message) -> tuple[int, bytes]:
    host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    try:
        service.guard.check_host(host)
    except HostNotAllowed as e:
        return 403, str(e).encode()
    if scope["path"] != "/metrics":
        return 404, b"only /metrics is here"
    if scope["method"] not in ("GET", "HEAD"):
        return 405, b"only GET is taken"
    return 200, service.metrics.text()


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Connections that break are no news."""
    error = context.get("exception")
    if isinstance(error, ConnectionError | ssl.SSLError):
        log.debug("a connection broke: %s", error)
    else:
        log.error("%s", context.get("message", "the event loop met a fault"), exc_info=error)
