"""One running sequence: its turn, and the slot and pages that hold its state."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from ..backends.base import Int
from .prefix import Entry
from .turn import Turn


@dataclass(eq=False)
class Session:
    """``held``: tokens of ``turn.ids`` that are in the state and the pages, ``cached`` of them since it was opened.
    ``source``: the entry that the first step reads the state from; None once that is in the slot. ``keep_at``:
    positions at which the state is to be kept, rising; ``kept``: entries that the step under way fills."""

    turn: Turn
    slot: int
    held: int = 0
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    source: Entry | None = None
    kept: list[Entry] = field(default_factory=list)
    keep_at: tuple[int, ...] = ()
    _table: Int = field(default_factory=lambda: np.zeros(16, np.int32))

    @property
    def table(self) -> Int:
        """Numbers of the pages, int32 [pages]."""
        return self._table[: len(self.pages)]

    def add_page(self, page: int) -> None:
        """One more page, which the session holds from now on."""
        if len(self.pages) == len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        self._table[len(self.pages)] = page
        self.pages.append(page)

    @property
    def open_rows(self) -> int:
        """Tokens that are not in the state yet: 1 while it decodes."""
        return len(self.turn.ids) - self.held

    @property
    def reads_prompt(self) -> bool:
        """Whether the logits of its next rows are all wanted."""
        return self.turn.plan.prompt_logprobs and self.held < len(self.turn.plan.ids)

    def out_rows(self, rows: int) -> int:
        """How many of its next ``rows`` tokens, the last ones, the logits are wanted of: of one at least, which shows
        whether the state is sound."""
        return rows if self.reads_prompt else 1

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
