"""Captures: what CUDA forbids meanwhile is refused by both emulations, and the backend does none of it; graphs that
cannot be made."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qwen35rt.backends.base import Batch
from qwen35rt.errors import BackendError, KernelCompileError, OutOfMemory
from tests.cuda_host import cupy_host
from tests.cuda_host.cupy_host import Machine, launch_module
from tests.cuda_host.host import HostLauncher, compiler

from .device import table_executable

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the kernels for the CPU")

FORBIDDEN: dict[str, Callable[[Any, Any], object]] = {
    "allocation": lambda launcher, array: launcher.empty((4,), np.float32),
    "zeros": lambda launcher, array: launcher.zeros((4,), np.float32),
    "pinned-memory": lambda launcher, array: launcher.host((4,), np.float32),
    "upload": lambda launcher, array: launcher.upload(array, np.zeros(4, np.float32)),
    "download": lambda launcher, array: launcher.download(array),
    "wait": lambda launcher, array: launcher.synchronize(),
    "module": lambda launcher, array: launcher.kernel("copy", "", "copy_items")((1, 1, 1), 256, 0, _copy(array)),
    "capture": lambda launcher, array: launcher.capture(lambda: None),
    "replay": lambda launcher, array: array.replay(),
}


def _copy(array: Any) -> tuple[Any, ...]:
    return (array, array, *(np.int32(n) for n in (8, 8, 2, 0, 1)))


@pytest.mark.parametrize("what", FORBIDDEN)
def test_plain_emulation_refuses_what_a_capture_forbids(what: str) -> None:
    launcher = HostLauncher()
    array: Any = launcher.zeros((4,), np.float32).view(_Array)
    array.replay = launcher.capture(lambda: None)

    def go() -> None:
        FORBIDDEN[what](launcher, array)

    with pytest.raises(AssertionError, match="during a capture"):
        launcher.capture(go)
    launcher.capture(lambda: None)  # the one that failed is over


class _Array(np.ndarray[Any, Any]):
    """An array that a graph comes with."""

    replay: Callable[[], None]


# A capture within one is not begun, and what ends it ends the outer one.
@pytest.mark.parametrize(
    ("what", "swallowed"), [(w, s) for w in FORBIDDEN for s in (False, True) if (w, s) != ("capture", True)]
)
def test_the_stand_in_refuses_what_a_capture_forbids(what: str, swallowed: bool) -> None:
    """Even an error that nobody saw spoils the capture."""
    launcher = launch_module(Machine()).CupyLauncher()
    with launcher.activate():
        array = launcher.zeros((4,), np.float32)
        array.replay = launcher.capture(lambda: None)

    def go() -> None:
        try:
            FORBIDDEN[what](launcher, array)
        except cupy_host.CUDARuntimeError:
            if not swallowed:
                raise

    with pytest.raises(BackendError, match="the GPU failed"), launcher.activate():
        launcher.capture(go)
    with launcher.activate():
        launcher.capture(lambda: None)  # the one that failed is over


def test_a_launch_on_another_stream_is_no_part_of_a_capture() -> None:
    machine = Machine()
    launcher = launch_module(machine).CupyLauncher()
    with launcher.activate():
        copy, args = launcher.kernel("copy", "", "copy_items"), _copy(launcher.zeros((4,), np.float32))
        copy((1, 1, 1), 256, 0, args)

    def go() -> None:
        with cupy_host.Stream(machine):
            copy((1, 1, 1), 256, 0, args)

    with pytest.raises(BackendError, match="the GPU failed"), launcher.activate():
        launcher.capture(go)


# ------------------------------------------------------------------------------------------ graphs that cannot be made


def _rows(exe: Any, count: int, first: int = 0) -> tuple[list[list[float]], bool]:
    """The first columns of some steps of one row, and whether all ran on the device."""
    found, on_gpu = [], True
    for n in range(first, first + count):
        logits, report = exe.run(Batch.single([n % 4], n, np.arange(5, dtype=np.int32)))
        found.append(logits[0, :1].tolist())
        on_gpu = on_gpu and report.on_gpu
    return found, on_gpu


@pytest.mark.parametrize("where", ["end_capture", "upload"])
def test_steps_go_on_without_a_graph_that_finds_no_memory(where: str, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    exe = table_executable(launch_module(machine).CupyLauncher())
    machine.fails[where] = cupy_host.CUDARuntimeError(2)
    with caplog.at_level(logging.WARNING):
        assert _rows(exe, 4) == ([[0.0], [32.0], [64.0], [96.0]], True)
    assert [r.levelname for r in caplog.records] == ["WARNING"]  # once
    assert "no graph for steps of 1 sequences" in caplog.text
    assert machine.replays == 0


def test_another_fault_of_a_capture_is_one_of_the_step() -> None:
    """The device may be gone; the next step tries again."""
    machine = Machine()
    exe = table_executable(launch_module(machine).CupyLauncher())
    _rows(exe, 1)
    machine.fails["end_capture"] = cupy_host.CUDARuntimeError(700)
    with pytest.raises(BackendError, match="the GPU failed") as found:
        _rows(exe, 1, 1)
    assert not isinstance(found.value, OutOfMemory)
    assert _rows(exe, 2, 1) == ([[32.0], [64.0]], True)
    assert machine.replays == 2


def test_a_step_that_failed_is_not_captured_before_it_ran() -> None:
    """What it did not come to compile would be compiled and loaded during the capture."""
    machine = Machine()
    exe = table_executable(launch_module(machine).CupyLauncher())
    machine.fails["compile"] = cupy_host.CompileException("no")
    with pytest.raises(KernelCompileError):
        _rows(exe, 1)
    assert _rows(exe, 3) == ([[0.0], [32.0], [64.0]], True)
    assert machine.replays == 2
