"""launch.py without a GPU: every line of it, over a stand-in for CuPy whose kernels run in emulation.

What the stand-in demands and raises is what CuPy 14 does; that a real device agrees is for ``pytest -m gpu``.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35rt.backends.base import Batch, Limits
from qwen35rt.backends.cuda.backend import CudaBackend
from qwen35rt.backends.cuda.interface import NOTHING
from qwen35rt.errors import BackendError, KernelCompileError, OutOfMemory
from qwen35rt.model.program import StateShape
from qwen35rt.model.source import open_source
from tests.cuda_host import cupy_host
from tests.cuda_host.cupy_host import Machine, launch_module
from tests.cuda_host.host import HostLauncher, compiler
from tests.engine.rig import check_best

from .device import table_executable

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the kernels for the CPU")


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def module(machine: Machine) -> Any:
    return launch_module(machine)


@pytest.fixture
def launcher(module: Any) -> Any:
    return module.CupyLauncher()


def _gather(launcher: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """A kernel, its arguments and where the result goes: row 1 of [2, 4] as the wanted row."""
    x, out = launcher.empty((2, 4), np.float32), launcher.zeros((1, 4), np.float32)
    launcher.upload(x, np.arange(8, dtype=np.float32).reshape(2, 4))
    step = launcher.zeros((20,), np.int32)
    host = np.zeros(20, np.int32)
    host[[0, 2, 12, 16]] = 2, 1, 16, 1  # N_ROWS, N_OUTS, AT_OUTS and there the row
    launcher.upload(step, host)
    return launcher.kernel("elementwise", "", "gather_rows"), (x, np.int32(4), out, step, np.int32(4)), out


def test_a_kernel_runs_on_the_stream_of_the_launcher(machine: Machine, launcher: Any) -> None:
    with launcher.activate():
        kernel, args, out = _gather(launcher)
        kernel((1, 1, 1), 128, 0, args)
        np.testing.assert_array_equal(launcher.download(out), [[4, 5, 6, 7]])
        launcher.synchronize()
    assert len(machine.streams) == 1  # and not the null stream, which nothing here waits for
    assert cupy_host.NULL_STREAM not in machine.streams
    assert machine.stream == cupy_host.NULL_STREAM  # left again


def test_a_device_is_described(machine: Machine, module: Any, launcher: Any) -> None:
    assert (launcher.description, launcher.capability, launcher.memory_bytes) == ("Emulated (sm_90)", (9, 0), 1 << 30)
    assert launcher.tensor_cores
    with launcher.activate():
        array, machine.kept = launcher.empty((1024,), np.float32), 512
    assert CudaBackend(launcher).free_bytes() == (1 << 30) - array.nbytes
    machine.capability = 7, 5
    assert not module.CupyLauncher().tensor_cores
    assert (module.device_count(), module.nvrtc_version()) == (1, (13, 0))


def test_a_model_runs_as_in_plain_emulation(machine: Machine, launcher: Any, tiny_dense: Path) -> None:
    """Launches one by one, then a graph; logits in pinned memory, which later steps use again."""
    program, limits = open_source(tiny_dense).program, Limits(8, 8, 1, 2, 16)
    exe, plain = (CudaBackend(it).compile(program, limits) for it in (launcher, HostLauncher()))
    for start, ids in ((0, [5, 6, 7]), (3, [8]), (4, [9]), (5, [10])):
        batch = Batch.single(ids, start, np.arange(2, dtype=np.int32))
        np.testing.assert_array_equal(exe.run(batch)[0], plain.run(batch)[0])
        check_best(exe.run(batch, top=2)[0], plain.run(batch)[0], 2)
        np.testing.assert_array_equal(exe.full_logits(0), plain.full_logits(0))
    assert machine.replays > 3
    assert machine.pinned == program.n_vocab * 4 + limits.out_rows * 2 * 2 * 4  # whole rows; pairs
    delta, conv = exe.read_slot(0)
    exe.write_slot(0, delta, conv)
    exe.copy_page(0, 1)
    assert len({file for file, _ in machine.compiled}) > 5
    assert len(machine.compiled) == len(set(machine.compiled))  # each module once
    before = machine.used
    exe.close()
    assert machine.used < before / 2


def test_copies_must_be_contiguous(launcher: Any) -> None:
    with launcher.activate():
        array = launcher.zeros((4, 4), np.float32)[:, :2]
        with pytest.raises(BackendError, match=r"shape \(4, 2\) is not contiguous"):
            launcher.upload(array, np.zeros((4, 2), np.float32))
        with pytest.raises(BackendError, match=r"shape \(4, 2\) is not contiguous"):
            launcher.download(array)


def test_arguments_must_be_contiguous(launcher: Any) -> None:
    with launcher.activate():
        kernel, (x, *rest), _ = _gather(launcher)
        with pytest.raises(BackendError, match="not contiguous"):
            kernel((1, 1, 1), 128, 0, (x[:, :2], *rest))


def test_pinned_memory_has_the_shape_asked_for(launcher: Any) -> None:
    for shape in ((3, 5), (0, 7), (1,)):
        array = launcher.host(shape, np.float32)
        assert (array.shape, array.dtype, array.flags.writeable) == (shape, np.float32, True)


def test_the_host_may_change_what_it_sent(machine: Machine, module: Any) -> None:
    """A device that reads the host's pages is waited for; where copies are staged, nothing waits."""
    for reads, waits in ((0, 0), (1, 1)):
        machine.reads_host, machine.synchronized = reads, 0
        launcher = module.CupyLauncher()
        with launcher.activate():
            launcher.upload(launcher.empty((2,), np.int32), np.zeros(2, np.int32))
        assert machine.synchronized == waits


# ------------------------------------------------------------------------------------------ several devices


def _use(exe: Any) -> None:
    """Everything that an executable of table_program is asked for."""
    pages = np.arange(5, dtype=np.int32)
    for n in range(3):  # launches one by one, then a graph
        assert exe.run(Batch.single([n], n, pages))[0][0, 0] == 32 * n
    check_best(exe.run(Batch.single([2], 3, pages), top=2)[0], exe.full_logits(0)[None], 2)
    exe.copy_slot(0, 1)
    exe.copy_page(0, 1)
    exe.write_slot(1, *exe.read_slot(0))


def test_the_device_of_the_launcher_is_current_in_all_that_is_done(machine: Machine, module: Any) -> None:
    """Another one is that of the thread, before and behind; memory is given back with its own current, too."""
    machine.devices = 2
    exe = table_executable(module.CupyLauncher(1), StateShape(1, 2, 16, 2, 4, 16, 24, 4))
    _use(exe)
    assert machine.used > 0
    exe.close()
    assert (machine.used, machine.busy, machine.device) == (0, {1}, 0)


def test_a_device_that_is_lost_keeps_no_memory_alive(machine: Machine, launcher: Any) -> None:
    """Closing raises nothing, as it is what follows a fault."""
    exe = table_executable(launcher)
    machine.fails["device"] = cupy_host.CUDARuntimeError(700)
    exe.close()
    assert machine.used == 0
    assert not machine.fails
    exe.close()


# ------------------------------------------------------------------------------------------ graphs


def test_a_graph_is_captured_once_and_replayed(machine: Machine, launcher: Any) -> None:
    with launcher.activate():
        kernel, args, out = _gather(launcher)
        kernel((1, 1, 1), 128, 0, args)
        out.set(np.zeros((1, 4), np.float32))
        replay = launcher.capture(lambda: kernel((1, 1, 1), 128, 0, args))
        assert not launcher.download(out).any()  # recorded, not run
        replay()
        np.testing.assert_array_equal(launcher.download(out), [[4, 5, 6, 7]])
    assert (machine.launches, machine.replays) == (1, 1)


@pytest.mark.parametrize("end_fails", [False, True])
def test_what_fails_in_a_capture_comes_through(machine: Machine, launcher: Any, end_fails: bool) -> None:
    """Not that the capture is incomplete; and the stream captures no longer."""

    def go() -> None:
        raise BackendError("the cause")

    with launcher.activate():
        if end_fails:
            machine.fails["end_capture"] = cupy_host.CUDARuntimeError(901)
        with pytest.raises(BackendError, match="the cause"):
            launcher.capture(go)
        kernel, args, _ = _gather(launcher)
        kernel((1, 1, 1), 128, 0, args)
        assert machine.launches == 1


# ------------------------------------------------------------------------------------------ shared memory


def test_shared_memory_is_asked_for_and_never_lowered(machine: Machine, launcher: Any) -> None:
    """Two kernels of one function: the smaller need does not take away what the greater one asked for."""
    with launcher.activate():
        first, args, _ = _gather(launcher)
        second = launcher.kernel("elementwise", "", "gather_rows")
        first((1, 1, 1), 128, 60_000, args)
        second((1, 1, 1), 128, 50_000, args)
        first((1, 1, 1), 128, 60_000, args)
    assert set(machine.shared.values()) == {60_000}
    with pytest.raises(BackendError, match="the GPU failed"), launcher.activate():
        first((1, 1, 1), 128, 300_000, args)


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("what", "error", "wanted"),
    [
        ("empty", cupy_host.OutOfMemoryError(8, 0), OutOfMemory),
        ("pinned", cupy_host.CUDARuntimeError(2), OutOfMemory),
        ("launch", cupy_host.CUDADriverError(2), OutOfMemory),
        ("launch", cupy_host.CUDADriverError(700), BackendError),
        ("synchronize", cupy_host.CUDARuntimeError(700), BackendError),
    ],
)
def test_errors_of_the_device_are_ours(
    machine: Machine, launcher: Any, what: str, error: Exception, wanted: type[Exception]
) -> None:
    with launcher.activate():
        kernel, args, out = _gather(launcher)

    def everything() -> None:
        with launcher.activate():
            launcher.empty((2,), np.float32)
            launcher.host((2,), np.float32)
            kernel((1, 1, 1), 128, 0, args)
            launcher.synchronize()

    machine.fails[what] = error
    with pytest.raises(BackendError) as found:
        everything()
    assert type(found.value) is wanted
    assert found.value.__cause__ is error
    with launcher.activate():
        assert launcher.download(out) is not None


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (cupy_host.CompileException("kern.cu(3): error"), r"elementwise\.cu \(plain\) could not be compiled: kern"),
        (RuntimeError("Failed to auto-detect CUDA root"), "could not be compiled: RuntimeError: Failed to auto"),
        (cupy_host.NVRTCError("NVRTC_ERROR"), "could not be compiled: NVRTCError"),
        (PermissionError("kernel_cache"), "could not be compiled: PermissionError"),
    ],
)
def test_a_module_that_does_not_compile(machine: Machine, launcher: Any, error: Exception, text: str) -> None:
    """It is tried again by the next launch."""
    with launcher.activate():
        kernel, args, out = _gather(launcher)
        machine.fails["compile"] = error
        with pytest.raises(KernelCompileError, match=text):
            kernel((1, 1, 1), 128, 0, args)
        kernel((1, 1, 1), 128, 0, args)
        assert launcher.download(out).any()


def test_a_module_that_does_not_load_is_a_fault_of_the_device(machine: Machine, launcher: Any) -> None:
    machine.fails["compile"] = cupy_host.CUDADriverError(209)  # no binary for this device
    with pytest.raises(BackendError, match="the GPU failed") as found, launcher.activate():
        launcher.function("rope", "", "rope")
    assert not isinstance(found.value, KernelCompileError)


def test_threads_compile_a_module_once(machine: Machine, launcher: Any) -> None:
    def go() -> None:
        with launcher.activate():
            launcher.function("rope", "", "rope")

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(machine.compiled) == 1


def test_the_stand_in_is_strict(launcher: Any) -> None:
    """What CuPy refuses: other dtypes and shapes, an array of the host as an argument, copies during a capture."""
    with launcher.activate():
        array = launcher.zeros((2,), np.float32)
        for wrong in (np.zeros(2, np.float64), [0.0, 0.0]):
            with pytest.raises(TypeError):
                array.set(wrong)
        with pytest.raises(ValueError, match="Shape mismatch"):
            array.get(out=np.zeros(3, np.float32))
        kernel, args, _ = _gather(launcher)
        with pytest.raises(TypeError, match=r"numpy\.ndarray"):
            kernel((1, 1, 1), 128, 0, (np.zeros((2, 4), np.float32), *args[1:]))
        with pytest.raises(AssertionError, match="declared"):
            kernel((1, 1, 1), 128, 0, (NOTHING, NOTHING, *args[2:]))
        with pytest.raises(BackendError, match="the GPU failed"), launcher.activate():
            launcher.capture(lambda: launcher.download(array))
