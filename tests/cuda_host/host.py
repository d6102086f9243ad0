"""A launcher that runs the .cu files on the CPU over NumPy arrays: the CUDA backend without a device.

Files are compiled by g++ with cuda_host.h before them, those of one weight format together, once a session. Without
C++'s headers: they take the compiler longer than most kernels.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen35rt.backends.cuda import source
from qwen35rt.backends.cuda.interface import Grid, Kernel
from qwen35rt.cpu_count import usable_cpus
from tests import ahead

HEADER = Path(__file__).with_name("cuda_host.h")
FLAGS = (
    "-std=c++17",
    "-nostdinc++",
    "-O1",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",
)
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-variable")
SANITIZE = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which("g++")


_locks: dict[Path, Lock] = {}


@cache
def folder() -> Path:
    """Where libraries of this session are."""
    made = Path(tempfile.mkdtemp(prefix="qwen35rt-cuda-host-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def unit_of(file: str, variant: str, flags: tuple[str, ...] = ()) -> tuple[str, tuple[str, ...]]:
    """Name of the library with a file's kernels, and the files in it: products of one format share one, but not where
    flags make the compiler slow."""
    together = () if flags else tuple(f for f in source.BY_FORMAT if f not in source.TILED)
    files = together if file in together else (file,)
    return f"{files[0]}-{variant}" if variant else files[0], files


@cache
def library(file: str, variant: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The compiled kernels of a file."""
    return ctypes.CDLL(str(compiled(file, variant, flags)))


def compiled(file: str, variant: str, flags: tuple[str, ...] = ()) -> Path:
    """The library with the kernels of a file, which is compiled where it is not there yet."""
    name, files = unit_of(file, variant, flags)
    macro = source.define(file, variant)
    text = [f"#define {macro} 1"] if macro else []
    text += [f'#include "{source.kernel_folder() / f}.cu"' for f in files]
    kernels = [kernel for f in files for kernel in source.kernels(f)]
    return _compile(f"{name}{'-sanitized' if flags else ''}", "\n".join(text), kernels, flags)


def prepare(units: Iterable[tuple[str, str]], flags: tuple[str, ...] = ()) -> None:
    """Compile the libraries of files and variants, as many at once as there are cores."""
    folder()  # once: threads would make it twice
    with ThreadPoolExecutor(usable_cpus().affinity) as pool:
        for done in [pool.submit(compiled, file, variant, flags) for file, variant in units]:
            done.result()


def of_all_models() -> list[tuple[str, str]]:
    """Files and variants that most models need."""
    rest = [file for file in source.files() if file not in source.BY_FORMAT]
    return [*((file, variant) for file in rest for variant in source.variants(file))]


def begin(units: Iterable[tuple[str, str]]) -> None:
    """The same ahead of the tests (tests/ahead.py)."""
    folder()
    for file, variant in units:
        ahead.begin(("library", file, variant), partial(compiled, file, variant))


def build(name: str, text: str, kernels: Sequence[str], flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile the text of some kernels, once a session for each name."""
    return ctypes.CDLL(str(_compile(name, text, kernels, flags)))


def _compile(name: str, text: str, kernels: Sequence[str], flags: tuple[str, ...]) -> Path:
    """Threads wait for each other's library; a process that shares the folder never sees half of one."""
    path = folder() / f"{name}.so"
    with _locks.setdefault(path, Lock()):
        if path.exists():
            return path
        cpp, made = (path.with_name(f"{name}-{os.getpid()}.{ending}") for ending in ("cpp", "so"))
        cpp.write_text("\n".join([text, *(f"HOST_KERNEL({kernel})" for kernel in kernels), ""]))
        command = ["g++", *FLAGS, *fused(), *WARNINGS, *flags, "-include", str(HEADER), str(cpp), "-o", str(made)]
        # A sanitizer that this process runs with would make the compiler slow.
        environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        done = ahead.run(command, env=environment)
        if done.returncode:
            raise AssertionError(f"{name}: {done.stderr[:4000]}")
        made.rename(path)
    return path


def launch(
    run: ctypes.CDLL, name: str, grid: Grid, block: int, shared_bytes: int, args: tuple[Any, ...], order: int
) -> None:
    """Run one kernel. AssertionError for arguments of another kind than declared, or threads that wait for ever."""
    kinds = _kinds(run, name)
    assert len(kinds) == len(args), f"{name}: {len(args)} arguments for {kinds}"
    words, pointers = _words(name, kinds, args)
    assert all(0 < g <= most for g, most in zip(grid, (2**31 - 1, 65535, 65535), strict=True)), (name, grid)
    go = getattr(run, f"launch_{name}")
    go.restype = ctypes.c_char_p
    block_size = (ctypes.c_uint * 3)(block, 1, 1)
    error = go(pointers, (ctypes.c_uint * 3)(*grid), block_size, ctypes.c_size_t(shared_bytes), order)
    del words
    if error:
        raise AssertionError(f"{name}: {error.decode()}")


@cache
def fused() -> tuple[str, ...]:
    """The option by which fmaf is an instruction, where this machine has it."""
    try:
        return ("-mfma",) if " fma " in Path("/proc/cpuinfo").read_text() else ()
    except OSError:
        return ()


@dataclass
class HostLauncher:
    """``order``: how threads and blocks take turns (cuda_host.h).

    ``launches``: kernels run so far; ``names``: theirs; ``modules``: files and variants that they are of.
    """

    order: int = 0
    flags: tuple[str, ...] = ()
    xp: Any = np
    description: str = "emulation"
    tensor_cores: bool = True

    def __post_init__(self) -> None:
        self.launches = 0
        self.names: set[str] = set()
        self.modules: set[tuple[str, str]] = set()
        self._recording: list[Callable[[], None]] | None = None

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array full of junk: what is read before it is written shows."""
        self._outside_capture()
        made = np.empty(shape, dtype)
        made.reshape(-1).view(np.uint8)[:] = 0xA5 if self.order else 0xFF
        return made

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        self._outside_capture()
        return np.zeros(shape, dtype)

    def upload(self, to: npt.NDArray[Any], host: npt.NDArray[Any]) -> None:
        self._outside_capture()
        assert to.dtype == host.dtype, (to.dtype, host.dtype)
        assert to.flags.c_contiguous
        assert host.flags.c_contiguous
        to[...] = host

    def host(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        self._outside_capture()
        return np.empty(shape, dtype)

    def download(self, array: npt.NDArray[Any], to: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        self._outside_capture()
        assert array.flags.c_contiguous
        if to is None:
            return array.copy()
        assert (to.shape, to.dtype) == (array.shape, array.dtype)
        to[...] = array
        return to

    def kernel(self, file: str, variant: str, name: str) -> Kernel:
        assert name in source.kernels(file), name
        return partial(self._call, file, variant, name)

    def capture(self, go: Callable[[], None]) -> Callable[[], None]:
        """Keeps launches with their arguments, to repeat them. Nothing else may happen meanwhile: CUDA forbids it, or
        would repeat it on memory that may be another's by then."""
        self._outside_capture()
        recorded: list[Callable[[], None]] = []
        self._recording = recorded
        try:
            go()
        finally:
            self._recording = None

        def replay() -> None:
            self._outside_capture()
            for again in recorded:
                again()

        return replay

    def synchronize(self) -> None:
        """There is nothing to wait for."""
        self._outside_capture()

    def _outside_capture(self) -> None:
        assert self._recording is None, "allocations, copies, waits and graphs are not allowed during a capture"

    def free_bytes(self) -> int:
        """Of a small device."""
        return 1 << 30

    @contextmanager
    def activate(self) -> Iterator[None]:
        yield

    def _call(
        self, file: str, variant: str, name: str, grid: Grid, block: int, shared_bytes: int, args: tuple[Any, ...]
    ) -> None:
        if self._recording is not None:
            assert (file, variant) in self.modules, f"{file} {variant} would be compiled and loaded during a capture"
            self._recording.append(partial(self._call, file, variant, name, grid, block, shared_bytes, args))
            return
        launch(library(file, variant, self.flags), name, grid, block, shared_bytes, args, self.order)
        self.launches += 1
        self.names.add(name)
        self.modules.add((file, variant))


@cache
def _kinds(run: ctypes.CDLL, name: str) -> str:
    kinds = getattr(run, f"kinds_{name}")
    kinds.restype = ctypes.c_char_p
    text: bytes = kinds()
    return text.decode()


def _words(name: str, kinds: str, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Arguments in words of 8 bytes, and pointers to them; each must be of the kind that the kernel declares."""
    words = np.zeros(len(args), np.uint64)
    for i, (kind, arg) in enumerate(zip(kinds, args, strict=True)):
        if isinstance(arg, np.ndarray):
            given = "p"
            assert arg.flags.c_contiguous, f"{name}: argument {i} is not contiguous"
            words[i] = arg.ctypes.data
        else:
            given = {"int32": "i", "float32": "f", "uint64": "p"}[np.asarray(arg).dtype.name]
            words[i : i + 1].view(np.asarray(arg).dtype)[0] = arg
        assert given == kind, f"{name}: argument {i} is {given}, declared {kind}"
    return words, (ctypes.c_void_p * len(args))(*(words.ctypes.data + 8 * i for i in range(len(args))))
