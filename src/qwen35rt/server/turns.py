"""The bridge between the engine's worker thread and the event loop: turns of one request as one stream of events.

Owns waiting, back-pressure and withdrawal. Knows no JSON.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ..config import SERVER_LIMITS
from ..engine.core import Event
from ..engine.engine import EngineSnapshot, Sink
from ..engine.result import Delta
from ..plan import Plan
from .errors import RequestTimedOut

# What an event takes in an answer, roughly: its envelope, a character, a token id, a log-probability.
_CHUNK_BYTES, _CHAR_BYTES, _ID_BYTES, _LOGPROB_BYTES = 320, 4, 12, 40


class Ticket(Protocol):
    """A submitted turn. All methods return at once and are safe to call after its end."""

    def cancel(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Place(Protocol):
    """A request's place in the queue; giving it back twice does no harm."""

    def release(self) -> None: ...


class Engine(Protocol):
    """What the server needs of the engine; all of it is thread-safe and returns at once."""

    @property
    def state(self) -> str: ...
    def reserve(self) -> Place: ...
    def snapshot(self) -> EngineSnapshot: ...
    def submit_all(
        self, plans: Sequence[Plan], sink: Sink, *, accepted: float | None, request_id: str, place: Any
    ) -> Sequence[Ticket]: ...


class Pace:
    """How fast requests end, for the time after which a refused one may come again."""

    def __init__(self) -> None:
        self.running = 0  # requests that hold a place
        self._ended: deque[float] = deque(maxlen=32)

    def begin(self) -> None:
        """A request got a place."""
        self.running += 1

    def end(self) -> None:
        """A request has ended."""
        self.running -= 1
        self._ended.append(time.monotonic())

    def retry_after(self) -> int:
        """Seconds until the requests that are here now will have ended, at the pace of the last ones."""
        if len(self._ended) < 2:
            return 1
        pace = (self._ended[-1] - self._ended[0]) / (len(self._ended) - 1)
        return max(1, min(round(pace * self.running), SERVER_LIMITS.max_retry_after))


class Turns:
    """The turns of one request, submitted together.

    ``place``: from the engine's ``reserve``; the engine gives it back when the last turn has ended, so that others may
    start while this client still reads (C52). ``next`` gives their events in order; ``close`` withdraws what still runs
    and may be called at any time.
    ``deltas`` False: only results and errors are wanted. ``observe``: told of each event in the worker thread, with
    the time at which it came. Raises what the engine's ``submit_all`` raises.
    """

    def __init__(
        self,
        engine: Engine,
        plans: Sequence[Plan],
        place: Place,
        *,
        accepted: float,
        deadline: float,
        request_id: str = "",
        deltas: bool = True,
        max_bytes: int = SERVER_LIMITS.stream_bytes,
        observe: Callable[[int, Event, float], None] | None = None,
    ) -> None:
        self.request_id, self.plans = request_id, plans
        self._place = place
        self._deltas, self._observe = deltas, observe
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()
        self._given: list[tuple[int, Event]] = []  # by the engine's thread, not yet taken by the loop
        self._arrived = asyncio.Event()
        self._running = len(plans)
        # Guards what both threads change. Held while tickets are told too: in the other order of the two calls a turn
        # that is to go on would stay paused.
        self._lock = threading.Lock()
        self._bytes, self._max_bytes = 0, max_bytes
        self._paused = self._closed = False
        self._tickets: Sequence[Ticket] = ()
        self._tickets = engine.submit_all(plans, self._sink, accepted=accepted, request_id=request_id, place=place)

    @property
    def held_bytes(self) -> int:
        """What waits for the client, roughly."""
        return self._bytes

    async def __aenter__(self) -> Turns:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    async def next(self, timeout: float | None = None) -> tuple[int, Event] | None:
        """The next event and the number of its turn; None if none came within ``timeout`` seconds.

        Raises RequestTimedOut when the request as a whole has taken too long.
        """
        wait_until = None if timeout is None else time.perf_counter() + timeout
        while not self._events:
            now = time.perf_counter()
            if now >= self._deadline:
                raise RequestTimedOut("the request took longer than this server allows")
            if wait_until is not None and now >= wait_until:
                return None
            until = self._deadline if wait_until is None else min(self._deadline, wait_until)
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(until - now):
                    await self._arrived.wait()
        index, event = self._events.popleft()
        with self._lock:
            self._bytes -= _size(event)
            if self._paused and self._bytes <= self._max_bytes // 2:
                self._paused = False
                for ticket in self._tickets:
                    ticket.resume()
        return index, event

    def close(self) -> None:
        """Withdraw turns that still run; their place is free at once."""
        if not self._closed:
            self._closed = True
            self._events.clear()
            if self._running:
                for ticket in self._tickets:
                    ticket.cancel()
            self._place.release()

    def fail(self, error: Event) -> None:
        """Withdraw what still runs; behind the events that are here already comes ``error``."""
        if not self._closed and self._running:
            for ticket in self._tickets:
                ticket.cancel()
            self._events.append((0, error))
            self._arrived.set()

    def _sink(self, index: int, event: Event) -> None:
        """Called by the engine in its thread."""
        if self._observe is not None:
            self._observe(index, event, time.perf_counter())
        if isinstance(event, Delta):
            if not self._deltas:
                return
            self._hold_back(event)
        with self._lock:
            first = not self._given
            self._given.append((index, event))
        if first:  # else the loop has not come to the last ones yet and takes this one with them
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._take)

    def _hold_back(self, delta: Delta) -> None:
        """Pause where a reader is far behind. Done in the engine's thread: the event loop may be behind as well."""
        with self._lock:
            self._bytes += _size(delta)
            if not self._paused and self._tickets and self._bytes > 3 * self._max_bytes // 4:
                self._paused = True
                for ticket in self._tickets:
                    ticket.pause()

    def _take(self) -> None:
        with self._lock:
            given, self._given = self._given, []
        self._running -= sum(not isinstance(event, Delta) for _, event in given)
        if not self._closed:
            self._events.extend(given)
            self._arrived.set()


def _size(event: Event) -> int:
    if not isinstance(event, Delta):
        return 0
    logprobs = event.logprobs if event.prompt_logprobs is None else event.logprobs + event.prompt_logprobs
    n_logprobs = sum(1 if p is None else 1 + len(p.top) for p in logprobs)
    return _CHUNK_BYTES + _CHAR_BYTES * len(event.text) + _ID_BYTES * len(event.ids) + _LOGPROB_BYTES * n_logprobs
