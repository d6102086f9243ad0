"""Launches of the real models at their largest, against the limits of devices: nothing runs and nothing is allocated.

Also the one place where numbers beyond 2^31 can be had in emulation: pools of pages, of which few are touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen35rt.backends.base import Batch, Limits
from qwen35rt.backends.cuda import source
from qwen35rt.backends.cuda.backend import MOST_ROWS, CudaBackend
from qwen35rt.backends.cuda.interface import Grid, Kernel
from qwen35rt.engine.sizes import pool_limits
from qwen35rt.errors import ConfigError
from qwen35rt.formats import FORMATS
from qwen35rt.model.graph import build_program
from qwen35rt.model.hparams import HParams
from qwen35rt.model.program import Program
from qwen35rt.model.weights import QTensor, Weights, _Loader
from tests.cuda_host.host import HostLauncher, compiler
from tests.ops.case import attention_program

from .device import table_program

N_CTX, N_VOCAB, SEQUENCES = 262_144, 248_320, 64
# Shared memory that a block can ask for: of sm_86, 89 and 120, the least of those with tensor cores; of sm_75.
SHARED_BYTES = {True: 99 << 10, False: 64 << 10}
PARAMETER_BYTES = 4096  # of one launch

# name -> width, FFN, heads, kv heads, value heads, experts, of them used, FFN of experts; four layers of each
MODELS = {
    "0.8B": (1024, 3584, 8, 2, 16, 0, 0, 0),
    "9B": (4096, 12288, 16, 4, 32, 0, 0, 0),
    "27B": (5120, 17408, 24, 4, 48, 0, 0, 0),
    "35B-A3B": (2048, 0, 16, 2, 32, 256, 8, 512),
    "397B-A17B": (4096, 0, 32, 2, 64, 512, 10, 1024),
}


class _Shapes(_Loader):
    """Weights that have shapes and no bytes."""

    def __init__(self, hp: HParams) -> None:
        super().__init__(SimpleNamespace(tensors={}), hp)  # type: ignore[arg-type]

    def matrix(self, base: str, rows: int, cols: int, n_expert: int = 1) -> QTensor:
        name = "F32" if "gate_inp" in base else "Q6_K" if base == "output" else "Q4_K"
        (form,) = (f for f in FORMATS if f.name == name)
        row_bytes = form.row_bytes(cols)
        return QTensor(base, form, rows, cols, n_expert, np.zeros(0, np.uint8), row_bytes, rows * row_bytes)

    def vector(self, name: str, *shape: int) -> npt.NDArray[np.float32]:
        return np.ones(shape[::-1], np.float32)


@cache
def _program(name: str) -> Program:
    embd, ffn, heads, kv_heads, v_heads, experts, used, expert_ffn = MODELS[name]
    full = (False, False, False, True)
    tail = (full, 4, 128, 16, v_heads, experts, used, expert_ffn, expert_ffn, N_VOCAB, False)
    hp = HParams("qwen35", 4, 0, N_CTX, embd, ffn, heads, kv_heads, 256, 1e-6, 1e7, 64, (11, 11, 10, 0), *tail)
    load = _Shapes(hp)
    table, output = load.matrix("token_embd", N_VOCAB, embd), load.matrix("output", N_VOCAB, embd)
    layers = tuple(load.layer(i, f) for i, f in enumerate(full))
    return build_program(hp, Weights(table, output, load.vector("", embd), layers, False, ()))


@dataclass(frozen=True)
class Sized:
    """An array without memory."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=object))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __getitem__(self, at: slice) -> Sized:
        first = len(range(*at.indices(self.shape[0])))
        assert at.stop is None or at.stop <= self.shape[0], "a slice beyond the end"
        return replace(self, shape=(first, *self.shape[1:]))

    def view(self, dtype: npt.DTypeLike) -> Sized:
        made = np.dtype(dtype)
        count, left = divmod(self.shape[-1] * self.dtype.itemsize, made.itemsize)
        assert left == 0
        return Sized((*self.shape[:-1], count), made)

    def reshape(self, *shape: int) -> Sized:
        made = replace(self, shape=shape)
        assert made.size == self.size
        return made


@cache
def _bounds(file: str) -> dict[str, int]:
    """The most threads of a block by the name of a kernel, or the stem of those that a macro makes."""
    return {
        name: int(bound)
        for bound, name in re.findall(
            r"__launch_bounds__\((\d+)[\d, ]*\)[\s\\]+(\w+?)(?:##\w+)?\(", source.source(file)
        )
    }


class Geometry:
    """A launcher that looks at what would be launched."""

    xp: Any = None
    description = "geometry"

    def __init__(self, tensor_cores: bool) -> None:
        self.tensor_cores = tensor_cores
        self.largest: dict[str, Grid] = {}  # grids by kernel, the largest of each axis
        self.bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Sized:
        made = Sized(shape, np.dtype(dtype))
        self.bytes += made.nbytes
        return made

    zeros = empty

    def upload(self, to: Any, host: npt.NDArray[Any]) -> None: ...
    def synchronize(self) -> None: ...

    def host(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.empty(shape, dtype)

    def download(self, array: Sized, to: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        return np.zeros(array.shape, array.dtype) if to is None else to

    def capture(self, go: Callable[[], None]) -> Callable[[], None]:
        go()
        return go

    def free_bytes(self) -> int:
        return 1 << 40

    @contextmanager
    def activate(self) -> Iterator[None]:
        yield

    def kernel(self, file: str, variant: str, name: str) -> Kernel:
        bounds = _bounds(file)
        most = bounds.get(name) or next(b for stem, b in bounds.items() if stem.endswith("_") and name.startswith(stem))

        def check(grid: Grid, block: int, shared_bytes: int, args: tuple[Any, ...]) -> None:
            what = name, grid, block, shared_bytes
            assert all(1 <= n <= limit for n, limit in zip(grid, (2**31 - 1, 65_535, 65_535), strict=True)), what
            assert block % 32 == 0, what
            assert 32 <= block <= most, what
            assert 0 <= shared_bytes <= SHARED_BYTES[self.tensor_cores], what
            assert sum(8 if isinstance(a, Sized) else a.nbytes for a in args) <= PARAMETER_BYTES, what
            before = self.largest.get(name, (1, 1, 1))
            self.largest[name] = (max(before[0], grid[0]), max(before[1], grid[1]), max(before[2], grid[2]))

        return check


def _batch(counts: list[int], end: int, width: int) -> Batch:
    """Sequences of so many rows that end at token ``end``; logits of the last row of each."""
    n, rows = len(counts), sum(counts)
    ends = np.cumsum(counts)
    table = np.tile(np.arange(width), (n, 1))
    fields = np.zeros(rows), np.zeros((3, rows)), [0, *ends], end - np.array(counts), np.arange(n), table, ends - 1
    return Batch(*(np.ascontiguousarray(f, np.int32) for f in fields))


@pytest.mark.parametrize("tensor_cores", [True, False], ids=["tensor-cores", "plain"])
@pytest.mark.parametrize("rows", [512, 4096, MOST_ROWS])
@pytest.mark.parametrize("name", MODELS)
def test_launches_of_real_models_are_within_the_limits(name: str, rows: int, tensor_cores: bool) -> None:
    """A whole context, 64 sequences, the largest steps: a prompt, prompts beside decode, decode by a graph."""
    program, launcher = _program(name), Geometry(tensor_cores)
    limits = pool_limits(program, N_CTX, rows, SEQUENCES, 8 << 30)
    exe = CudaBackend(launcher).compile(program, limits)
    width = N_CTX // limits.page_tokens
    beside = [limits.rows - SEQUENCES + 1, *[1] * (SEQUENCES - 1)]
    several = [limits.rows // SEQUENCES] * SEQUENCES
    for counts in ([limits.rows], beside, several, [1], [1], [1] * 63, [1] * 63):
        batch = _batch(counts, N_CTX, width)
        assert exe.run(batch)[1].on_gpu
    assert exe.run(_batch([1] * 64, 30 * 128, width))[1].on_gpu  # in pieces
    exe.copy_page(0, limits.pages - 1)
    exe.copy_slot(0, limits.slots - 1)
    heads = MODELS[name][3]
    assert launcher.largest["attention"][1] == heads
    assert launcher.largest["attention"][2] == 2048  # one sequence at its end
    assert ("linear_tiles_128" in launcher.largest) == tensor_cores
    assert ("moe_tiles" in launcher.largest) == (tensor_cores and "A" in name)
    if "A" in name and not tensor_cores:
        assert launcher.largest["moe_linear"][1:] == (rows, _used(program))
    assert exe.memory["keys and values"] > 2**31  # its numbers need 64 bits
    assert launcher.bytes >= sum(exe.memory.values())


def _used(program: Program) -> int:
    """Experts of a row."""
    return next(int(op.attrs["used"]) for op in program.ops if op.kind == "moe_linear")


def test_steps_that_no_grid_can_hold_are_refused() -> None:
    """Rows lie along an axis of a grid that has 65,535 blocks at most."""
    for rows in (MOST_ROWS, MOST_ROWS + 1):
        limits = Limits(rows, 4, 3, 5, 4)
        backend = CudaBackend(Geometry(True))
        if rows == MOST_ROWS:
            backend.compile(table_program(), limits)
            continue
        with pytest.raises(ConfigError, match=r"steps of 65536 rows; a CUDA device takes up to 65535"):
            backend.compile(table_program(), limits)


def test_geometry_finds_what_it_is_there_to_find() -> None:
    launcher, args = Geometry(True), (Sized((4,), np.dtype(np.float32)), np.int32(1))
    for file, name, grid, block, shared in (
        ("rope", "rope", (1, 65_536, 1), 128, 0),
        ("rope", "rope", (1, 1, 0), 128, 0),
        ("rope", "rope", (1, 1, 1), 160, 0),
        ("linear", "linear_8", (1, 1, 1), 256, 0),
        ("attention", "attention", (1, 1, 1), 128, 100 << 10),
    ):
        with pytest.raises(AssertionError):
            launcher.kernel(file, "", name)(grid, block, shared, args)
    with pytest.raises(AssertionError):
        launcher.kernel("rope", "", "rope")((1, 1, 1), 128, 0, args * 400)
    with pytest.raises(AssertionError):
        args[0][:5]


# ------------------------------------------------------------------------------------------ numbers beyond 2^31


def _attentive() -> Program:
    """In tiles from 16 rows on."""
    return attention_program("far pages", 40, 2, 1, 64)


@pytest.mark.skipif(compiler() is None, reason="no g++ to build the kernels for the CPU")
def test_pages_beyond_2_31_numbers_are_found() -> None:
    """Written, read by both kernels of attention and copied where an index of 32 bits is none."""
    pages = 2**31 // (2 * 64 * 64) + 8192
    assert 2 * pages * 64 * 64 > 2**31 + 2**24
    found = []
    for count in (4, pages):
        try:
            exe = CudaBackend(HostLauncher()).compile(_attentive(), Limits(40, 40, 1, count, 64))
        except MemoryError:
            pytest.skip("this system gives no memory before it is used")
        last = np.arange(count - 1, count, dtype=np.int32)
        rows = [exe.run(Batch.single(range(20), 0, last, out_rows=range(20)))[0].copy()]
        exe.copy_page(count - 1, count - 2)
        for start in range(20, 23):
            rows.append(exe.run(Batch.single([start], start, last - 1))[0].copy())
        exe.close()
        found.append(np.concatenate(rows))
    np.testing.assert_array_equal(found[1], found[0])
    assert np.isfinite(found[0]).all()
