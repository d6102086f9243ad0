"""The largest logits of each row: found on the device, put in order on the host. Knows no sampling rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..base import Best
from .interface import Launcher
from .lowering import Go, Step, i32, up

TOP_PART = 8192  # columns of a block: PART of cuda/sample.cu
TOP_THREADS = 1024
TOP_SHARED = 3 * 32 * 4  # bytes: counts of its warps
TOP_MOST = TOP_PART // 2  # logits that can be found: each round must leave less than it was given


class TopK:
    """The k largest logits of each wanted row, 1 <= k <= TOP_MOST and k below the columns of ``logits``."""

    def __init__(self, launcher: Launcher, logits: Any, step: Any, k: int) -> None:
        rows = len(logits)
        self._launcher = launcher
        self._pairs = launcher.empty((rows, 2, k), np.int32)  # bits of logits, columns
        self._launches = _launches(launcher, logits, step, k, self._pairs)
        self._host = launcher.host((rows, 2, k), np.int32)

    def go(self, step: Step) -> None:
        """Launch all rounds."""
        if step.outs:
            for go in self._launches:
                go(step)

    def best(self, n: int) -> Best:
        """Those of the first n rows, when all is done; copies."""
        found = self._launcher.download(self._pairs[:n], self._host[:n]).view(np.uint32)
        pairs = found[:, 1].astype(np.uint64) << 32 | found[:, 0]  # columns differ, so they alone decide the order
        pairs.sort(axis=1)
        return Best((pairs >> 32).astype(np.int32), pairs.astype(np.uint32).view(np.float32))


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
