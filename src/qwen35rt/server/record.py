"""One request from its head to its end: its id, what it asked, how it ended. The one place where it is counted (C62).

Stands around the whole application, so that refusals, answers and clients that leave are seen by the same lines.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import string
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Literal, Protocol

from ..config import SERVER_LIMITS
from ..engine.result import Completion

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Message, Receive, Send], Awaitable[None]]
Outcome = Literal["success", "failure", "cancelled"]

KEY = "qwen35rt.record"  # where the ASGI scope holds it
_LETTERS = string.ascii_letters + string.digits
_CANCEL_SECONDS = 0.1
_LEFT = 499  # status of a request whose client is gone


def random_letters(n: int = 24) -> str:
    """Letters and digits that nobody can guess."""
    number, letters = secrets.randbits(8 * n), ""
    for _ in range(n):
        number, at = divmod(number, len(_LETTERS))
        letters += _LETTERS[at]
    return letters


class Record:
    """``arrived``: time.perf_counter() at the arrival of the head. ``endpoint``: the route's pattern, never the path.
    ``body_bytes``: of its body, once that was read. ``headers``: added to the answer, whatever it is. ``outcome`` and
    ``status`` say how it ended; a stream that fails after its status line sets the status that it would have had.
    ``finish_reasons``: those that its choices told. ``quiet``: not worth a line in the log."""

    def __init__(self, scope: Message) -> None:
        self.arrived = time.perf_counter()
        self.created = int(time.time())
        self.id = _given_id(scope) or f"req-{random_letters()}"
        client = scope.get("client")
        self.client = str(client[0]) if client else ""
        self.endpoint = "unmatched"
        self.body_bytes = 0
        self.stream = False
        self.quiet = False
        self.status: int | None = None
        self.outcome: Outcome | None = None
        self.headers = {"x-request-id": self.id}
        self.completions: list[Completion] = []
        self.finish_reasons: list[str] = []
        self.task: asyncio.Task[Any] | None = None  # that handles it
        self._closers: list[Callable[[], None]] = []

    @property
    def seconds(self) -> float:
        """Since it arrived."""
        return time.perf_counter() - self.arrived

    def at_end(self, close: Callable[[], None]) -> None:
        """Call ``close`` when the request ends, however it does."""
        self._closers.append(close)

    def cancel(self) -> None:
        """The client is gone: end the handler, again and again until it has ended.

        The framework cancels it once, and a wait for the body that ends at that very moment swallows this (asyncio's
        wait_for before Python 3.12).
        """
        if self.task is not None and not self.task.done():
            self.task.cancel()
            asyncio.get_running_loop().call_later(_CANCEL_SECONDS, self.cancel)

    def fail(self, status: int) -> None:
        """It failed after its status line was sent."""
        self.status, self.outcome = status, "failure"

    def leave(self) -> None:
        """Its client is gone or does not read."""
        self.status, self.outcome = _LEFT, "cancelled"

    def close(self) -> None:
        """Release what the request holds."""
        while self._closers:
            self._closers.pop()()


class Counter(Protocol):
    """What is told of each request once, at its end."""

    def request(self, record: Record) -> None: ...


class Recorder:
    """ASGI application around another: gives each HTTP request its record and counts it. ``open``: those in flight."""

    def __init__(self, app: Asgi, counter: Counter) -> None:
        self._app, self._counter = app, counter
        self.open: set[Record] = set()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there is none here; the server says 403, and nobody's log gets a stack
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(scope)
        scope[KEY] = record
        complete = False

        async def sending(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                record.status = message["status"]
                given = list(message.get("headers", ()))
                message["headers"] = given + [(k.encode(), v.encode("latin-1")) for k, v in record.headers.items()]
            elif scope["method"] == "HEAD":
                message["body"] = b""
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                complete = True

        async def receiving() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                asyncio.get_running_loop().call_later(_CANCEL_SECONDS, record.cancel)
            return message

        self.open.add(record)
        try:
            await self._app(scope, receiving, sending)
        finally:
            record.close()
            if record.outcome is None:
                if complete and record.status is not None:
                    record.outcome = "success" if record.status < 400 else "failure"
                else:
                    record.leave()
            self.open.discard(record)
            self._counter.request(record)
            _log(record)


def _given_id(scope: Message) -> str | None:
    """The client's own id if it is visible ASCII of a legal length (C45)."""
    for name, value in scope.get("headers", ()):
        if name == b"x-request-id":
            if 1 <= len(value) <= SERVER_LIMITS.request_id_chars and all(33 <= c <= 126 for c in value):
                return str(value, "ascii")
            return None
    return None


def log_fields(record: Record) -> dict[str, Any]:
    """What the line of a finished request says; None where there is nothing to say."""
    done = record.completions
    timings = done[0].timings if len(done) == 1 else None

    def ms(value: float | None) -> float | None:
        return None if value is None else round(value, 1)

    return {
        "id": record.id,
        "endpoint": record.endpoint,
        "status": record.status,
        "outcome": record.outcome,
        "model": record.headers.get("x-model-id"),
        "stream": record.stream,
        "prompt_n": sum(c.timings.prompt_n for c in done) if done else None,
        "cache_n": sum(c.timings.cache_n for c in done) if done else None,
        "predicted_n": sum(c.timings.predicted_n for c in done) if done else None,
        "queue_ms": ms(timings.queue_ms) if timings else None,
        "prompt_ms": ms(timings.prompt_ms) if timings else None,
        "predicted_ms": ms(timings.predicted_ms) if timings else None,
        "ttft_ms": ms(timings.ttft_ms) if timings else None,
        "total_ms": ms(1e3 * record.seconds),
        "finish_reason": ",".join(record.finish_reasons) or None,
        "on_gpu": all(c.on_gpu for c in done) if done else None,
        "client": record.client,
    }


def _log(record: Record) -> None:
    level = logging.DEBUG if record.quiet else logging.INFO
    if log.isEnabledFor(level):
        fields = log_fields(record)
        line = " ".join(f"{name}={'' if value is None else value}" for name, value in fields.items())
        log.log(level, "%s", "".join(c if c.isprintable() else repr(c)[1:-1] for c in line), extra={"request": fields})
