"""What every endpoint does with a body: read it, decode it where it holds nobody up, tell which fields did nothing.

Bodies that are here at once are bounded together, as each is alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

from quart import current_app, request

from ..config import SERVER, SERVER_LIMITS
from ..errors import QueueFull
from .errors import BodyTimedOut, RequestTooLarge
from .record import KEY, Record
from .service import Service
from .settings import ServerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")


class Bodies:
    """Counts the bytes of all bodies that are being received or decoded. ``held``: how many they are now."""

    def __init__(self, settings: ServerSettings) -> None:
        self._limit = max(SERVER_LIMITS.bodies_bytes, settings.max_body)
        self.held = 0

    def add(self, n: int) -> None:
        """``n`` more bytes have come. Raises QueueFull if they are too many."""
        if self.held + n > self._limit:
            raise QueueFull("too much is being sent to this server at once")
        self.held += n

    def release(self, n: int) -> None:
        """``n`` bytes are not needed any more."""
        self.held -= n


BODIES = "qwen35rt.bodies"  # where the application's extensions hold its Bodies


async def read_request(service: Service, parse: Callable[[bytes, ServerSettings], T]) -> T:
    """The body of the request at hand, as ``parse`` reads it. Raises QueueFull, RequestTooLarge and BodyTimedOut."""
    bodies = cast(Bodies, current_app.extensions[BODIES])
    record, settings, raw = record_of(), service.settings, bytearray()
    try:
        try:
            async with asyncio.timeout(settings.body_timeout):
                async for piece in request.body:
                    bodies.add(len(piece))
                    raw += piece
                    if len(raw) > settings.max_body:
                        raise RequestTooLarge(f"the body is larger than {settings.max_body} bytes")
        except TimeoutError:
            raise BodyTimedOut("the body did not come in time") from None
        record.body_bytes = len(raw)
        read = partial(parse, bytes(raw), settings)
        return await service.off_loop(read, len(raw)) if len(raw) > SERVER.short_body else read()
    finally:
        bodies.release(len(raw))


def record_of() -> Record:
    """The record of the request that is being handled."""
    found = cast(dict[str, object], request.scope)[KEY]
    assert isinstance(found, Record)
    return found


def note_ignored(record: Record, names: tuple[str, ...]) -> None:
    """Tell the client and the log which fields had no effect (C8)."""
    names = names[: SERVER_LIMITS.ignored_names]
    if names:
        record.headers["x-ignored-fields"] = ", ".join(names)
        log.info("request %s: fields without effect: %s", record.id, ", ".join(names))
