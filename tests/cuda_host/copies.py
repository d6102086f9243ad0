"""Copies of items of pools by cuda/copy.cu, checked against NumPy; also run under sanitizers."""

from __future__ import annotations

from typing import Any

import numpy as np

from qwen35rt.backends.cuda.lowering import i32

# Shapes of two pools [outer, items, item bytes]: words of 16 bytes, odd ones of 2, more than a round of the grid, none.
SHAPES = (((3, 4, 64), (3, 4, 64)), ((1, 3, 96_016), (1, 3, 780)), ((2, 5, 30), (2, 5, 16)), ((1, 2, 0), (1, 2, 48)))


def copy_and_check(launcher: Any) -> None:
    """AssertionError where anything but the target differs, or the target from the source."""
    copy = launcher.kernel("copy", "", "copy_items")
    rng = np.random.default_rng(26)
    for shapes in SHAPES:
        pools, wanted = [], []
        outer, items, _ = shapes[0]
        source, target = rng.permutation(items)[:2].tolist()
        for shape in shapes:
            numbers = rng.integers(0, 256, shape, np.uint8)
            pools.append(launcher.empty(shape, np.uint8))
            launcher.upload(pools[-1], numbers)
            numbers[:, target] = numbers[:, source]
            wanted.append(numbers)
        copy((2, outer, 2), 256, 0, (*pools, *i32(shapes[0][2], shapes[1][2], items, source, target)))
        for pool, want in zip(pools, wanted, strict=True):
            np.testing.assert_array_equal(launcher.download(pool), want)
