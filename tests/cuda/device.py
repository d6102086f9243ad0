"""The devices that tests of the CUDA backend run on: emulation in place of CuPy, and the first GPU (``-m gpu``).

One test serves both, less of it in emulation, so that a test is known to be right before a GPU sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qwen35rt.backends.base import Limits
from qwen35rt.backends.cuda import open_cuda
from qwen35rt.backends.cuda.backend import CudaBackend, CudaExecutable
from qwen35rt.errors import BackendUnavailable
from qwen35rt.model.program import Builder, Program, StateShape
from tests.cuda_host.cupy_host import Machine, launch_module
from tests.cuda_host.host import compiler
from tests.ops.tensors import plain_tensor

NO_COMPILER = pytest.mark.skipif(compiler() is None, reason="no g++ to build the kernels for the CPU")
EMULATED = pytest.param("emulated", marks=NO_COMPILER)
GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@dataclass(frozen=True)
class Device:
    """A backend. ``small``: it is slow, so that a small form of a test has to do."""

    backend: CudaBackend
    small: bool

    @property
    def launcher(self) -> Any:
        return self.backend.launcher

    @property
    def pool(self) -> Any:
        """CuPy's pool of memory."""
        return self.launcher.xp.get_default_memory_pool()

    @contextmanager
    def full(self) -> Iterator[None]:
        """While it lasts there is no memory beyond what is in use."""
        with self.launcher.activate():
            self.pool.free_all_blocks()
            self.pool.set_limit(size=max(self.pool.total_bytes(), 1))
        try:
            yield
        finally:
            with self.launcher.activate():
                self.pool.set_limit(size=0)


@pytest.fixture(scope="session", params=[EMULATED, GPU])
def device(request: pytest.FixtureRequest) -> Device:
    """Each device that is there."""
    if request.param == "emulated":
        return Device(CudaBackend(launch_module(Machine()).CupyLauncher()), True)
    try:
        return Device(open_cuda(), False)
    except BackendUnavailable as e:
        pytest.skip(str(e))


def table_program(shape: StateShape | None = None) -> Program:
    """Logits that are rows of a table [4, 32]: row n is 32 n and what follows. The state is there and unused."""
    b = Builder()
    x = b.embed(plain_tensor("table", np.arange(128, dtype=np.float32).reshape(4, 32)))
    out = b.gather_rows(x, "out")
    return Program(tuple(b.ops), tuple(b.values), x, out, shape or StateShape(0, 1, 16, 0, 1, 16, 16, 4), 4)


def table_executable(launcher: Any, shape: StateShape | None = None) -> CudaExecutable:
    """The program above for steps of 4 rows, 3 slots, 5 pages of 4 tokens."""
    return CudaBackend(launcher).compile(table_program(shape), Limits(4, 4, 3, 5, 4))
