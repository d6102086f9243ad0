"""The bridge between the engine's worker thread and the event loop: turns of one request as one stream of events.

Owns waiting, back-pressure and withdrawal. Knows no JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from ..config import SERVER_LIMITS
from ..engine.result import Completion, Delta
from ..errors import QueueFull, Qwen35Error
from ..plan import Plan
from .errors import RequestTimedOut

Event = Delta | Completion | Qwen35Error
Sink = Callable[[int, Event], None]

# What an event takes in an answer, roughly: its envelope, a character, a token id, a log-probability.
_CHUNK_BYTES, _CHAR_BYTES, _ID_BYTES, _LOGPROB_BYTES = 320, 4, 12, 40


class Ticket(Protocol):
    """A submitted turn. All methods return at once and are safe to call after its end."""

    def cancel(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Engine(Protocol):
    """What the server needs of the engine; all of it is thread-safe and returns at once."""

    @property
    def state(self) -> str: ...
    def submit_all(
        self, plans: Sequence[Plan], sink: Sink, *, accepted: float | None = None, request_id: str = ""
    ) -> Sequence[Ticket]: ...


class Places:
    """The bounded queue: a request holds a place from before it is tokenised until its turns have ended (C65)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._freed: deque[float] = deque(maxlen=32)

    def take(self) -> Place:
        """Raises QueueFull."""
        if self.taken >= self.limit:
            raise QueueFull("the queue is full")
        self.taken += 1
        return Place(self)

    def give(self) -> None:
        """A place is free again."""
        self.taken -= 1
        self._freed.append(time.monotonic())

    def retry_after(self) -> int:
        """Seconds until the requests that are here now will have ended, at the pace of the last ones."""
        if len(self._freed) < 2:
            return 1
        pace = (self._freed[-1] - self._freed[0]) / (len(self._freed) - 1)
        return max(1, min(round(pace * self.taken), SERVER_LIMITS.max_retry_after))


class Place:
    """One request's place; giving it back twice does no harm."""

    def __init__(self, places: Places) -> None:
        self._places: Places | None = places

    def release(self) -> None:
        """Give it back."""
        if self._places is not None:
            self._places.give()
            self._places = None


class Turns:
    """The turns of one request, submitted together.

    ``next`` gives their events in order; ``close`` withdraws what still runs and may be called at any time.
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
        self.place = place
        self._deltas, self._observe = deltas, observe
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()
        self._arrived = asyncio.Event()
        self._running = len(plans)
        self._bytes, self._max_bytes = 0, max_bytes
        self._paused = self._closed = False
        self._tickets: Sequence[Ticket] = ()
        self._tickets = engine.submit_all(plans, self._sink, accepted=accepted, request_id=request_id)

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
            self.place.release()

    def _sink(self, index: int, event: Event) -> None:
        """Called by the engine in its thread."""
        if self._observe is not None:
            self._observe(index, event, time.perf_counter())
        if isinstance(event, Delta) and not self._deltas:
            return
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._take, index, event)

    def _take(self, index: int, event: Event) -> None:
        if not isinstance(event, Delta):
            self._running -= 1
            if not self._running:
                # The turns hold no state any more: others may start while this client still reads (C52).
                self.place.release()
        if self._closed:
            return
        self._events.append((index, event))
        self._bytes += _size(event)
        if not self._paused and self._bytes > 3 * self._max_bytes // 4:
            self._paused = True
            for ticket in self._tickets:
                ticket.pause()
        self._arrived.set()


def _size(event: Event) -> int:
    if not isinstance(event, Delta):
        return 0
    n_logprobs = sum(1 + len(p.top) for p in event.logprobs)
    return _CHUNK_BYTES + _CHAR_BYTES * len(event.text) + _ID_BYTES * len(event.ids) + _LOGPROB_BYTES * n_logprobs
