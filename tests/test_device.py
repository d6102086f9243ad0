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

from qwen35rt import device, self_test
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.errors import BackendUnavailable, ConfigError
from qwen35rt.machine import PACKAGES
from qwen35rt.model.source import Source, open_source

ROOT = Path(__file__).resolve().parents[1]


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
