"""One worker thread that drives a Core: bounded queue, cancel, pause, restart after a fault.

The only thing that a server uses. Knows no JSON and no HTTP; events leave through sinks, from the worker thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..backends.base import Executable
from ..config import ENGINE
from ..errors import BackendError, Cancelled, EngineLoading, EngineRestarting, EngineStopped, QueueFull, Qwen35Error
from ..plan import Plan
from ..tokenizer.base import Tokenizer
from .core import Core, Counters, Event
from .result import Completion
from .sampler import make_workspace
from .turn import Turn

log = logging.getLogger(__name__)

State = Literal["loading", "ready", "restarting", "stopped", "failed"]
# Called with the turn's index from the worker thread, which holds no lock; must not block.
Sink = Callable[[int, Event], None]


@dataclass(frozen=True)
class EngineSettings:
    """``parallel``: turns at once. ``queue``: requests that wait for a place beside as many that run. ``cache_bytes``:
    bound of kept states and their pages."""

    parallel: int = ENGINE.parallel
    queue: int = ENGINE.queue
    cache_bytes: int = 0
    beside_decode: int = ENGINE.prefill_rows_beside_decode
    max_restarts: int = ENGINE.max_restarts
    restart_window: float = ENGINE.restart_window  # seconds


@dataclass(frozen=True)
class RunningTurn:
    """What one place is doing; ``generated`` tokens so far."""

    request_id: str
    prompt_tokens: int
    prompt_done: int
    generated: int
    paused: bool
    cached: int = 0  # of the prompt, taken from kept states


@dataclass(frozen=True)
class EngineSnapshot:
    """The engine at one moment; counts that belong together may be a step apart."""

    state: State
    reason: str
    parallel: int
    running: tuple[RunningTurn, ...] = ()
    waiting: int = 0  # turns
    requests: int = 0  # that hold a place: running and waiting
    pages: int = 0
    pages_free: int = 0
    state_bytes: int = 0  # of recurrent states in use
    cache_entries: int = 0
    cache_bytes: int = 0
    cache_limit_bytes: int = 0
    restarts: int = 0
    counters: Counters = field(default_factory=Counters)


class Place:
    """A place in the queue, taken before a request is worked on; ``release`` it if the request is refused."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.turns = 0
        self._held = True

    def release(self) -> None:
        """Give it back; done by the engine when the last turn of the request has ended."""
        with self._engine._wake:
            if self._held:
                self._held = False
                self._engine._places -= 1

    def leave(self) -> None:
        """One turn of the request has ended."""
        self.turns -= 1
        if not self.turns:
            self.release()


class Ticket:
    """A submitted turn. Its methods may be called from any thread, also after its end."""

    def __init__(self, engine: Engine, turn: Turn, index: int, sink: Sink, place: Place, request_id: str) -> None:
        self.index, self.request_id = index, request_id
        self._engine, self._turn, self._sink, self._place = engine, turn, sink, place

    def cancel(self) -> None:
        """Take it out of the queue, or end it at the next step; its sink gets Cancelled unless it has ended."""
        self._change(cancelled=True)

    def pause(self) -> None:
        """Give it no further steps, for as long as its reader is behind. Others take its place while they wait."""
        self._change(paused=True)

    def resume(self) -> None:
        """Let it go on."""
        self._change(paused=False)

    def _change(self, *, cancelled: bool | None = None, paused: bool | None = None) -> None:
        with self._engine._wake:
            self._turn.cancelled = self._turn.cancelled or bool(cancelled)
            self._turn.paused = self._turn.paused if paused is None else paused
            self._engine._notify()


class Engine:
    """Runs the turns of many requests. ``open_executable`` is called in the worker thread, at the start and after each
    fault of the backend; ``tokenizer`` is that of its model."""

    def __init__(
        self, open_executable: Callable[[], Executable], tokenizer: Tokenizer, settings: EngineSettings
    ) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.counters = Counters()
        self.state: State = "loading"
        self.reason = ""
        self.restarts = 0
        self._open = open_executable
        self._workspace = make_workspace(tokenizer.n_vocab)
        self._core: Core | None = None
        self._wake = threading.Condition()  # guards what follows, and the flags of turns
        self._news = False  # something came that may give the worker work
        self._stopping = False
        self._places = 0
        self._new: list[Ticket] = []
        self._tickets: dict[Turn, Ticket] = {}  # all that have not ended
        self._faults: list[float] = []
        self._thread = threading.Thread(target=self._work, name="qwen35rt-engine", daemon=True)

    def start(self) -> None:
        """Start the worker; it makes the executable ready and then the state "ready", or "failed"."""
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until it is no longer loading or restarting: -> whether it takes requests now."""
        with self._wake:
            self._wake.wait_for(lambda: self.state not in ("loading", "restarting"), timeout)
            return self.state == "ready"

    def reserve(self) -> Place:
        """A place in the queue for one request. Raises QueueFull, EngineLoading, EngineRestarting, EngineStopped."""
        with self._wake:
            self._check_open()
            if self._places >= self.settings.parallel + self.settings.queue:
                raise QueueFull(f"all places are taken: {self._places} requests run or wait")
            self._places += 1
            return Place(self)

    def submit(
        self, plan: Plan, sink: Sink, *, accepted: float | None = None, request_id: str = "", place: Place | None = None
    ) -> Ticket:
        """One turn; see ``submit_all``."""
        return self.submit_all([plan], sink, accepted=accepted, request_id=request_id, place=place)[0]

    def submit_all(
        self,
        plans: Sequence[Plan],
        sink: Sink,
        *,
        accepted: float | None = None,
        request_id: str = "",
        place: Place | None = None,
    ) -> list[Ticket]:
        """The turns of one request, which share one place (C15). Never blocks.

        ``sink`` gets (index, event): Deltas, then exactly one Completion or error for each turn. ``accepted``:
        time.perf_counter() when the request came. ``place``: from ``reserve``; belongs to the engine from now on.
        Raises what ``reserve`` raises, and RequestError where bans leave no token to draw; then there are no events.
        """
        place = self.reserve() if place is None else place
        try:
            tickets = [
                Ticket(self, Turn(plan, self.tokenizer, accepted, self._workspace), i, sink, place, request_id)
                for i, plan in enumerate(plans)
            ]
            with self._wake:
                self._check_open()
                place.turns = len(tickets)
                self._new += tickets
                self._tickets.update((t._turn, t) for t in tickets)
                self._notify()
        except BaseException:
            place.release()
            raise
        if not tickets:
            place.release()
        return tickets

    def snapshot(self) -> EngineSnapshot:
        """What it is doing, without waiting for a step."""
        with self._wake:
            core, tickets = self._core, dict(self._tickets)
        base = EngineSnapshot(
            self.state,
            self.reason,
            self.settings.parallel,
            requests=self._places,
            restarts=self.restarts,
            counters=replace(self.counters, step_rows=dict(self.counters.step_rows)),
        )
        if core is None:
            return replace(base, waiting=len(tickets))
        turns = []
        for turn in [s.turn for s in list(core.running)]:
            if turn in tickets:
                done = turn.cached + turn.prompt_computed
                name = tickets[turn].request_id
                turns.append(RunningTurn(name, len(turn.plan.ids), done, turn.generated, turn.paused, turn.cached))
        return replace(
            base,
            running=tuple(turns),
            waiting=max(0, len(tickets) - len(turns)),
            pages=core.pages.count,
            pages_free=core.pages.free,
            state_bytes=core.state_bytes,
            cache_entries=core.cache.entries,
            cache_bytes=core.cache.bytes,
            cache_limit_bytes=core.cache.limit_bytes,
        )

    def stop(self) -> None:
        """End now: turns that are left get EngineStopped; waits for the step under way. Not to be called by a sink."""
        with self._wake:
            self._stopping = True
            self._notify()
        if self._thread.is_alive():
            self._thread.join()
        with self._wake:
            self._set_state("stopped")
        self._end_all(EngineStopped("the engine was stopped"))

    def _notify(self) -> None:
        self._news = True
        self._wake.notify_all()

    def _set_state(self, state: State, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self._wake.notify_all()

    def _check_open(self) -> None:
        if self.state == "loading":
            raise EngineLoading("the model is being loaded")
        if self.state == "restarting":
            raise EngineRestarting("the engine is starting again after a fault")
        if self.state != "ready" or self._stopping:
            raise EngineStopped(f"the engine takes no requests: it is {self.state} {self.reason}".rstrip())

    # ------------------------------------------------------------------------------------------ worker thread

    def _work(self) -> None:
        while not self._stopping:
            try:
                self._build()
                self._run()
            except Exception as error:
                if not isinstance(error, Qwen35Error):
                    log.exception("the engine failed")
                if not self._survive(error):
                    break
        self._close()

    def _build(self) -> None:
        core, settings = self._core, self.settings
        waiting = [] if core is None else [*core.waiting]
        self._close()
        executable = self._open()
        self._core = core = Core(
            executable,
            self.tokenizer,
            settings.parallel,
            settings.cache_bytes,
            settings.beside_decode,
            self.counters,
        )
        for turn in waiting:
            core.add(turn)
        with self._wake:
            self._set_state("ready")

    def _run(self) -> None:
        core = self._core
        assert core is not None
        while True:
            with self._wake:
                if self._stopping:
                    return
                self._news = False
                new, self._new = self._new, []
            for ticket in new:
                core.add(ticket._turn)
            steps = self.counters.steps
            events = core.step()
            for turn, event in events:
                self._give(turn, event)
            if not events and self.counters.steps == steps:
                with self._wake:
                    self._wake.wait_for(lambda: self._news)

    def _give(self, turn: Turn, event: Event) -> None:
        """Hand an event to its sink; the last one of a turn ends it here and nowhere else."""
        last = isinstance(event, Completion | Qwen35Error)
        if isinstance(event, Completion) and event.finish_reason == "cancelled":
            event = Cancelled("the turn was cancelled")
        with self._wake:
            ticket = self._tickets.pop(turn, None) if last else self._tickets.get(turn)
            if ticket is None:
                return
            if last:
                ticket._place.leave()
        try:
            ticket._sink(ticket.index, event)
        except Exception:
            log.exception("the reader of request %s failed", ticket.request_id or "-")
            if not last:  # nobody is there for the rest
                with self._wake:
                    turn.cancelled = True
                    if self._tickets.pop(turn, None) is not None:
                        ticket._place.leave()
                    self._notify()

    def _survive(self, error: Exception) -> bool:
        """After a fault: fail the turns that ran. -> whether to start anew."""
        now = time.monotonic()
        self._faults = [t for t in self._faults if now - t < self.settings.restart_window]
        started = self._core is not None or self.restarts > 0
        again = started and len(self._faults) < self.settings.max_restarts and not self._stopping
        self._faults.append(now)
        what = str(error) if isinstance(error, Qwen35Error) else type(error).__name__
        log.error("the engine failed (%s); %s", what, "it starts anew" if again else "it stops")
        with self._wake:
            self._set_state("restarting" if again else "failed", what)
            queued = {t._turn for t in self._new}
        if again:
            self.restarts += 1
            core = self._core
            if core is not None:
                queued.update(t for t in core.waiting if not t.begun)
                core.running.clear()
                core.waiting = type(core.waiting)(t for t in core.waiting if not t.begun)
            self._end_all(EngineRestarting(f"the engine failed and starts anew: {what}"), spare=queued)
        else:
            self._end_all(BackendError(f"the engine failed: {what}"))
        return again

    def _end_all(self, error: Qwen35Error, spare: frozenset[Turn] | set[Turn] = frozenset()) -> None:
        with self._wake:
            turns = [t for t in self._tickets if t not in spare]
        for turn in turns:
            self._give(turn, error)

    def _close(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            try:
                core.executable.close()
            except Exception:
                log.exception("the executable could not be closed")
