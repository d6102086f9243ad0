"""Chooses the backend for a device name, and says why. The only place that decides; nothing falls back later."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass

from .backends.base import Backend
from .errors import BackendUnavailable, ConfigError

DEVICES = ("auto", "cpu", "cuda", "reference")


@dataclass(frozen=True)
class Choice:
    """A backend, and in a few words why it was chosen."""

    backend: Backend
    reason: str
    threads: int = 1
    isa: str | None = None  # CPU only

    @property
    def description(self) -> str:
        """One line for people."""
        where = self.backend.name
        if self.isa is not None:
            where += f" ({self.isa}, {self.threads} {'thread' if self.threads == 1 else 'threads'})"
        return f"device {where}: {self.reason}"


def choose_device(device: str = "auto", threads: int | None = None, isa: str | None = None) -> Choice:
    """Open the backend for ``device``.

    "auto": CUDA if it works, else the CPU. "cpu": the C kernels, with ``threads`` threads (None: QWEN35RT_THREADS, else
    what the machine allows) at instruction level ``isa`` (None: QWEN35RT_ISA, else the best). "cuda": the GPU or an
    error. "reference": NumPy, slow and exact.
    Raises BackendUnavailable if an explicitly named device does not work, ConfigError for an unknown name.
    """
    if device not in DEVICES:
        raise ConfigError(f"device is {device!r}; one of {', '.join(DEVICES)} is needed")
    if device == "reference":
        from .backends.reference import ReferenceBackend

        return Choice(ReferenceBackend(), "asked for")
    if device == "cuda":
        raise BackendUnavailable(f"device cuda does not work here: {cuda_problem()}")
    reason = "asked for" if device == "cpu" else f"cuda does not work here: {cuda_problem()}"
    from .backends.cpu.backend import CpuBackend

    backend = CpuBackend(threads=threads, isa=isa)
    return Choice(backend, reason, backend.threads, backend.isa)


def cuda_problem() -> str:
    """Why CUDA cannot be used: the first link of the chain that is missing. CuPy itself is not imported."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (pip install 'qwen35rt[cuda13]', or [cuda12] for older drivers)"
    return driver_problem() or "this version of qwen35rt has no CUDA backend yet"


def driver_problem() -> str | None:
    """What is wrong with the NVIDIA driver or its devices; None if at least one device is there."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1 was not found)"
    status = driver.cuInit(0)
    if status:
        return "no NVIDIA device" if status == 100 else f"the NVIDIA driver did not start (cuInit gave {status})"
    count = ctypes.c_int(0)
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status or count.value < 1:
        return "no NVIDIA device"
    return None
