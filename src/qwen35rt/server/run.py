"""The server's process: listens, loads, says that it is ready, drains and ends.

Owns sockets, signals and exit codes. Prints nothing: lines for people go to ``notify``. Imports little: connections are
answered before the application and what the model needs are imported.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from hypercorn.config import Config

from ..config import SERVER
from ..errors import ConfigError
from .connections import Connections
from .front import Front
from .settings import ServerSettings

if TYPE_CHECKING:
    from quart import Quart

    from .service import Service

log = logging.getLogger(__name__)

Notify = Callable[[str], None]
_WATCH_SECONDS = 0.25  # how soon an engine that has failed for good is noticed
_LOAD_SECONDS = 0.02


def url_of(listener: socket.socket, settings: ServerSettings) -> str:
    """The address that clients use."""
    host, port = listener.getsockname()[:2]
    return f"http{'s' if settings.ssl_cert_file else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def run(
    settings: ServerSettings,
    make: Callable[[], Service],
    listener: socket.socket,
    notify: Notify,
    metrics: socket.socket | None = None,
) -> int:
    """Serve until a signal or a fault ends it; -> exit code. To be called in the main thread.

    ``make``: imports and builds what is served, called in another thread while connections are taken already.
    ``listener`` and ``metrics`` are closed. Raises the error that kept the model from being loaded, and ConfigError.
    """
    _allow_descriptors()
    process = Process(settings, make, listener, notify, metrics)
    process.on_ready = spare_collector
    before = {n: signal.signal(n, process.received) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        return asyncio.run(process.main())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Process:
    """The life of a server around one event loop. ``end``: ends the process at once with an exit code; ``on_ready``:
    called when the model is loaded."""

    def __init__(
        self,
        settings: ServerSettings,
        make: Callable[[], Service],
        listener: socket.socket,
        notify: Notify,
        metrics: socket.socket | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._settings, self._make, self._notify, self._end = settings, make, notify, end
        self.on_ready: Callable[[], None] = lambda: None
        self.url = url_of(listener, settings)
        self._front, self._pages = Front(settings), Front(settings)
        self._servers = [_connections(self._front, listener, settings, tls=True)]
        if metrics is not None:
            self._servers.append(_connections(self._pages, metrics, settings, tls=False))
        self._received = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signal = asyncio.Event()
        self.app: Quart | None = None  # once it is imported

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
        code = 1
        try:
            for server in self._servers:
                await server.start()
            code = await self._live(await self._start())
            return code
        finally:
            # A step or a client that holds the server up must not keep the process.
            last = threading.Timer(SERVER.exit_timeout, self._end, (code,))
            last.daemon = True
            last.start()
            await asyncio.gather(*(server.stop(SERVER.end_timeout) for server in self._servers))
            if self.app is not None:
                await self.app.shutdown()
            last.cancel()

    async def _start(self) -> Service:
        """Build what is served and begin to load the model. Imports hold the loop up for moments only: in a thread."""
        service, app, pages = await asyncio.to_thread(self._build)
        service.on_failure = lambda error: None  # raised by _live
        self.app = app
        await app.startup()
        self._front.use(app)  # type: ignore[arg-type]
        self._pages.use(pages)
        return service

    def _build(self) -> tuple[Service, Quart, Any]:
        service = self._make()
        from .app import create_app
        from .health import metrics_app

        return service, create_app(service), metrics_app(service)

    async def _live(self, service: Service) -> int:
        """Until the server is to stop; -> exit code. Requests have ended then, or had their time."""
        while not service.loaded.is_set():
            if await self._signalled(1, _LOAD_SECONDS):
                service.draining = True
                self._notify("shutting down: the model was being loaded")
                return 0
        if service.failure is not None:
            raise service.failure
        facts = service.model.facts
        self.on_ready()
        self._notify(f"ready on {self.url}, model {facts.id}, context {facts.n_ctx}, device {_device(service)}")
        while not await self._signalled(1, _WATCH_SECONDS):
            if service.model.engine.state == "failed":
                self._notify(f"the engine failed too often; the server ends: {service.model.engine.snapshot().reason}")
                await self._until_idle(service, 2, SERVER.end_timeout)
                return 1
        service.draining = True
        n, seconds = service.pace.running, self._settings.shutdown_timeout
        what = f"{n} request{'' if n == 1 else 's'} in flight"
        if n:
            what += f", for at most {seconds:g} s; a second signal (Ctrl-C) ends {'it' if n == 1 else 'them'}"
        self._notify(f"shutting down, {what}")
        if not await self._until_idle(service, 2, seconds):
            service.halt()
            await self._until_idle(service, 3, SERVER.end_timeout)
        return 0

    async def _until_idle(self, service: Service, signals: int, seconds: float) -> bool:
        """Wait until no generating request is left, so many signals came, or time is over; -> whether none is left."""
        end = time.monotonic() + seconds
        while service.pace.running:
            if await self._signalled(signals, 0.02) or time.monotonic() >= end:
                return not service.pace.running
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


def _connections(app: Front, listener: socket.socket, settings: ServerSettings, tls: bool) -> Connections:
    config = Config()
    config.backlog = SERVER.backlog
    config.accesslog = None  # requests are logged where they are counted
    config.errorlog = logging.getLogger("qwen35rt.server.hypercorn")
    config.include_server_header = False
    config.h11_max_incomplete_size = settings.max_header
    config.h2_max_header_list_size = settings.max_header
    config.keep_alive_timeout = settings.keep_alive
    config.keep_alive_max_requests = SERVER.keep_alive_requests
    if tls and settings.ssl_cert_file is not None:
        config.certfile, config.keyfile = settings.ssl_cert_file, settings.ssl_key_file
        config.alpn_protocols = ["h2", "http/1.1"]
        config.ssl_handshake_timeout = SERVER.tls_handshake
    try:
        return Connections(app, listener, config)
    except (OSError, ssl.SSLError) as e:
        listener.close()
        raise ConfigError(f"--ssl-cert-file {settings.ssl_cert_file}: {e}") from None


def _allow_descriptors() -> None:
    """As many open connections as the system lets a process have: its usual first limit is too low for a server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = SERVER.descriptors if hard == resource.RLIM_INFINITY else min(SERVER.descriptors, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def spare_collector() -> None:
    """What is loaded stays: the collector of cycles need not look at it again, nor come every few objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(SERVER.collector)


def _loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Connections that break are no news."""
    error = context.get("exception")
    if isinstance(error, ConnectionError | ssl.SSLError):
        log.debug("a connection broke: %s", error)
    else:
        log.error("%s", context.get("message", "the event loop met a fault"), exc_info=error)
