"""The largest logits of each row, found on the device. Knows no sampling rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .interface import Launcher
from .lowering import Go, Step, i32, up

TOP_PART = 2048  # columns of a block: PART of cuda/sample.cu


class TopK:
    """The k largest logits of each wanted row, on the device. values float32, ids int32 [outs, k]."""

    def __init__(self, launcher: Launcher, logits: Any, step: Any, k: int) -> None:
        rows, n = logits.shape
        parts = up(n, TOP_PART)
        each = min(k, n)
        self.values, self.ids = launcher.empty((rows, each), np.float32), launcher.empty((rows, each), np.int32)
        pairs = launcher.empty((rows, parts, each), np.float32), launcher.empty((rows, parts, each), np.int32)
        first = launcher.kernel("sample", "", "top_k_parts")
        last = launcher.kernel("sample", "", "top_k")
        self._launches: Sequence[Go] = (
            lambda s: first((parts, s.outs, 1), 256, 64, (logits, *pairs, step, *i32(n, each))),
            lambda s: last((s.outs, 1, 1), 256, 64, (*pairs, self.values, self.ids, step, *i32(parts * each, each))),
        )

    def go(self, step: Step) -> None:
        """Launch both rounds."""
        if step.outs:
            for go in self._launches:
                go(step)
