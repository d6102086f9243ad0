"""B90: each missing link of CUDA is an error with reason and remedy, never a traceback."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qwen35rt import device, machine, self_test
from qwen35rt.backends import cuda
from qwen35rt.backends.base import Limits
from qwen35rt.backends.cuda.backend import CudaBackend
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.errors import BackendUnavailable
from qwen35rt.model.program import Program
from tests.cuda_host.cupy_host import CUDARuntimeError, Machine, make_cupy
from tests.cuda_host.host import HostLauncher, compiler
from tests.implementations import cpu_backend, isa_levels


class Runtime:
    """Stands in for launch.py: a device of a capability, or an error of one of its functions."""

    RUNTIME_ERRORS = (RuntimeError, OSError)

    def __init__(self, capability: tuple[int, int] = (9, 0), count: int = 1, fails: str = "", status: int = 0) -> None:
        self.capability, self.count, self.fails, self.status = capability, count, fails, status

    def _fail(self, name: str) -> None:
        if self.fails == name:
            raise CUDARuntimeError(self.status) if self.status else RuntimeError(f"{name} failed")

    def nvrtc_version(self) -> tuple[int, int]:
        self._fail("nvrtc")
        return 13, 0

    def device_count(self) -> int:
        self._fail("count")
        return self.count

    def CupyLauncher(self, number: int) -> Any:
        self._fail("open")
        made = ModuleType("launcher")
        vars(made).update(capability=self.capability, description="Tester (sm_00)", tensor_cores=True)
        return made


class Wrong(ReferenceBackend):
    """Gives logits of another scale."""

    name = "cuda"

    def compile(self, program: Program, limits: Limits) -> Any:
        exe: Any = super().compile(program, limits)
        run = exe.run

        def scaled(*given: Any) -> Any:
            logits, report = run(*given)
            return 1.1 * logits, report

        exe.run = scaled
        return exe


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with CuPy and a driver, whose launch module is the given one."""

    def install(launch: Any) -> None:
        monkeypatch.setattr(cuda, "packages_problem", lambda: None)
        monkeypatch.setattr(cuda, "driver_problem", lambda: None)
        monkeypatch.setitem(sys.modules, "qwen35rt.backends.cuda.launch", launch)
        monkeypatch.setattr(cuda, "launch", launch, raising=False)

    return install


@pytest.mark.parametrize(
    ("launch", "text"),
    [
        (Runtime(fails="nvrtc"), r"NVRTC\) cannot be loaded \(nvrtc failed\); install .*\[cuda13\]"),
        (Runtime(fails="count"), r"could not be opened \(count failed\); nvidia-smi"),
        (Runtime(fails="count", status=35), r"driver is too old for this CuPy \(cudaError 35\): update it.*\[cuda12\]"),
        (Runtime(fails="open"), r"could not be opened \(open failed\)"),
        (Runtime(count=0), "no device 0, there are 0"),
        (Runtime((7, 0)), r"Tester \(sm_00\) is too old; sm_75 or later is needed; --device cpu"),
    ],
)
def test_b90_a_broken_link_is_named(opened: Any, launch: Any, text: str) -> None:
    opened(launch)
    with pytest.raises(BackendUnavailable, match=f"device cuda does not work here: .*{text}"):
        cuda.open_cuda()
    assert device.cuda_problem() is not None
    assert not str(device.cuda_problem()).startswith("device cuda")


def test_b90_cupy_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "packages_problem", lambda: None)
    monkeypatch.setattr(cuda, "driver_problem", lambda: None)
    monkeypatch.delitem(sys.modules, "qwen35rt.backends.cuda.launch", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailable, match=r"CuPy cannot be imported \(ModuleNotFoundError"):
        cuda.open_cuda()


def test_b90_both_wheels_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("cupy-cuda12x", "cupy-cuda13x"):
            return "13.6"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cuda, "driver_problem", lambda: None)
    with pytest.raises(BackendUnavailable, match=r"cupy-cuda12x and cupy-cuda13x are both installed .*pip uninstall"):
        cuda.open_cuda()


NO_DRIVER, THERE = "^no NVIDIA driver .*install one.*a container", r"^14\.0 installed$"
EXTRA = r"CuPy is not installed \(pip install 'qwen35rt\[cuda13\]'"
# Whether there are a driver and CuPy -> what doctor says of the driver, of CuPy and of the backend.
DOCTOR = {
    "nothing": (False, False, NO_DRIVER, "^not installed", f"{NO_DRIVER}.*; {EXTRA}"),
    "no-cupy": (True, False, "^works$", "^not installed", f"^{EXTRA}"),
    "no-driver": (False, True, NO_DRIVER, THERE, NO_DRIVER),
    "broken": (True, True, "^works$", "does not work: OSError: cudart", r"not be opened \(open failed\); nvidia-smi"),
    "works": (True, True, "^works$", THERE, "^works$"),
}


@pytest.mark.parametrize("what", DOCTOR)
def test_b90_doctor_tells_what_is_missing(what: str, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, cupy, *wanted = DOCTOR[what]
    if driver and cupy:
        opened(Runtime(fails="open" if what == "broken" else ""))
        monkeypatch.setattr(self_test, "self_test", lambda backend: None)
    stand_in = make_cupy(Machine())
    stand_in.__version__ = "14.0"

    class Driver:
        def cuInit(self, flags: int) -> int:
            return 0

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = 1
            return 0

    def library(name: str) -> Driver:
        if not driver:
            raise OSError(name)
        return Driver()

    def find(name: str) -> object:
        return object() if cupy else None

    def broken() -> int:
        raise OSError("cudart")

    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    if what == "broken":
        stand_in.cuda.runtime.getDeviceCount = broken
    state = machine.gpu_state()
    assert state["devices"] == (["Emulated"] if what == "works" else [])
    for name, text in zip(("driver", "cupy", "cuda"), wanted, strict=True):
        assert re.search(text, state[name]), (name, state[name])


def test_a_device_that_works_is_chosen(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(Runtime())
    monkeypatch.setattr(self_test, "self_test", lambda backend: None)
    for asked in ("auto", "cuda"):
        choice = device.choose_device(asked)
        assert choice.backend.name == "cuda"
        assert "Tester" in choice.description
    assert device.cuda_problem() is None


def test_a_device_that_computes_wrong_results_is_refused(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(Runtime())
    monkeypatch.setattr(cuda, "open_cuda", Wrong)
    with pytest.raises(BackendUnavailable, match=r"its results are wrong \(error .*bound 1e-03"):
        device.choose_device("cuda")
    assert device.choose_device("auto").reason.startswith("cuda does not work here: its results are wrong")
    assert "wrong" in str(device.cuda_problem())


def test_the_self_test_passes_what_is_right() -> None:
    """Also backends that round activations, and whose steps write their logits to the same place again and again."""
    self_test.self_test(ReferenceBackend(np.float64))
    for level in isa_levels()[-1:]:
        self_test.self_test(cpu_backend(level, threads=1))


@pytest.mark.skipif(compiler() is None, reason="no g++ to build the kernels for the CPU")
@pytest.mark.long
def test_the_self_test_passes_in_emulation() -> None:
    """What a device meets before anything else; with tensor cores."""
    self_test.self_test(CudaBackend(HostLauncher()))
