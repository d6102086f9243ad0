"""Device memory that the layers of one program use in turn, between the launches of one op. Knows no kernels."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .lowering import Lowering

_rooms: WeakKeyDictionary[Lowering, dict[int, Any]] = WeakKeyDictionary()


def shared_room(lo: Lowering, width: int) -> Any:
    """Float32 [rows, width] for every row of a step, the same for all layers that ask for this width."""
    rooms = _rooms.setdefault(lo, {})
    if width not in rooms:
        rooms[width] = lo.launcher.empty((lo.limits.rows, width), np.float32)
        lo.nbytes += rooms[width].nbytes
    return rooms[width]
