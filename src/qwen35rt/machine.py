"""What this machine is: processor name, memory, GPUs and CuPy. For reports only; nothing is decided here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from pathlib import Path
from typing import Any

from .backends.cuda import driver_problem
from .device import cuda_problem

PACKAGES = (
    *("numpy", "gguf", "tokenizers", "sentencepiece", "minijinja", "huggingface-hub", "tqdm", "psutil"),
    *("quart", "hypercorn", "msgspec", "prometheus-client"),
)


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the system gives it."""
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def memory_bytes() -> tuple[int, int]:
    """Memory in all, and what can be had without swapping."""
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def versions() -> dict[str, str]:
    """Version of each package that this one uses; "-" where it is not installed."""
    return {name: _version(name) for name in PACKAGES}


def gpu_state() -> dict[str, Any]:
    """The state of the driver, of CuPy and of this package's backend, each in words; imports CuPy if it is there."""
    state: dict[str, Any] = {"driver": driver_problem() or "works", "cupy": "not installed", "devices": []}
    if importlib.util.find_spec("cupy") is not None:
        try:
            import cupy

            state["cupy"] = f"{cupy.__version__} installed"
            for i in range(cupy.cuda.runtime.getDeviceCount() if state["driver"] == "works" else 0):
                properties = cupy.cuda.runtime.getDeviceProperties(i)
                state["devices"].append(properties["name"].decode())
        except Exception as e:  # whatever a broken installation raises is what the reader wants to know
            state["cupy"] = f"installed, but does not work: {type(e).__name__}: {e}"
    state["cuda"] = cuda_problem() or "works"
    return state


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "-"
