"""What every endpoint does with a body: read it, decode it where it holds nobody up, tell which fields did nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

from quart import request

from ..config import SERVER, SERVER_LIMITS
from .record import KEY, Record
from .service import Service
from .settings import ServerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")


async def read_request(service: Service, parse: Callable[[bytes, ServerSettings], T]) -> T:
    """The body of the request at hand, as ``parse`` reads it."""
    raw = cast(bytes, await request.get_data())
    record_of().body_bytes = len(raw)
    read = partial(parse, raw, service.settings)
    return await service.off_loop(read, len(raw)) if len(raw) > SERVER.short_body else read()


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
