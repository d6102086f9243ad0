"""B90: an asked-for device that does not work is an error that says why; auto says what it chose and why."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from qwen35rt import device, parts, self_test
from qwen35rt.backends import cuda
from qwen35rt.backends.cuda.backend import CudaBackend
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.errors import BackendUnavailable, ConfigError
from qwen35rt.machine import PACKAGES
from qwen35rt.model.source import Source, open_source
from tests.cuda_host.host import HostLauncher
from tests.implementations import native

ROOT = Path(__file__).resolve().parents[1]
needs_native = pytest.mark.skipif(native() is None, reason="the compiled module qwen35rt._native is not built")


class Driver:
    """Stands in for libcuda."""

    def __init__(self, init: int, count: int) -> None:
        self.init, self.count = init, count

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = self.count
        return 0


@pytest.fixture
def _cupy_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_b90_no_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"cuda .*CuPy is not installed.*pip install 'qwen35rt\[cuda13\]'"):
        device.choose_device("cuda")
    assert "cupy" not in sys.modules


@pytest.mark.usefixtures("_cupy_there")
def test_b90_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(BackendUnavailable, match=r"no NVIDIA driver .*libcuda"):
        device.choose_device("cuda")


@pytest.mark.usefixtures("_cupy_there")
@pytest.mark.parametrize(
    ("init", "count", "text"),
    [
        (100, 0, "no NVIDIA device"),
        (999, 0, "cuInit gave 999"),
        (0, 0, "no NVIDIA device"),
        (0, 1, "CuPy cannot be imported"),
    ],
)
def test_b90_driver_state(monkeypatch: pytest.MonkeyPatch, init: int, count: int, text: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(init, count))
    with pytest.raises(BackendUnavailable, match=text):
        device.choose_device("cuda")


@pytest.mark.parametrize(
    ("device_name", "layers", "text"),
    [
        ("cpu", 1, "n_gpu_layers is 1: layers on a GPU need device 'cuda' or 'auto', not 'cpu'"),
        ("reference", 3, "not 'reference'"),
        ("cuda", 0, "n_gpu_layers is 0: no layers are left for device 'cuda'"),
        ("auto", -2, "n_gpu_layers is -2; a number of layers from 0 up is needed, or -1 or 'all'"),
        ("auto", "many", "n_gpu_layers is 'many'"),
        ("auto", True, "n_gpu_layers is True"),
        ("auto", 1.5, "n_gpu_layers is 1.5"),
    ],
)
def test_layers_that_cannot_be_meant(device_name: str, layers: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        device.choose_device(device_name, n_gpu_layers=layers)


@needs_native
def test_no_layers_for_a_gpu_is_the_cpu_without_a_look_at_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "open_cuda", None)
    for asked, variable in ((0, ""), ("0", ""), (None, "0")):
        monkeypatch.setenv("QWEN35RT_N_GPU_LAYERS", variable)
        choice = device.choose_device("auto", n_gpu_layers=asked).for_layers(4)
        assert (choice.backend.name, choice.reason, choice.gpu_layers) == ("cpu", "no layers are for a GPU", 0)
    monkeypatch.setenv("QWEN35RT_N_GPU_LAYERS", "7")
    assert device.choose_device("cpu").backend.name == "cpu", "a device that is named stands before the variable"


def test_b90_layers_for_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As --device cuda: no silent CPU, whoever asks. All layers of the device that is found may be none of a GPU."""

    def missing() -> None:
        raise BackendUnavailable("device cuda does not work here: no NVIDIA device")

    monkeypatch.setattr(cuda, "open_cuda", missing)
    for asked, variable in ((2, ""), ("2", ""), (None, "2")):
        monkeypatch.setenv("QWEN35RT_N_GPU_LAYERS", variable)
        with pytest.raises(BackendUnavailable, match="no NVIDIA device"):
            device.choose_device("auto", n_gpu_layers=asked)
    if native() is not None:
        for everything in (-1, "all"):
            choice = device.choose_device("auto", n_gpu_layers=everything).for_layers(4)
            assert (choice.backend.name, choice.gpu_layers) == ("cpu", 0)


def test_layers_of_a_model_are_placed(monkeypatch: pytest.MonkeyPatch, tiny_dense: Path) -> None:
    """Fewer than the model has: split, and said so. As many or more: all on the GPU."""
    monkeypatch.setattr(cuda, "open_cuda", lambda: CudaBackend(HostLauncher(description="Tester (sm_00)")))
    monkeypatch.setattr(self_test, "self_test", lambda backend: None)
    source = open_source(tiny_dense)
    for asked in (None, -1, "all", 4, 99):
        choice = device.choose_device("auto", n_gpu_layers=asked).for_layers(source.n_layers)
        assert (choice.backend.name, choice.gpu_layers, choice.device_name) == ("cuda", 4, "Tester (sm_00)")
        assert "4 of" not in choice.description
    if native() is not None:
        choice = device.choose_device("auto", threads=1, n_gpu_layers=3).for_layers(source.n_layers)
        assert (choice.backend.name, choice.gpu_layers, choice.threads) == ("cuda+cpu", 3, 1)
        assert re.fullmatch(
            r"device cuda\+cpu \(\w+, 1 thread\): 3 of 4 layers on Tester \(sm_00\), the rest on the CPU",
            choice.description,
        )


@needs_native
def test_room_of_two_devices_is_that_of_the_one_that_is_full_first(
    monkeypatch: pytest.MonkeyPatch, tiny_dense: Path
) -> None:
    """States of delta layers 0 to 2 and pages of layer 3."""
    program = open_source(tiny_dense).program
    gpu, cpu = CudaBackend(HostLauncher()), device.choose_device("cpu", threads=1)
    weights = sum(w.nbytes for w in {id(w): w for op in program.ops for w in op.weights}.values())
    free = {"gpu": 1 << 30, "cpu": 1 << 30}
    monkeypatch.setattr(gpu, "free_bytes", lambda: free["gpu"])
    monkeypatch.setattr(parts, "memory_bytes", lambda: (1 << 40, free["cpu"]))
    assert parts.room_bytes(cpu, program) == parts.room_bytes(device.Choice(gpu, ""), program) == (1 << 30) - weights
    choice = device.Choice(gpu, "", gpu=gpu, gpu_layers=1, others=cpu).for_layers(4)
    (_, below), (_, above) = choice.parts(program)
    taken = [sum(w.nbytes for op in part.ops for w in op.weights) for part in (below, above)]
    assert parts.room_bytes(choice, program) == (1 << 30) - taken[1], "all pages are on the CPU"
    free["gpu"] = 1 << 28
    assert abs(parts.room_bytes(choice, program) - 3 * ((1 << 28) - taken[0])) < 4, "a third of each state"
    free["gpu"] = 0
    assert parts.room_bytes(choice, program) == 0


def test_unknown_device() -> None:
    with pytest.raises(ConfigError, match=r"'gpu'.*auto, cpu, cuda"):
        device.choose_device("gpu")


def test_the_self_test_opens_the_model_once_and_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Source] = []

    def counted() -> Source:
        opened.append(open_source())
        return opened[-1]

    monkeypatch.setattr(self_test, "open_source", counted)
    self_test.self_test(ReferenceBackend())
    (source,) = opened
    assert not source.file.tensors


def test_doctor_tells_the_version_of_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(PACKAGES) == sorted(re.split(r"[<>=~!]", d, maxsplit=1)[0] for d in project["dependencies"])
