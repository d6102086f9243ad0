"""What the backend needs of a device: the launcher's protocol. Implemented by launch.py and by the tests' emulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Grid = tuple[int, int, int]
NOTHING = np.uintp(0)  # a null pointer


class Kernel(Protocol):
    """Launches one kernel; compiled when first called. Arguments are device arrays, np.int32, np.float32, NOTHING."""

    def __call__(self, grid: Grid, block: int, shared_bytes: int, args: tuple[Any, ...]) -> None: ...


class Launcher(Protocol):
    """What the backend needs of a device: arrays (``xp``: CuPy, or NumPy in emulation), kernels, copies, graphs.

    Everything runs in order on one stream. ``host`` gives an array on the host that is quickly copied to.
    Raises OutOfMemory, KernelCompileError, BackendError.
    """

    xp: Any
    description: str
    tensor_cores: bool  # those of sm_80 and later

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any: ...
    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any: ...
    def upload(self, to: Any, host: npt.NDArray[Any]) -> None: ...
    def host(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]: ...
    def download(self, array: Any, to: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]: ...
    def kernel(self, file: str, variant: str, name: str) -> Kernel: ...
    def capture(self, go: Callable[[], None]) -> Callable[[], None]: ...
    def synchronize(self) -> None: ...
    def activate(self) -> Any: ...
    def free_bytes(self) -> int: ...
