"""Runs a Job and writes its answer: one JSON object, or server-sent events (completions.md, sections 6 and 7).

Owns chunks, keep-alive comments, what happens when a turn fails midway, and clients that do not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from quart import Response
from quart.wrappers.response import ResponseBody

from ..engine.core import Event
from ..engine.result import Completion, Delta, Timings
from ..errors import Qwen35Error
from .answer import Job, Json
from .errors import describe
from .record import Record
from .settings import ServerSettings
from .turns import Turns

log = logging.getLogger(__name__)

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_TOGETHER = 64  # events are written together up to a stream's buffer divided by this
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def answer(job: Job, turns: Turns, record: Record, settings: ServerSettings) -> Response:
    """The answer to a request whose turns are submitted. What fails before a stream begins is raised (C50)."""
    record.at_end(turns.close)
    record.stream = job.stream
    if not job.stream:
        return json_response(await _whole(job, turns, record))
    first = await turns.next(settings.first_event)
    if first is not None and isinstance(first[1], Qwen35Error):
        raise first[1]
    body = EventBody(_Chunks(job, turns, record, settings, first).events(), turns, record, settings.write_timeout)
    response = Response(headers=_HEADERS)
    response.response = body
    response.headers.pop("Content-Length", None)
    response.timeout = None
    return response


def json_response(value: Json | list[Json], status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, content_type="application/json")


async def _whole(job: Job, turns: Turns, record: Record) -> Json:
    done: dict[int, Completion] = {}
    while len(done) < len(job.plans):
        found = await turns.next()
        assert found is not None
        index, event = found
        if isinstance(event, Qwen35Error):
            raise event
        if isinstance(event, Completion):
            done[index] = event
            record.completions.append(event)
    whole = job.whole([done[i] for i in range(len(job.plans))])
    record.finish_reasons += [choice["finish_reason"] for choice in whole["choices"]]
    return whole


class EventBody(ResponseBody):
    """Events as a response's body. A client that does not take one within ``timeout`` seconds is given up (C53)."""

    def __init__(self, events: AsyncIterator[bytes], turns: Turns, record: Record, timeout: float) -> None:
        self._events, self._turns, self._record, self._timeout = events, turns, record, timeout
        self._watch: asyncio.TimerHandle | None = None
        record.at_end(self._disarm)

    async def __aenter__(self) -> EventBody:
        return self

    async def __aexit__(self, kind: object, *error: object) -> None:
        self._turns.close()
        if kind is None:  # the body's end is still to be written; all that was asked for is out (C63)
            self._arm(lambda task: task.cancel())
        else:
            self._disarm()

    def __aiter__(self) -> EventBody:
        return self

    async def __anext__(self) -> bytes:
        self._disarm()
        await asyncio.sleep(0)  # events that are here already must not keep the loop from others and from a lost client
        data = await anext(self._events)
        self._arm(self._give_up)
        return data

    def _arm(self, end: Callable[[asyncio.Task[Any]], object]) -> None:
        """From here until the next call the framework is writing."""
        self._disarm()
        task = asyncio.current_task()
        assert task is not None
        self._watch = asyncio.get_running_loop().call_later(self._timeout, end, task)

    def _disarm(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _give_up(self, task: asyncio.Task[Any]) -> None:
        log.info("request %s: the client does not read", self._record.id)
        self._record.leave()
        self._turns.close()
        task.cancel()


class _Chunks:
    """The events of one streamed answer."""

    def __init__(
        self, job: Job, turns: Turns, record: Record, settings: ServerSettings, first: tuple[int, Event] | None
    ) -> None:
        self._job, self._turns, self._record = job, turns, record
        self._first = first
        self._ping = settings.sse_ping or None
        self._together = settings.max_stream_buffer // _TOGETHER
        self._done: dict[int, Completion] = {}
        self._started = [False] * len(job.writers)

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, ready to be written: those that are here together, so that a busy server writes less."""
        if self._first is None:
            yield PING
        found = self._first
        data = b""
        try:
            while not self._complete:
                found = found or await self._turns.next(self._ping)
                data = PING if found is None else self._write(*found)
                while len(data) < self._together and not self._complete:
                    found = await self._turns.next(0)
                    if found is None:
                        break
                    data += self._write(*found)
                found = None
                if data:
                    yield data
                    data = b""
        except Exception as error:
            # The status line is out: the failure becomes the last chunk (C51).
            if not isinstance(error, Qwen35Error):
                log.exception("request %s failed in its stream", self._record.id)
            self._turns.close()
            yield data + self._failure(error)

    @property
    def _complete(self) -> bool:
        return len(self._done) == len(self._job.plans)

    def _write(self, index: int, event: Event) -> bytes:
        if isinstance(event, Qwen35Error):
            raise event
        writer = self._job.writers[index]
        timings = event.timings if self._job.plans[index].timings else None
        choices = []
        if not self._started[index]:
            self._started[index] = True
            choices += writer.begin()
        if isinstance(event, Delta):
            choices += writer.delta(event)
            return b"".join(self._chunk(c, timings) for c in choices)
        *before, terminal = choices + writer.finish(event)
        return b"".join(self._chunk(c, timings) for c in before) + self._terminal(terminal, index, event)

    def _chunk(self, choice: Json, timings: Timings | None) -> bytes:
        chunk = self._job.envelope([choice], chunk=True)
        if timings is not None:
            chunk["timings"] = timings.as_dict()
        if self._job.include_usage:
            chunk["usage"] = None
        return _event(chunk)

    def _terminal(self, choice: Json, index: int, completion: Completion) -> bytes:
        job = self._job
        self._done[index] = completion
        self._record.completions.append(completion)
        self._record.finish_reasons.append(choice["finish_reason"])
        chunk = job.envelope([choice], chunk=True) | {
            "on_gpu": completion.on_gpu,
            "timings": completion.timings.as_dict(),
            "seed": completion.seed,
        }
        if len(self._done) < len(job.plans):
            if job.include_usage:
                chunk["usage"] = None
            return _event(chunk)
        usage = job.usage([self._done[i] for i in range(len(job.plans))])
        chunk["usage"] = None if job.usage_last and job.include_usage else usage
        data = _event(chunk)
        if job.include_usage:
            data += _event(job.envelope([], chunk=True) | {"usage": usage})
        # All that was asked for has been made: a client that closes now has what it wanted (C63).
        self._record.outcome = "success"
        return data + DONE

    def _failure(self, error: Exception) -> bytes:
        told = describe(error, self._record.id)
        self._record.fail(told.status)
        open_choices = [w.failed() for i, w in enumerate(self._job.writers) if i not in self._done]
        chunk = self._job.envelope(open_choices, chunk=True) | {"error": told.error}
        if self._job.include_usage:
            chunk["usage"] = None
        return _event(chunk)


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
