"""Products with experts for steps of many rows: places of routes grouped by expert, then tiles on tensor cores.

Place p is place ``p % used`` of row ``p // used``. Receives the lowering; imports no device library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...model.program import Op
from .lowering import Go, Lowering, Step, count, i32, up
from .tiles import TILES_FROM, has_tiles, tile_bytes

GROUP_PLACES = 64  # that of cuda/experts.cuh; also the size of tiles
PLACES_OF_EXPERT = 2  # on average, from which reading weights once for a group saves more than groups cost


def from_rows(lo: Lowering, op: Op) -> int | None:
    """Rows of a step from which an op's places are grouped; None where they never are."""
    w, used = op.weights[0], op.attrs["used"]
    rows = max(TILES_FROM, up(PLACES_OF_EXPERT * w.n_expert, used))
    return rows if lo.tensor_cores and has_tiles(w) and rows <= lo.limits.rows else None


def grouped(lo: Lowering, op: Op, x: Any, least: int) -> Iterator[Go]:
    """Launches for steps of ``least`` rows and more. x: the input, int8 blocks or float32."""
    w, used, reduce = op.weights[0], op.attrs["used"], op.attrs["reduce"]
    route, out = op.ins[1].value, op.outs[0]
    most = lo.limits.rows * used

    def rows(step: Step) -> int:
        return step.rows if step.rows >= least else 0

    known = lo.has_room(("places", route.id))
    lists = (
        lo.room(("places", route.id), most, np.int32),
        lo.room(("groups", route.id), 3 * (most // GROUP_PLACES + w.n_expert), np.int32),  # of three numbers each
    )
    if not known:
        args = lo.array(route), *lists, lo.step, *i32(count(False), w.n_expert, used)
        grid = up(w.n_expert, 4)
        yield lo.launch("moe_lists", "moe_lists", lambda s: (grid if rows(s) else 0, 1, 1), 128, 0, *args)
    to = lo.room(("products", w.rows), most * w.rows, np.float32) if reduce else lo.array(out)
    data, scale = lo.weight(w)
    at = lo.step, np.int32(count(False))
    scales = 0 if w.scale is None else w.scale.size
    sizes = i32(w.n_expert, scales, used, 1 if reduce else used, w.rows, w.cols, w.row_bytes)
    yield lo.launch(
        "moe_tiles",
        "moe_tiles",
        lambda s: (up(w.rows, GROUP_PLACES) if rows(s) else 0, rows(s) * used // GROUP_PLACES + w.n_expert, 1),
        2 * GROUP_PLACES,
        tile_bytes(w, GROUP_PLACES),
        *(data, scale, x, *lists, to, *at, *sizes),
        variant=w.format.name,
    )
    if reduce:
        args = to, lo.array(route), lo.array(out), *at, *i32(used, w.rows)
        yield lo.launch("moe_lists", "moe_sum", lambda s: (up(w.rows, 128), rows(s), 1), 128, 0, *args)
