"""Sizes of tiles on tensor cores: those of cuda/tiles.cuh."""

from __future__ import annotations

from ...model.weights import QTensor

TILES = (64, 128)  # weight rows and rows of x of a block
TILES_FROM = 16  # rows of x from which tiles on tensor cores take less time than passes over 8 rows
LARGE_FROM = 128  # blocks of the larger tile that keep a large GPU busy; fewer leave multiprocessors idle
COLUMNS = 32  # that tiles of F16 and BF16 take at a time


def has_tiles(w: QTensor) -> bool:
    """Whether there are tiles for a matrix: F32, and odd numbers of columns, have none."""
    return w.format.quantized or (w.format.name != "F32" and w.cols % COLUMNS == 0)


def tile_bytes(w: QTensor, tile: int) -> int:
    """Shared memory of a block: two halves of rows of weights and of x."""
    if w.format.quantized:
        return 2 * (256 * (48 + 48) + 2 * 128)
    return 2 * tile * (80 + 160)
