"""Hypercorn's HTTP/1.1, mended: an answer behind which the connection is closed says so.

Knows no socket.
"""

from __future__ import annotations

from dataclasses import replace

import h11
from hypercorn.protocol.events import Event, Response
from hypercorn.protocol.h11 import H11Protocol


class Http1(H11Protocol):
    """One connection, whose requests come one after the other."""

    async def stream_send(self, event: Event) -> None:
        """Take an event of the request at hand's answer."""
        # What is left of the body of a request that was refused is not waited for: no other request can follow it.
        if isinstance(event, Response) and event.status_code >= 200 and self.connection.their_state is h11.SEND_BODY:
            event = replace(event, headers=[*event.headers, (b"connection", b"close")])
        await super().stream_send(event)
