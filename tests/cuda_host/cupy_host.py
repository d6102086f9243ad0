"""A stand-in for CuPy, as much of it as launch.py uses: arrays are NumPy's, kernels run in emulation (host.py).

It is as strict as CuPy 14: types of arguments, shapes and dtypes of copies, what may happen during a capture, shared
memory that was not asked for. ``Machine`` counts and records, and fails where a test says so. ``launch_module`` loads
launch.py over it, beside the real one if there is a real CuPy.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
import weakref
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from ctypes import CDLL
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen35rt.backends.cuda import source

from .host import build, launch, library

NULL_STREAM = 0
_KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(")


class CUDARuntimeError(RuntimeError):
    """An error of the runtime, by its number."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"cudaError {status}")


class CUDADriverError(RuntimeError):
    """An error of the driver, by its number."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"CUDA_ERROR {status}")


class OutOfMemoryError(MemoryError):
    """What the pool raises."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,}, limit: {limit:,})")


class NVRTCError(RuntimeError):
    """An error of the compiler's library."""


class CompileException(Exception):
    """A module that does not compile."""


@dataclass
class Machine:
    """Its devices, and what was done with them."""

    devices: int = 1
    order: int = 0  # of threads and blocks: see cuda_host.h
    capability: tuple[int, int] = (9, 0)
    reads_host: int = 0
    used: int = 0  # bytes of living arrays
    kept: int = 0  # bytes that the pool holds of arrays that are gone
    limit: int = 0  # bytes, 0: none
    launches: int = 0
    replays: int = 0
    pinned: int = 0  # bytes
    synchronized: int = 0
    compiled: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    streams: set[int] = field(default_factory=set)  # on which anything was done
    busy: set[int] = field(default_factory=set)  # devices that were current when anything was done or freed
    fails: dict[str, Exception] = field(default_factory=dict)  # by what is done: to be raised once

    def __post_init__(self) -> None:
        self.current = threading.local()
        self.shared: dict[tuple[str, str], int] = {}  # limits of loaded functions
        self.capturing: list[Callable[[], None]] | None = None
        self.captured: tuple[int, int] | None = None  # the stream, and the thread that captures
        self.spoilt = False  # the capture, by what is not permitted

    def do(self, what: str) -> None:
        """Anything on the current stream. While this thread captures, launches alone, and on that stream."""
        self.streams.add(self.stream)
        self.busy.add(self.device)
        if self.is_captured and (what != "launch" or self.captured != (self.stream, threading.get_ident())):
            self.spoilt = True
            raise CUDARuntimeError(900)  # not permitted while a stream is captured
        if what in self.fails:
            raise self.fails.pop(what)

    @property
    def is_captured(self) -> bool:
        """Whether this thread captures, or the current stream is captured by another."""
        if self.captured is None:
            return False
        return self.captured[0] == self.stream or self.captured[1] == threading.get_ident()

    @property
    def stack(self) -> list[int]:
        """Streams of this thread, the current one last."""
        made: list[int] = self.current.__dict__.setdefault("stack", [NULL_STREAM])
        return made

    @property
    def stream(self) -> int:
        return self.stack[-1]

    @property
    def device(self) -> int:
        """The current device of this thread."""
        number: int = self.current.__dict__.get("device", 0)
        return number

    def allocated(self, array: ndarray) -> None:
        """Count an array's bytes while it lives."""
        self.used += array.nbytes
        weakref.finalize(array, self._freed, array.nbytes)

    def _freed(self, nbytes: int) -> None:
        self.used -= nbytes
        self.busy.add(self.device)


class ndarray(np.ndarray[Any, Any]):  # named as in CuPy
    """Memory of the device."""

    machine: Machine

    def __array_finalize__(self, other: Any) -> None:
        if isinstance(other, ndarray):
            self.machine = other.machine

    def __setitem__(self, at: Any, value: Any) -> None:
        raise TypeError("CuPy would compile and launch a kernel of its own; kernels and copies are the launcher's")

    def set(self, arr: Any, stream: Any = None) -> None:
        """Copy from the host."""
        if not isinstance(arr, np.ndarray) or self.dtype != arr.dtype:
            raise TypeError(f"{arr!r} cannot be set to a {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        self.machine.do("set")
        self.view(np.ndarray)[...] = arr

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> npt.NDArray[Any]:
        """Copy to the host."""
        self.machine.do("get")
        plain = self.view(np.ndarray)
        if out is None:
            return plain.copy()
        if out.dtype != self.dtype:
            raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array")
        if out.shape != self.shape:
            raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, actual shape: {out.shape}")
        out[...] = plain
        made: npt.NDArray[Any] = out
        return made


class Stream:
    """A stream; context managers nest within a thread."""

    def __init__(self, machine: Machine, null: bool = False, non_blocking: bool = False) -> None:
        self.machine, self.non_blocking, self.ptr = machine, non_blocking, id(self)
        self.device = machine.device

    def __enter__(self) -> Stream:
        if self.device != self.machine.device:
            raise RuntimeError("The device that the stream is created on does not match with the current device")
        self.machine.stack.append(self.ptr)
        return self

    def __exit__(self, *error: object) -> None:
        self.machine.stack.pop()

    def synchronize(self) -> None:
        self.machine.do("synchronize")
        self.machine.synchronized += 1

    def begin_capture(self, mode: int | None = None) -> None:
        if self.machine.capturing is not None or self.machine.stream != self.ptr:
            raise CUDARuntimeError(900)
        self.machine.capturing, self.machine.spoilt = [], False
        self.machine.captured = self.ptr, threading.get_ident()

    def end_capture(self) -> Graph:
        recorded, self.machine.capturing, self.machine.captured = self.machine.capturing, None, None
        if recorded is None or self.machine.spoilt:
            raise CUDARuntimeError(901)
        if "end_capture" in self.machine.fails:
            raise self.machine.fails.pop("end_capture")
        return Graph(self.machine, recorded)


class Graph:
    """Launches with their arguments."""

    def __init__(self, machine: Machine, recorded: list[Callable[[], None]]) -> None:
        self.machine, self.recorded, self.uploaded = machine, recorded, False

    def upload(self, stream: Stream | None = None) -> None:
        self.machine.do("upload")
        self.uploaded = True

    def launch(self, stream: Stream | None = None) -> None:
        self.machine.do("replay")
        self.machine.replays += 1
        for again in self.recorded:
            again()


class Device:
    """A device as a context."""

    def __init__(self, machine: Machine, number: int = 0) -> None:
        self.machine, self.number, self.before = machine, number, threading.local()
        self.attributes = {"PageableMemoryAccessUsesHostPageTables": machine.reads_host, "MultiProcessorCount": 1}

    def __enter__(self) -> Device:
        self.before.__dict__.setdefault("stack", []).append(self.machine.device)
        self._use(self.number)
        return self

    def __exit__(self, *error: object) -> None:
        self._use(self.before.stack.pop())

    def _use(self, number: int) -> None:
        if "device" in self.machine.fails:
            raise self.machine.fails.pop("device")
        self.machine.current.device = number


class RawModule:
    """A module: one of ours, known by its text and options."""

    def __init__(self, machine: Machine, *, code: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        if not isinstance(code, str) or not isinstance(options, tuple) or not all(isinstance(o, str) for o in options):
            raise TypeError("code: str, options: tuple of str")
        assert backend == "nvrtc"
        self.machine, self.code, self.options = machine, code, options

    def compile(self, log_stream: Any = None) -> None:
        self.machine.do("compile")
        self.name, self.kernels, self.built = _built(self.code, self.options)
        self.machine.compiled.append((self.name, self.options))

    def get_function(self, name: str) -> RawKernel:
        if name not in self.kernels:
            raise CUDADriverError(500)  # no such symbol
        return RawKernel(self.machine, self.name, self.built, name)


@cache
def _built(code: str, options: tuple[str, ...]) -> tuple[str, tuple[str, ...], CDLL]:
    """A module's name, kernels and library: one of our files in a variant, or any text."""
    for file in source.files():
        if source.source(file) == code:
            (variant,) = (v for v in source.variants(file) if source.options(file, v) == options)
            return f"{file}-{variant}", tuple(source.kernels(file)), library(file, variant)
    name, kernels = f"text-{zlib.crc32(code.encode()):08x}", tuple(_KERNEL.findall(code))
    return name, kernels, build(name, code, kernels)


class RawKernel:
    """A kernel; its limit of shared memory belongs to the loaded function, not to this object."""

    def __init__(self, machine: Machine, module: str, built: CDLL, name: str) -> None:
        self.machine, self.built, self.names = machine, built, (module, name)

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self.machine.shared.get(self.names, 48 << 10)

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, nbytes: int) -> None:
        if nbytes > 227 << 10:
            raise CUDADriverError(1)
        self.machine.shared[self.names] = nbytes

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        for size in (grid, block):
            if not isinstance(size, tuple) or not all(isinstance(n, int | np.integer) for n in size):
                raise TypeError("grid and block: tuples of numbers")
        if any(isinstance(a, np.ndarray) and not isinstance(a, ndarray) for a in args):
            raise TypeError("You are trying to pass a numpy.ndarray as a kernel parameter")
        if shared_mem > self.max_dynamic_shared_size_bytes or not all(0 < n < 2**31 for n in grid):
            raise CUDADriverError(1)  # an invalid value
        self.machine.do("launch")
        run = partial(launch, self.built, self.names[1], grid, block[0], shared_mem, args, self.machine.order)
        if self.machine.capturing is not None and self.machine.is_captured:
            self.machine.capturing.append(run)
            return
        self.machine.launches += 1
        run()


def make_cupy(machine: Machine) -> Any:
    """The module ``cupy`` of a machine."""

    def empty(shape: Any, dtype: Any = float) -> ndarray:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if machine.limit and machine.used + nbytes > machine.limit:
            raise OutOfMemoryError(nbytes, machine.used, machine.limit)
        machine.do("empty")
        made: ndarray = np.ndarray.__new__(ndarray, shape, dtype)
        made.machine = machine
        made.view(np.ndarray).reshape(-1).view(np.uint8)[:] = 0xA5  # junk
        machine.allocated(made)
        return made

    def zeros(shape: Any, dtype: Any = float) -> ndarray:
        made = empty(shape, dtype)
        made.view(np.ndarray)[...] = 0
        return made

    def pinned(size: int) -> bytearray:
        machine.do("pinned")
        machine.pinned += size
        return bytearray(-(-size // 512) * 512)

    def properties(number: int) -> dict[str, Any]:
        major, minor = machine.capability
        return {"name": b"Emulated", "major": major, "minor": minor, "totalGlobalMem": 1 << 30}

    def set_limit(size: int = 0) -> None:
        machine.limit = size

    def total() -> int:
        return machine.used

    pool = SimpleNamespace(
        used_bytes=total,
        total_bytes=total,
        free_bytes=lambda: machine.kept,
        set_limit=set_limit,
        free_all_blocks=lambda: machine.do("free"),
    )
    made = ModuleType("cupy")
    vars(made).update(
        ndarray=ndarray,
        empty=empty,
        zeros=zeros,
        RawModule=partial(RawModule, machine),
        get_default_memory_pool=lambda: pool,
        cuda=SimpleNamespace(
            Device=partial(Device, machine),
            Stream=partial(Stream, machine),
            alloc_pinned_memory=pinned,
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            runtime=SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError,
                getDeviceProperties=properties,
                getDeviceCount=lambda: machine.devices,
                memGetInfo=lambda: ((1 << 30) - machine.used - machine.kept, 1 << 30),
            ),
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            nvrtc=SimpleNamespace(NVRTCError=NVRTCError, getVersion=lambda: (13, 0)),
            compiler=SimpleNamespace(CompileException=CompileException),
        ),
    )
    return made


@contextmanager
def _in_place_of_cupy(stand_in: Any) -> Any:
    missing = object()
    before = sys.modules.get("cupy", missing)
    sys.modules["cupy"] = stand_in
    try:
        yield
    finally:
        if before is missing:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = before  # type: ignore[assignment]


def launch_module(machine: Machine) -> Any:
    """launch.py, loaded anew over the stand-in."""
    path = Path(source.__file__).with_name("launch.py")
    spec = importlib.util.spec_from_file_location("qwen35rt.backends.cuda.launch_emulated", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _in_place_of_cupy(make_cupy(machine)):
        spec.loader.exec_module(module)
    return module
