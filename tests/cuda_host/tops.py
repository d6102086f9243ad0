"""The largest logits of rows by cuda/sample.cu, checked against NumPy; also run under sanitizers."""

from __future__ import annotations

from typing import Any

import numpy as np

from qwen35rt.backends.cuda.lowering import Step
from qwen35rt.backends.cuda.memory import AT, HEADER
from qwen35rt.backends.cuda.sample import TopK

SIZES = ((5, 1), (8200, 40), (16_500, 4096))  # columns, k: one part, a part of 8 columns, a round in between


def find_and_check(launcher: Any) -> None:
    """AssertionError where those of two rows, with many ties, are not the first of a stable sort."""
    rng = np.random.default_rng(31)
    for n, k in SIZES:
        numbers = rng.integers(-99, 99, (2, n)).astype(np.float32)
        head = np.zeros(len(HEADER), np.int32)
        head[AT["N_OUTS"]] = len(numbers)
        logits, step = launcher.empty(numbers.shape, np.float32), launcher.empty(head.shape, np.int32)
        launcher.upload(logits, numbers)
        launcher.upload(step, head)
        top = TopK(launcher, logits, step, k)
        top.go(Step((1, 1), 2))
        best = top.best(2)
        ids = np.sort(np.argsort(-numbers, axis=1, kind="stable")[:, :k])
        np.testing.assert_array_equal(best.ids, ids)
        np.testing.assert_array_equal(best.logits, np.take_along_axis(numbers, ids, 1))
