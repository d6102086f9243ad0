"""What every endpoint does with a body: read it, decode it where it holds nobody up, tell which fields did nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

from quart import request

from ..config import SERVER_LIMITS
from .record import Record
from .service import Service
from .settings import ServerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")
_PARSE_IN_POOL = 256 << 10  # bytes of a body whose decoding would hold up the event loop


async def read_request(service: Service, parse: Callable[[bytes, ServerSettings], T]) -> T:
    """The body of the request at hand, as ``parse`` reads it."""
    raw = cast(bytes, await request.get_data())
    read = partial(parse, raw, service.settings)
    return await service.in_pool(read) if len(raw) > _PARSE_IN_POOL else read()


def note_ignored(record: Record, names: tuple[str, ...]) -> None:
    """Tell the client and the log which fields had no effect (C8)."""
    names = names[: SERVER_LIMITS.ignored_names]
    if names:
        record.headers["x-ignored-fields"] = ", ".join(names)
        log.info("request %s: fields without effect: %s", record.id, ", ".join(names))
