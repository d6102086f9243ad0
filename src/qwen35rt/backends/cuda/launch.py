"""The launcher of a real device: CuPy arrays, RawModules, one stream. Imported only where CuPy is there."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from ...errors import BackendError, KernelCompileError, OutOfMemory
from .interface import Grid, Kernel
from .source import options, source

PLAIN_SHARED_BYTES = 48 << 10  # a kernel that needs more has to ask for it
NO_MEMORY = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY: what CuPy's own pool did not ask for
DEVICE_ERRORS = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)


class CupyLauncher:
    """Device number ``device``. Everything runs on one stream of its own; see the protocol in interface.py."""

    def __init__(self, device: int = 0) -> None:
        self.xp: Any = cupy
        self._device = cupy.cuda.Device(device)
        properties = cupy.cuda.runtime.getDeviceProperties(device)
        self.capability: tuple[int, int] = properties["major"], properties["minor"]
        self.tensor_cores = self.capability >= (8, 0)
        self.memory_bytes = int(properties["totalGlobalMem"])
        self.description = f"{properties['name'].decode()} (sm_{self.capability[0]}{self.capability[1]})"
        # Such a device reads the host's pages itself, later than a copy returns; others have them staged before.
        self._reads_host = bool(self._device.attributes.get("PageableMemoryAccessUsesHostPageTables", 0))
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._modules: dict[tuple[str, str], Any] = {}
        self._locks: dict[tuple[str, str], threading.Lock] = {}

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make device and stream current in this thread; translate what CuPy raises."""
        with _our_errors(), self._device, self._stream:
            yield

    def free_bytes(self) -> int:
        """Memory that can be had: what is free, and what CuPy keeps of memory that was used before."""
        return int(cupy.cuda.runtime.memGetInfo()[0]) + int(cupy.get_default_memory_pool().free_bytes())

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """An array on the device."""
        return cupy.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """An array of zeros on the device."""
        return cupy.zeros(shape, dtype)

    def upload(self, to: Any, host: npt.NDArray[Any]) -> None:
        """Copy to a contiguous array of the device. The host's array may change as soon as this returns."""
        _check(to)
        to.set(host)
        if self._reads_host:
            self._stream.synchronize()

    def host(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array in pinned memory, which the device writes without a detour."""
        count = math.prod(shape)
        memory = cupy.cuda.alloc_pinned_memory(max(count, 1) * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, count).reshape(shape)

    def download(self, array: Any, to: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Copy to the host (to a new array, or ``to``), when all that was launched before is done."""
        _check(array)
        made: npt.NDArray[Any] = array.get(out=to)
        return made

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        self._stream.synchronize()

    def kernel(self, file: str, variant: str, name: str) -> Kernel:
        """A kernel; its module is compiled when it is first launched."""
        return _Kernel(self, file, variant, name)

    def capture(self, go: Callable[[], None]) -> Callable[[], None]:
        """Record launches as a graph, to be replayed on the stream. Nothing may be compiled or allocated meanwhile.

        What ``go`` raises comes through, and the stream is as before. Raises OutOfMemory where a graph finds no room.
        """
        self._stream.begin_capture()
        try:
            go()
        except BaseException:
            with suppress(*DEVICE_ERRORS):  # that the capture is incomplete is not what went wrong
                self._stream.end_capture()
            raise
        with _our_errors():  # here, as the caller can do without a graph
            graph = self._stream.end_capture()
            graph.upload(self._stream)
        return lambda: graph.launch(self._stream)

    def function(self, file: str, variant: str, name: str) -> Any:
        """The compiled kernel. Raises KernelCompileError. Threads may compile different modules at once."""
        with self._locks.setdefault((file, variant), threading.Lock()):
            module = self._modules.get((file, variant))
            if module is None:
                module = self._modules[file, variant] = _compiled(file, variant)
            return module.get_function(name)


class _Kernel:
    """A launch of one kernel."""

    def __init__(self, launcher: CupyLauncher, file: str, variant: str, name: str) -> None:
        self._launcher, self._names = launcher, (file, variant, name)
        self._function: Any = None
        self._shared_bytes = PLAIN_SHARED_BYTES

    def __call__(self, grid: Grid, block: int, shared_bytes: int, args: tuple[Any, ...]) -> None:
        if self._function is None:
            self._function = self._launcher.function(*self._names)
            for arg in args:
                if isinstance(arg, cupy.ndarray):
                    _check(arg)
        if shared_bytes > self._shared_bytes:
            # The limit belongs to the loaded function, which other launchers and models share: it is never lowered.
            if shared_bytes > self._function.max_dynamic_shared_size_bytes:
                self._function.max_dynamic_shared_size_bytes = shared_bytes
            self._shared_bytes = shared_bytes
        self._function(grid, (block, 1, 1), args, shared_mem=shared_bytes)


def _compiled(file: str, variant: str) -> Any:
    """A loaded module. CuPy keeps compiled ones on disk."""
    what = f"{file}.cu ({variant or 'plain'})"
    try:
        module = cupy.RawModule(code=source(file), options=options(file, variant), backend="nvrtc")
        module.compile()
    except cupy.cuda.compiler.CompileException as e:
        raise KernelCompileError(f"{what} could not be compiled: {e}") from e
    except DEVICE_ERRORS:
        raise  # it was compiled, but could not be loaded
    except (RuntimeError, OSError) as e:  # no CUDA headers, the compiler's library, the folder of compiled modules
        raise KernelCompileError(f"{what} could not be compiled: {type(e).__name__}: {e}") from e
    return module


@contextmanager
def _our_errors() -> Iterator[None]:
    """Translate what CuPy raises."""
    try:
        yield
    except cupy.cuda.memory.OutOfMemoryError as e:
        raise _no_memory(e) from e
    except DEVICE_ERRORS as e:
        raise (_no_memory(e) if e.status == NO_MEMORY else BackendError(f"the GPU failed: {e}")) from e


def _no_memory(e: Exception) -> OutOfMemory:
    return OutOfMemory(f"the GPU has no memory left ({e}); lower the context or the slots")


def _check(array: Any) -> None:
    """A kernel sees the address alone, so an array must be as it looks."""
    if not array.flags.c_contiguous:
        raise BackendError(f"a device array of shape {array.shape} is not contiguous")


def device_count() -> int:
    """Devices that the runtime sees."""
    return int(cupy.cuda.runtime.getDeviceCount())


def nvrtc_version() -> tuple[int, int]:
    """Version of the runtime compiler; raises what its library raises if it cannot be loaded."""
    major, minor = cupy.cuda.nvrtc.getVersion()
    return int(major), int(minor)


RUNTIME_ERRORS: tuple[type[Exception], ...] = (
    cupy.cuda.runtime.CUDARuntimeError,
    cupy.cuda.nvrtc.NVRTCError,
    RuntimeError,
    ImportError,
    OSError,
)
