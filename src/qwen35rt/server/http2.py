"""Hypercorn's HTTP/2, mended: what is held for a client that opens no window is bounded, a client that goes on sending
the body of a request that was refused does not lose its other requests, and priorities are not kept.

Also chooses the protocol of a connection. Knows no socket.
"""

from __future__ import annotations

from typing import Any

from h2.events import PriorityUpdated, RequestReceived
from hypercorn.events import Event, RawData
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h2 import BUFFER_LOW_WATER, H2Protocol, StreamBuffer
from hypercorn.protocol.h11 import H2CProtocolRequiredError, H2ProtocolAssumedError

from .http1 import Http1


class Protocol(ProtocolWrapper):
    """HTTP/1.1 or, where TLS or the client's first bytes say so, HTTP/2."""

    def __init__(self, *given: Any, alpn_protocol: str | None) -> None:
        super().__init__(*given)
        self.protocol = self._http2() if alpn_protocol == "h2" else Http1(*given)

    async def handle(self, event: Event) -> None:
        """Take what the connection has read."""
        try:
            await self.protocol.handle(event)
            return
        except H2ProtocolAssumedError as change:
            data = change.data
            self.protocol = self._http2()
            await self.protocol.initiate()
        except H2CProtocolRequiredError as change:
            data = change.data
            self.protocol = http2 = self._http2()
            await http2.initiate(change.headers, change.settings)
        if data:
            await self.protocol.handle(RawData(data))

    def _http2(self) -> Http2:
        return Http2(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.state,
            self.ssl,
            self.client,
            self.server,
            self.send,
        )


class Http2(H2Protocol):
    """One connection's streams."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.streams = _Streams()

    async def _create_stream(self, request: RequestReceived) -> None:
        await super()._create_stream(request)
        self.stream_buffers[request.stream_id] = _Buffer(self.context.event_class)  # nothing was written yet

    async def _priority_updated(self, event: PriorityUpdated) -> None:
        """Streams share alike (RFC 9113, 5.3.1). Those that a priority names, though they have ended or never begin,
        would be kept with the connection, and the thousandth would end it."""


class _Buffer(StreamBuffer):
    """What a stream has to send. Its writer goes on when there is room, not whenever nothing could be sent."""

    async def pop(self, max_length: int) -> bytes:
        data = bytes(self.buffer[:max_length])
        del self.buffer[:max_length]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data


class _Gone:
    """A stream that was answered before all of its request had come: the rest is dropped."""

    idle = True

    async def handle(self, event: object) -> None:
        pass


class _Streams(dict[int, Any]):
    """Streams by their number, which is looked up whenever data comes."""

    def __missing__(self, number: int) -> _Gone:
        return _Gone()
