"""Rows of float32 into a block format, by the native quantisers on all cores."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import numpy.typing as npt

from .. import _native
from ..backends.cpu.backend import CpuBackend
from ..backends.cpu.structs import FORMAT
from ..errors import Qwen35Error
from ..formats import Format

Float = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

NONE: Float = np.zeros(0, np.float32)  # no importance


class RowsNotFinite(ValueError):
    """A row holds NaN or infinity."""


class RowsOutOfRange(ValueError):
    """A row holds a number that the format's scales cannot express."""


class RowQuantizer:
    """Threads and instruction level to quantise with; a context manager. ``threads`` None: the cores that may be used.

    One format takes its scales and integers by a search for the least squared error, weighted by ``importance``.
    """

    def __init__(self, threads: int | None = None) -> None:
        backend = CpuBackend(threads)
        self._isa, self._pool = backend.isa, _native.Pool(backend.threads)

    def __enter__(self) -> RowQuantizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.close()

    def quantize(self, values: Float, form: Format, importance: Float = NONE, out: Bytes | None = None) -> Bytes:
        """float32 [rows, cols] -> the stored bytes of the rows, in ``out`` if that is given (it may be longer).

        ``importance``: a weight for each column, or NONE. Raises RowsNotFinite and RowsOutOfRange.
        """
        nbytes = len(values) * form.row_bytes(values.shape[1])
        target = np.empty(nbytes, np.uint8) if out is None else out[:nbytes]
        status = _native.quantize(
            self._isa, self._pool, FORMAT[form.name], np.ascontiguousarray(values), importance, target
        )
        if status == _native.QUANTIZE_NOT_FINITE:
            raise RowsNotFinite("NaN or infinity")
        if status == _native.QUANTIZE_OUT_OF_RANGE:
            raise RowsOutOfRange(f"{np.abs(values).max():g}, too large for {form.name}")
        if status:
            raise Qwen35Error(f"rows could not be quantised to {form.name} (status {status})")
        return target
