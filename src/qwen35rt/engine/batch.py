"""Puts the rows of several sessions into one Batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..backends.base import Batch
from .session import Session


def make_batch(work: Sequence[tuple[Session, int]], saves: Sequence[tuple[int, int]]) -> Batch:
    """A step of the next rows of each session. ``saves``: (row of the batch, slot), rows rising."""
    tokens: list[int] = []
    positions: list[int] = []
    offsets: list[int] = [0]
    out_rows: list[int] = []
    pages = np.full((len(work), max(len(s.pages) for s, _ in work)), -1, np.int32)
    for line, (session, rows) in zip(pages, work, strict=True):
        line[: len(session.pages)] = session.table
        tokens += session.turn.ids[session.held : session.held + rows]
        positions += range(session.held, session.held + rows)
        offsets.append(len(tokens))
        out_rows += range(len(tokens) - session.out_rows(rows), len(tokens))
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=np.array([positions] * 3, np.int32),
        row_offsets=np.array(offsets, np.int32),
        starts=np.array([s.held for s, _ in work], np.int32),
        slots=np.array([s.slot for s, _ in work], np.int32),
        pages=pages,
        out_rows=np.array(out_rows, np.int32),
        sources=np.array([s.slot if s.source is None else s.source.slot for s, _ in work], np.int32),
        save_rows=np.array([row for row, _ in saves], np.int32),
        save_slots=np.array([slot for _, slot in saves], np.int32),
    )
