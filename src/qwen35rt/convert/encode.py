"""Numbers of a checkpoint -> stored bytes of a GGUF tensor, some rows at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats import Format
from .rows import RowQuantizer

Array = npt.NDArray[Any]
Float = npt.NDArray[np.float32]


def to_float32(raw: Array) -> Float:
    """float32, float16 or uint16 (bfloat16) numbers as float32."""
    if raw.dtype == np.uint16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32, copy=False)


def is_finite(raw: Array) -> bool:
    """Whether no number of such an array is infinite or NaN."""
    if raw.dtype == np.uint16:
        return bool(((raw & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(raw).all())


def to_bf16(values: Float) -> npt.NDArray[np.uint16]:
    """Finite float32 -> bfloat16 as uint16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)
    return rounded


def encode(values: Float, form: Format) -> Array:
    """Finite float32 [rows, cols] -> what GgufOutput.write takes.

    Raises OverflowError if F16 cannot hold a number, RowsOutOfRange if a block format cannot.
    """
    if form.name == "F32":
        return values
    if form.name == "BF16":
        return to_bf16(values)
    if form.name == "F16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if not np.isfinite(half).all():
            raise OverflowError(f"{np.abs(values).max():g}, which is beyond F16")
        return half
    with RowQuantizer() as quantizer:
        return quantizer.quantize(values, form)
