"""Many sequences on one executable: admits turns, makes steps, keeps states for later prompts.

Owns slots, pages, the prefix cache and what runs. One thread at a time; knows no queue limits, no JSON, no text.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ..backends.base import Best, Executable, Int, Logits, StepReport
from ..config import ENGINE
from ..errors import ConfigError, GenerationFailed, OutOfMemory, Qwen35Error
from ..tokenizer.base import Tokenizer
from .batch import make_batch
from .pools import Pages, Slots
from .prefix import Entry, PrefixCache
from .result import Completion, Delta
from .sampler import check_finite
from .scheduler import share_rows
from .session import Session, keep_positions
from .turn import Turn

log = logging.getLogger(__name__)

Event = Delta | Completion | Qwen35Error
Events = list[tuple[Turn, Event]]


@dataclass
class Counters:
    """What was done since the start."""

    steps: int = 0
    rows: int = 0
    step_rows: dict[int, int] = field(default_factory=dict)  # rows -> steps that had so many
    turn_steps: int = 0  # turns that had rows in a step, summed over steps
    longest: int = 0  # tokens of the longest sequence
    prompt_tokens: int = 0  # computed
    cached_tokens: int = 0  # taken from kept states
    queried_tokens: int = 0  # of prompts that were looked up
    generated_tokens: int = 0
    queries: int = 0
    restores: int = 0
    preemptions: int = 0
    evictions: int = 0

    def reset(self) -> None:
        """Count from nothing again."""
        vars(self).update(vars(Counters()))


class Core:
    """Runs up to ``parallel`` turns at once; ``cache_bytes`` bound what kept states and their pages take.

    A turn that is ``paused`` gets no rows; while others wait it gives its place and its memory to them.
    Raises ConfigError where the executable has no slot or row for each of so many turns.
    """

    def __init__(
        self,
        executable: Executable,
        tokenizer: Tokenizer,
        parallel: int = 1,
        cache_bytes: int = 0,
        beside_decode: int = ENGINE.prefill_rows_beside_decode,
        counters: Counters | None = None,
    ) -> None:
        limits = executable.limits
        most = min(limits.rows, limits.out_rows, limits.slots)
        if not 1 <= parallel <= most or beside_decode < 1:
            raise ConfigError(f"{parallel} turns at once, {beside_decode} rows beside them; at most {most}, at least 1")
        self.executable, self.tokenizer = executable, tokenizer
        self.parallel, self.beside_decode = parallel, beside_decode
        self.pages, self.slots = Pages(limits.pages), Slots(limits.slots)
        self.cache = PrefixCache(self.pages, self.slots, executable.page_bytes, executable.state_bytes, cache_bytes)
        self.counters = counters or Counters()
        self.waiting: deque[Turn] = deque()
        self.running: list[Session] = []  # in order of arrival
        self.top = ENGINE.top_k_on_device  # logits of a row that a step asks for, if that is enough
        self._page_tokens = limits.page_tokens
        self._evicted = self.counters.evictions

    @property
    def state_bytes(self) -> int:
        """Of the recurrent states in use: those of turns that run and those that are kept."""
        return (self.slots.count - self.slots.free) * self.executable.state_bytes

    def add(self, turn: Turn) -> None:
        """Put a turn behind those that wait."""
        self.waiting.append(turn)

    def step(self) -> Events:
        """Admit, run one step of the model, draw: -> what happened to which turn, in order.

        A turn ends with one Completion (also when it was cancelled) or one error; what it held is free by then.
        Nothing happened and ``counters.steps`` is as before: there is nothing to do until a turn comes, goes on or is
        cancelled. A BackendError is raised: with it all that is in the pools is lost, and the core cannot be used any
        more; turns are not touched by that and may be added to another core.
        """
        events: Events = []
        self._take_cancelled(events)
        self._admit(events)
        work = self._share(events)
        if work:
            self._run(work, events)
        self.counters.evictions = self._evicted + self.cache.evictions
        return events

    @contextmanager
    def lend(self, tokens: int) -> Iterator[tuple[int, Int]]:
        """-> a slot and the numbers of pages for so many tokens, for use outside of any turn.

        Those that run give up their places until the next step. Raises OutOfMemory.
        """
        while self.running:
            self._set_aside(self.running[-1], keep=True)
        slot = self._take_slot()
        pages: list[int] = []
        try:
            while len(pages) * self._page_tokens < tokens and (page := self._take_page()) is not None:
                pages.append(page)
            if slot is None or len(pages) * self._page_tokens < tokens:
                raise OutOfMemory(f"no memory for a sequence of {tokens} tokens")
            yield slot, np.array(pages, np.int32)
        finally:
            if slot is not None:
                self.slots.give(slot)
            for page in pages:
                self.pages.drop(page)

    def _take_cancelled(self, events: Events) -> None:
        for turn in [t for t in self.waiting if t.cancelled]:
            self.waiting.remove(turn)
            _end(turn, turn.cancel(), events)
        for session in [s for s in self.running if s.turn.cancelled]:
            _end(session.turn, session.turn.cancel(), events)
            self._leave(session, keep=True)

    def _admit(self, events: Events) -> None:
        while (turn := next((t for t in self.waiting if not t.paused), None)) is not None:
            if turn.finish_reason is not None:  # nothing is to be computed (C22)
                _end(turn, None, events)
            elif len(self.running) < self.parallel and (session := self._open(turn)) is not None:
                self.running.append(session)
            elif self._set_aside_paused():
                continue
            elif self.running:
                return
            else:
                events.append((turn, OutOfMemory(f"no memory for a prompt of {len(turn.ids)} tokens")))
            self.waiting.remove(turn)

    def _open(self, turn: Turn) -> Session | None:
        """A session with a slot and the pages of its tokens; None if they cannot be had now."""
        looked_up = turn.plan.cache and not turn.plan.prompt_logprobs
        source = self.cache.find(turn.ids) if looked_up else None
        session = self._open_from(source, turn)
        if session is None and source is not None and not self.running:
            session = self._open_from(None, turn)  # the source itself is in the way
        if session is not None and looked_up and not turn.begun:
            self.counters.queries += 1
            self.counters.queried_tokens += len(turn.ids)
            self.counters.cached_tokens += session.held
            self.counters.restores += session.held > 0
        return session

    def _open_from(self, source: Entry | None, turn: Turn) -> Session | None:
        if source is not None:
            source.pins += 1  # making room must not take it away
        if (slot := self._take_slot()) is None:
            _unpin(source)
            return None
        session = Session(turn, slot, source=source)
        if not (self._resume(session) and self._reach(session, len(turn.ids)) and self._spare_pages()):
            self._drop(session)
            return None
        if turn.plan.cache:
            session.keep_at = keep_positions(len(turn.ids), turn.plan.keep_at, ENGINE.keep_every, self._page_tokens)
        session.cached = session.held
        return session

    def _resume(self, session: Session) -> bool:
        """Take over the source's pages: full ones are shared, the one that goes on being filled is copied."""
        source = session.source
        if source is None:
            return True
        full, rest = divmod(source.position, self._page_tokens)
        for shared in source.pages[:full]:
            self.pages.share(shared)
            session.add_page(shared)
        if rest:
            page = self._take_page()
            if page is None:
                return False
            self.executable.copy_page(source.pages[full], page)
            session.add_page(page)
        session.held = source.position
        return True

    def _spare_pages(self) -> bool:
        """Whether each of those that run can have one more page: otherwise a new one would soon lose its own."""
        while self.pages.free < len(self.running) and self.cache.evict():
            pass
        return self.pages.free >= len(self.running)

    def _take_slot(self) -> int | None:
        while (slot := self.slots.take()) is None and self.cache.evict():
            pass
        return slot

    def _take_page(self) -> int | None:
        while (page := self.pages.take()) is None and self.cache.evict():
            pass
        return page

    def _reach(self, session: Session, rows: int) -> bool:
        """Pages for so many more rows, at most for the tokens that there are."""
        end = min(session.held + rows, len(session.turn.ids))
        while len(session.pages) * self._page_tokens < end:
            page = self._take_page()
            if page is None:
                return False
            session.add_page(page)
        return True

    def _share(self, events: Events) -> list[tuple[Session, int]]:
        """Sessions of the next step and their rows, with pages for them."""
        limits = self.executable.limits
        active = [s for s in self.running if not s.turn.paused]
        shares = share_rows([s.open_rows for s in active], limits.rows, self.beside_decode)
        free_out = limits.out_rows - len(active)  # beyond one wanted row for each
        work = []
        for session, rows in zip(active, shares, strict=True):
            if session.reads_prompt:
                rows = min(rows, 1 + free_out)
                free_out -= max(rows - 1, 0)
            if rows:
                work.append((session, rows))
        for session, rows in work:
            while session in self.running and not self._reach(session, rows):
                self._make_room(events)
        return [(s, n) for s, n in work if s in self.running]

    def _make_room(self, events: Events) -> None:
        """Take the memory of one that is paused, else of the youngest; its turn goes on later, from the tokens that it
        has. One that is alone and has too little fails."""
        if self._set_aside_paused():
            return
        session = self.running[-1]
        if len(self.running) > 1:
            self._set_aside(session, keep=False)
            return
        self._leave(session, keep=False)
        events.append((session.turn, OutOfMemory(f"no memory for a sequence of {len(session.turn.ids)} tokens")))

    def _set_aside_paused(self) -> bool:
        session = next((s for s in reversed(self.running) if s.turn.paused), None)
        if session is not None:
            self._set_aside(session, keep=True)
        return session is not None

    def _set_aside(self, session: Session, keep: bool) -> None:
        self.counters.preemptions += 1
        self._leave(session, keep)
        self.waiting.appendleft(session.turn)

    def _run(self, work: list[tuple[Session, int]], events: Events) -> None:
        saves = []
        first = 0  # row of the batch
        for session, rows in work:
            session.turn.began(session.cached)
            for at in session.keeps_in(rows):
                entry = self.cache.keep(session.turn.ids[:at], session.pages[: -(-at // self._page_tokens)])
                if entry is not None:
                    entry.pins += 1  # it is found by none before it is filled, but it must not be dropped either
                    session.kept.append(entry)
                    saves.append((first + at - session.held - 1, entry.slot))
            first += rows
        top = self._top(work)
        logits, report = self.executable.run(make_batch(work, saves), top=top)
        last = self._last_rows(work, logits)
        self.counters.steps += 1
        self.counters.rows += first
        self.counters.step_rows[first] = self.counters.step_rows.get(first, 0) + 1
        self.counters.turn_steps += len(work)
        at = 0
        for (session, rows), row in zip(work, last, strict=True):
            for entry in session.kept:
                entry.pins -= 1
            n = session.out_rows(rows)
            self._advance(session, rows, logits[at : at + n], row, report, events)
            at += n

    def _top(self, work: list[tuple[Session, int]]) -> int:
        """How many of each row's largest logits a step asks for; 0: all. Penalties and bans may take half of them."""
        for session, rows in work:
            draws = rows == session.open_rows
            if session.reads_prompt or (draws and not 0 < session.turn.needs_best <= self.top // 2):
                return 0
        return self.top

    def _last_rows(self, work: list[tuple[Session, int]], logits: Logits) -> list[Logits]:
        """Each session's last row, whole where the largest logits do not decide its draw.

        All are there before the first turn changes: what the device may raise leaves turns as they were.
        """
        last: list[Logits] = []
        at = -1
        for session, rows in work:
            at += session.out_rows(rows)
            draws = rows == session.open_rows
            row: Logits = logits[at]
            if draws and isinstance(row, Best) and not session.turn.enough(row):
                row = self.executable.full_logits(at)
            last.append(row)
        return last

    def _advance(
        self, session: Session, rows: int, logits: Logits, last: Logits, report: StepReport, events: Events
    ) -> None:
        """Take over what a step computed for a session: log-probabilities of the prompt, the next token."""
        turn, start, prompt = session.turn, session.held, len(session.turn.plan.ids)
        _unpin(session.source)
        session.source = None
        session.held += rows
        self.counters.longest = max(self.counters.longest, session.held)
        turn.stepped(report, session.held)
        self.counters.prompt_tokens += max(0, min(session.held, prompt) - start)
        try:
            if turn.plan.prompt_logprobs and start < prompt and not isinstance(logits, Best):  # see _top
                turn.read_prompt(start, logits[: min(session.held, prompt - 1) - start])
            if session.open_rows:
                check_finite(last)
                session.kept.clear()
                return
            delta = turn.draw(last)
        except Exception as error:
            self._fail(session, error, events)
            return
        session.kept.clear()
        self.counters.generated_tokens += 1
        events.append((turn, delta))
        if turn.finish_reason is not None:
            self._leave(session, keep=True)
            events.append((turn, turn.completion))

    def _fail(self, session: Session, error: Exception, events: Events) -> None:
        """End a session whose step went wrong. The states that the step made may hold what made it fail, so no later
        prompt may find them (B29); those of earlier steps were followed by sound logits."""
        for entry in session.kept:
            self.cache.remove(entry)
        session.kept.clear()
        self._leave(session, keep=False)
        if isinstance(error, GenerationFailed):
            error = GenerationFailed(f"{error} after {session.held} tokens and its state dropped")
        elif not isinstance(error, Qwen35Error):
            log.exception("a turn failed", exc_info=error)
            error = GenerationFailed(f"the turn failed ({type(error).__name__}) and its state was dropped")
        events.append((session.turn, error))

    def _leave(self, session: Session, keep: bool) -> None:
        """End a session; its state is kept for later prompts if it is asked for, sound and of use."""
        self.running.remove(session)
        held = session.held
        if keep and session.turn.plan.cache and session.source is None and held:
            pages = session.pages[: -(-held // self._page_tokens)]
            if self.cache.keep(session.turn.ids[:held], pages, session.slot) is not None:
                session.slot = -1  # the entry has it
        self._drop(session)

    def _drop(self, session: Session) -> None:
        """Give back what a session holds."""
        _unpin(session.source)
        session.source = None
        if session.slot >= 0:
            self.slots.give(session.slot)
        for page in session.pages:
            self.pages.drop(page)
        session.slot = -1
        session.pages.clear()


def _end(turn: Turn, delta: Delta | None, events: Events) -> None:
    if delta is not None and (delta.text or delta.ids):
        events.append((turn, delta))
    events.append((turn, turn.completion))


def _unpin(entry: Entry | None) -> None:
    if entry is not None:
        entry.pins -= 1
