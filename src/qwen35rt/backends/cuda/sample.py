"""The largest logits of each row: found on the device, put into rows on the host. Knows no sampling rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base import Float
from .interface import Launcher
from .lowering import Go, Step, i32, up

TOP_PART = 8192  # columns of a block: PART of cuda/sample.cu
TOP_THREADS = 1024
TOP_SHARED = 3 * 32 * 4  # bytes: counts of its warps
TOP_MOST = TOP_PART // 2  # logits that can be found: each round must leave less than it was given


class TopK:
    """The k largest logits of each wanted row, 1 <= k <= TOP_MOST and k at most the columns of ``logits``.

    What is on the host are whole rows that hold -inf but for the k of each: made once, then only those are changed.
    """

    def __init__(self, launcher: Launcher, logits: Any, step: Any, k: int) -> None:
        rows, self._width = logits.shape
        self._launcher, self._k = launcher, k
        self._pairs = launcher.empty((rows, 2, k), np.int32)  # bits of logits, columns
        self._launches = _launches(launcher, logits, step, k, self._pairs)
        self._host = launcher.host((rows, 2, k), np.int32)
        self._rows: Float = np.zeros((0, self._width), np.float32)
        self._filled: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # places in _rows, as if it were flat

    def go(self, step: Step) -> None:
        """Launch all rounds."""
        if step.outs:
            for go in self._launches:
                go(step)

    def rows(self, n: int) -> Float:
        """The first n rows [n, columns] when all is done, valid until the next call."""
        if len(self._rows) < n:
            self._rows = np.full((n, self._width), -np.inf, np.float32)
            self._filled = self._filled[:0]
        found = self._launcher.download(self._pairs[:n], self._host[:n])
        flat = self._rows.reshape(-1)
        flat[self._filled] = -np.inf
        self._filled = (found[:, 1] + self._width * np.arange(n)[:, None]).reshape(-1)
        flat[self._filled] = found[:, 0].reshape(-1).view(np.float32)
        return self._rows[:n]


def _launches(launcher: Launcher, logits: Any, step: Any, k: int, pairs: Any) -> Sequence[Go]:
    """Rounds that leave k of each TOP_PART, until those are few enough for one block."""
    names = {name: launcher.kernel("sample", "", name) for name in ("top_k_parts", "top_k_join", "top_k")}
    rows, n = logits.shape
    given, name = logits, "top_k_parts"
    made = []

    def add(name: str, blocks: int, *args: Any) -> None:
        kernel = names[name]
        made.append(lambda s: kernel((blocks, s.outs, 1), TOP_THREADS, TOP_SHARED, args))

    while given is logits or n > TOP_PART:
        parts = up(n, TOP_PART)
        kept = launcher.empty((rows, parts * k), np.uint64)
        add(name, parts, given, kept, step, *i32(n, k))
        given, name, n = kept, "top_k_join", parts * k
    add("top_k", 1, given, pairs, step, *i32(n, k))
    return made
