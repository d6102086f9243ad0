"""Many sequences on one executable: admits turns, makes steps, keeps states for later prompts.

Owns slots, pages, the prefix cache and what runs. One thread at a time; knows no queue limits, no JSON, no text.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

import numpy as np

from ..backends.base import Batch, Executable, Float, StepReport
from ..config import ENGINE
from ..errors import GenerationFailed, Qwen35Error
from ..plan import Plan
from ..tokenizer.base import Tokenizer
from .pools import Pages, Slots
from .prefix import Entry, PrefixCache
from .result import Completion, Delta
from .sampler import make_workspace
from .scheduler import share_rows
from .session import Session, keep_positions
from .turn import Turn

log = logging.getLogger(__name__)

Event = Delta | Completion | Qwen35Error


@dataclass
class Counters:
    """What was done since the start; plain sums."""

    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0  # computed
    cached_tokens: int = 0  # taken from kept states
    queried_tokens: int = 0  # of prompts that were looked up
    generated_tokens: int = 0
    restores: int = 0
    preemptions: int = 0


class Core:
    """Runs up to ``parallel`` turns at once; ``cache_bytes`` bound what kept states and their pages take."""

    def __init__(
        self,
        executable: Executable,
        tokenizer: Tokenizer,
        parallel: int = 1,
        cache_bytes: int = 0,
        beside_decode: int = ENGINE.prefill_rows_beside_decode,
    ) -> None:
        limits = executable.limits
        self.executable, self.tokenizer = executable, tokenizer
        self.parallel, self.beside_decode = parallel, beside_decode
        self.pages, self.slots = Pages(limits.pages), Slots(limits.slots)
        self.cache = PrefixCache(self.pages, self.slots, executable.page_bytes, executable.state_bytes, cache_bytes)
        self.counters = Counters()
        self.waiting: deque[Turn] = deque()
        self.running: list[Session] = []  # in order of arrival
        self._workspace = make_workspace(tokenizer.n_vocab)
        self._page_tokens = limits.page_tokens

    def add(self, turn: Turn) -> None:
        """Put a turn behind those that wait."""
        self.waiting.append(turn)

    def make_turn(self, plan: Plan, accepted: float | None = None) -> Turn:
        """A turn for ``add``. ``accepted``: time.perf_counter() when its request came."""
        return Turn(plan, self.tokenizer, accepted, self._workspace)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self.waiting and not any(not s.turn.paused or s.turn.cancelled for s in self.running)

    def step(self) -> list[tuple[Turn, Event]]:
        """Admit, run one step of the model, draw: -> what happened to which turn, in order.

        A turn ends with one Completion (also when it was cancelled) or one error. A BackendError is raised: with it
        all that is in the pools is lost, and the core cannot be used any more.
        """
        events: list[tuple[Turn, Event]] = []
        self._take_cancelled(events)
        self._admit(events)
        work = self._share()
        if not work:
            return events
        batch, made = self._batch(work)
        logits, report = self.executable.run(batch)
        for entry in made:
            entry.pins -= 1
        self.counters.steps += 1
        self.counters.rows += report.rows
        at = 0
        for session, rows in work:
            n = len(self._wanted(session, rows))
            self._advance(session, rows, logits[at : at + n], report, events)
            at += n
        return events

    def stop(self) -> None:
        """Forget all turns and kept states."""
        self.waiting.clear()
        self.running.clear()
        self.cache.clear()

    def _take_cancelled(self, events: list[tuple[Turn, Event]]) -> None:
        for turn in [t for t in self.waiting if t.cancelled]:
            self.waiting.remove(turn)
            _end(turn, turn.cancel(), events)
        for session in [s for s in self.running if s.turn.cancelled]:
            _end(session.turn, session.turn.cancel(), events)
            self._release(session)

    def _admit(self, events: list[tuple[Turn, Event]]) -> None:
        while self.waiting and len(self.running) < self.parallel:
            turn = self.waiting[0]
            if turn.finish_reason is not None:  # nothing is to be generated (C22)
                _end(turn, None, events)
            elif (session := self._open(turn)) is not None:
                self.running.append(session)
            else:
                return
            self.waiting.popleft()

    def _open(self, turn: Turn) -> Session | None:
        """A session with a slot and the pages of its first slice; None if they cannot be had now."""
        plan = turn.plan
        looked_up = plan.cache and not plan.prompt_logprobs
        source = self.cache.find(turn.ids) if looked_up else None
        if source is not None:
            source.pins += 1  # making room must not take it away
        while (slot := self.slots.take()) is None and self.cache.evict():
            pass
        if slot is None:
            _unpin(source)
            return None
        session = Session(turn, slot, source=source)
        if plan.cache:
            session.keep_at = keep_positions(len(turn.ids), plan.keep_at, ENGINE.keep_every, self._page_tokens)
        if not self._resume(session) or not self._reach(session, self.executable.limits.rows):
            self._drop(session)
            return None
        session.cached = session.held
        if looked_up:
            self.counters.queried_tokens += len(turn.ids)
            self.counters.cached_tokens += session.held
            self.counters.restores += source is not None
        return session

    def _resume(self, session: Session) -> bool:
        """Take over the source's pages: full ones are shared, the one that goes on being filled is copied."""
        source = session.source
        if source is None:
            return True
        full, rest = divmod(source.position, self._page_tokens)
        for page in source.pages[:full]:
            self.pages.share(page)
            session.pages.append(page)
        if rest:
            page = self._take_page()
            if page is None:
                return False
            self.executable.copy_page(source.pages[full], page)
            session.pages.append(page)
        session.held = source.position
        return True

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
            session.pages.append(page)
        return True

    def _share(self) -> list[tuple[Session, int]]:
        """Sessions of the next step and their rows, with pages for them."""
        limits = self.executable.limits
        active = [s for s in self.running if not s.turn.paused]
        shares = share_rows([s.open_rows for s in active], limits.rows, self.beside_decode)
        free_out = limits.out_rows - len(active)  # beyond one wanted row for each
        work = []
        for session, rows in zip(active, shares, strict=True):
            if session.turn.plan.prompt_logprobs and session.held < len(session.turn.plan.ids):
                rows = min(rows, 1 + free_out)
                free_out -= max(rows - 1, 0)
            if rows:
                work.append((session, rows))
        for session, rows in list(work):
            while session in self.running and not self._reach(session, rows):
                self._preempt(self.running[-1])
        return [(s, n) for s, n in work if s in self.running]

    def _preempt(self, session: Session) -> None:
        """Take the youngest session's memory; its turn goes on later, from the tokens that it has."""
        self.counters.preemptions += 1
        self.running.remove(session)
        self._drop(session)
        self.waiting.appendleft(session.turn)

    def _wanted(self, session: Session, rows: int) -> range:
        """Which of its next rows the logits are wanted of."""
        if session.turn.plan.prompt_logprobs and session.held < len(session.turn.plan.ids):
            return range(rows)
        return range(rows - 1, rows) if session.open_rows == rows else range(0)

    def _batch(self, work: list[tuple[Session, int]]) -> tuple[Batch, list[Entry]]:
        """The step, and the entries that it fills, which are pinned until it has run."""
        tokens: list[int] = []
        positions: list[int] = []
        offsets, out_rows, saves, made = [0], [], [], []
        for session, rows in work:
            turn, first = session.turn, len(tokens)
            turn.began(session.cached)
            tokens += turn.ids[session.held : session.held + rows]
            positions += range(session.held, session.held + rows)
            offsets.append(len(tokens))
            out_rows += [first + r for r in self._wanted(session, rows)]
            for at in session.keeps_in(rows):
                entry = self.cache.keep(turn.ids[:at], session.pages[: -(-at // self._page_tokens)])
                if entry is not None:
                    entry.pins += 1
                    made.append(entry)
                    session.kept.append(entry)
                    saves.append((first + at - session.held - 1, entry.slot))
        pages = np.full((len(work), max(len(s.pages) for s, _ in work)), -1, np.int32)
        for row, (session, _) in zip(pages, work, strict=True):
            row[: len(session.pages)] = session.pages
        batch = Batch(
            tokens=np.array(tokens, np.int32),
            positions=np.tile(np.array(positions, np.int32), (3, 1)),
            row_offsets=np.array(offsets, np.int32),
            starts=np.array([s.held for s, _ in work], np.int32),
            slots=np.array([s.slot for s, _ in work], np.int32),
            pages=pages,
            out_rows=np.array(out_rows, np.int32),
            sources=np.array([s.slot if s.source is None else s.source.slot for s, _ in work], np.int32),
            save_rows=np.array([row for row, _ in saves], np.int32),
            save_slots=np.array([slot for _, slot in saves], np.int32),
        )
        return batch, made

    def _advance(
        self, session: Session, rows: int, logits: Float, report: StepReport, events: list[tuple[Turn, Event]]
    ) -> None:
        """Take over what a step computed for a session: log-probabilities of the prompt, the next token."""
        turn, start = session.turn, session.held
        _unpin(session.source)
        session.source = None
        session.held += rows
        prompt_rows = max(0, min(session.held, len(turn.plan.ids)) - start)
        turn.stepped(report, prompt_rows)
        self.counters.prompt_tokens += prompt_rows
        try:
            if turn.plan.prompt_logprobs and prompt_rows:
                turn.read_prompt(start, logits[: min(session.held, len(turn.plan.ids) - 1) - start])
            if session.open_rows:
                return
            delta = turn.draw(logits[-1])
        except Exception as error:
            # The state may hold what made the turn fail: nothing of it may be found by later prompts (B29).
            for entry in session.kept:
                self.cache.remove(entry)
            self.running.remove(session)
            self._drop(session)
            if not isinstance(error, Qwen35Error):
                log.exception("a turn failed")
                error = GenerationFailed(f"the turn failed after {len(turn.ids)} tokens ({type(error).__name__})")
            events.append((turn, error))
            return
        self.counters.generated_tokens += 1
        events.append((turn, delta))
        if turn.finish_reason is not None:
            events.append((turn, turn.completion))
            self._release(session)

    def _release(self, session: Session) -> None:
        """End a session; its last state is kept if it is of use."""
        self.running.remove(session)
        held = session.held
        if session.turn.plan.cache and session.source is None and held:
            pages = session.pages[: -(-held // self._page_tokens)]
            if self.cache.keep(session.turn.ids[:held], pages, session.slot) is not None:
                session.slot = None
        self._drop(session)

    def _drop(self, session: Session) -> None:
        """Give back what a session holds."""
        _unpin(session.source)
        session.source = None
        if session.slot is not None:
            self.slots.give(session.slot)
        for page in session.pages:
            self.pages.drop(page)
        session.slot, session.pages, session.held = None, [], 0


def _end(turn: Turn, delta: Delta | None, events: list[tuple[Turn, Event]]) -> None:
    if delta is not None:
        events.append((turn, delta))
    events.append((turn, turn.completion))


def _unpin(entry: Entry | None) -> None:
    if entry is not None:
        entry.pins -= 1
