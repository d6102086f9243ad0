"""Connections: taken from a listening socket, read, written, and closed where nothing comes. Hypercorn speaks HTTP.

Owns what a connection may wait and how bytes leave. Knows no route.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.typing import ConnectionState

from .http2 import Protocol

log = logging.getLogger(__name__)

_TICKS = 20  # in which a silence is counted
_HELD_BYTES = 16 << 10  # that wait for the end of the loop's round, so that they leave in one packet


class Silence:
    """Closes connections on which no request has begun for ``seconds``.

    Counts ticks of the event loop, and a tick that comes late counts as one: while the loop is held up nothing is read,
    and that is not the clients' silence.
    """

    def __init__(self, seconds: float) -> None:
        self._period = max(seconds / _TICKS, 0.001)
        self._now = 0
        self._since: dict[Connection, int] = {}  # the longest wait first
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, connection: Connection) -> None:
        """A request is awaited from now on."""
        self._since.pop(connection, None)
        self._since[connection] = self._now
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._period, self._tick)

    def end(self, connection: Connection) -> None:
        """A request's head is there, or the connection has ended."""
        self._since.pop(connection, None)

    def close(self) -> None:
        """Close all that wait."""
        for connection in list(self._since):
            self._close(connection)

    def _tick(self) -> None:
        self._now += 1
        loop = asyncio.get_running_loop()
        for connection, began in self._since.items():
            if self._now - began <= _TICKS:
                break
            # What was read in this round of the loop is looked at first: a request just in time is one.
            loop.call_soon(self._close, connection)
        self._timer = loop.call_later(self._period, self._tick) if self._since else None

    def _close(self, connection: Connection) -> None:
        if self._since.pop(connection, None) is not None:
            connection.give_up()


class _Waiting:
    """Stands in for Hypercorn's task that ends an idle connection, which is one task and one timer for each."""

    def __init__(self, silence: Silence, connection: Connection) -> None:
        self._silence, self._connection = silence, connection

    async def restart(self, task_group: object, action: object) -> None:
        self._silence.begin(self._connection)

    async def stop(self) -> None:
        self._silence.end(self._connection)


class Connection(TCPServer):
    """One client's connection. What is written in one round of the loop leaves together."""

    def __init__(self, *given: Any, silence: Silence) -> None:
        super().__init__(*given)
        self.idle_task = _Waiting(silence, self)  # type: ignore[assignment]
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._closing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until the connection ends."""
        known = self.writer.get_extra_info
        try:
            peer, own = known("socket").getpeername(), known("socket").getsockname()
            tls = known("ssl_object")
            async with TaskGroup(self.loop) as tasks:
                self._task_group = tasks
                self.protocol = Protocol(
                    self.app,
                    self.config,
                    self.context,
                    tasks,
                    ConnectionState(self.state),
                    tls is not None,
                    peer[:2],
                    own[:2],
                    self.protocol_send,
                    alpn_protocol=None if tls is None else tls.selected_alpn_protocol(),
                )
                await self.protocol.initiate()
                await self.idle_task.restart(tasks, self._idle_timeout)
                try:
                    await self._read_data()
                except Exception:
                    await self.protocol.handle(Closed())  # else the group waits for requests that wait to write
                    raise
        except OSError:
            pass
        finally:
            await self._close()

    async def protocol_send(self, event: Event) -> None:
        """Take an event of the protocol; waits where the client reads slowly."""
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        if not self._held:
            self.loop.call_soon(self._flush)
        self._held.append(event.data)
        self._held_bytes += len(event.data)
        if self._held_bytes > _HELD_BYTES:
            self._flush()
        async with self.send_lock:
            try:
                await self.writer.drain()
            except (ConnectionError, RuntimeError):
                await self.protocol.handle(Closed())

    def give_up(self) -> None:
        """Close it: no request has come."""
        self._closing = self.loop.create_task(self._initiate_server_close())

    def _flush(self) -> None:
        if self._held:
            data = b"".join(self._held)
            self._held.clear()
            self._held_bytes = 0
            if not self.writer.is_closing():
                self.writer.write(data)

    async def _close(self) -> None:
        self._flush()
        await super()._close()


class Connections:
    """A listening socket and what is connected to it. ``app`` is an ASGI application without a lifespan."""

    def __init__(self, app: Callable[..., Any], listener: socket.socket, config: Config) -> None:
        """Raises OSError and SSLError for certificates that cannot be used."""
        self._app = ASGIWrapper(app)
        self._listener, self._config = listener, config
        self._ssl = config.create_ssl_context()
        self._context = WorkerContext(None)
        self._silence = Silence(config.keep_alive_timeout)
        self._tasks: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Take connections."""
        self._server = await asyncio.start_server(
            self._connected,
            sock=self._listener,
            backlog=self._config.backlog,
            ssl=self._ssl,
            ssl_handshake_timeout=None if self._ssl is None else self._config.ssl_handshake_timeout,
        )

    async def stop(self, timeout: float) -> None:
        """Take no more, close those that wait; others may end what they do within so many seconds."""
        await self._context.terminated.set()
        if self._server is not None:
            self._server.close()
        else:
            self._listener.close()
        self._silence.close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout)
            for task in late:
                if (writer := self._tasks.get(task)) is not None:
                    writer.transport.abort()  # what a client has not read must not be waited for
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = writer
        task.add_done_callback(self._tasks.pop)
        loop = asyncio.get_running_loop()
        try:
            await Connection(self._app, loop, self._config, self._context, {}, reader, writer, silence=self._silence)
        except (OSError, ssl.SSLError) as e:
            log.debug("a connection broke: %s", e)
        except BaseExceptionGroup as e:
            log.warning("a connection failed", exc_info=e)
            writer.transport.abort()
