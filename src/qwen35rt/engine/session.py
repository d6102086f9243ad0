"""One running sequence: its turn, and the slot and pages that hold its state."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from .prefix import Entry
from .turn import Turn


@dataclass(eq=False)
class Session:
    """``held``: tokens of ``turn.ids`` that are in the state and the pages, ``cached`` of them since it was opened.
    ``source``: the entry that the first step reads the state from; None once that is in the slot. ``kept``: entries
    that this session made; ``keep_at``: positions at which more are wanted, rising."""

    turn: Turn
    slot: int | None
    held: int = 0
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    source: Entry | None = None
    kept: list[Entry] = field(default_factory=list)
    keep_at: tuple[int, ...] = ()

    @property
    def open_rows(self) -> int:
        """Tokens that are not in the state yet: 1 while it decodes."""
        return len(self.turn.ids) - self.held

    def keeps_in(self, rows: int) -> tuple[int, ...]:
        """Wanted positions that the next ``rows`` tokens reach."""
        first = bisect_right(self.keep_at, self.held)
        return self.keep_at[first : bisect_right(self.keep_at, self.held + rows)]


def keep_positions(length: int, wanted: tuple[int, ...], every: int, page_tokens: int) -> tuple[int, ...]:
    """Where the state of a prompt is kept: at the wanted positions, else at the last two multiples of ``page_tokens``
    below its length; and at every multiple of ``every``."""
    last = (length - 1) // page_tokens * page_tokens
    ends = wanted or (last - page_tokens, last)
    return tuple(sorted({at for at in (*ends, *range(every, length, every)) if 0 < at < length}))
