"""Opens the CUDA backend, or says which link of the chain is missing: CuPy, driver, device, runtime compiler."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING

from ...errors import BackendUnavailable

if TYPE_CHECKING:
    from .backend import CudaBackend

MIN_CAPABILITY = (7, 5)
CUPY_PACKAGES = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
OLD_DRIVER = 35  # cudaErrorInsufficientDriver
INSTALL = "pip install 'qwen35rt[cuda13]', or [cuda12] for older drivers"


def open_cuda(device: int = 0) -> CudaBackend:
    """The backend on device number ``device``. Raises BackendUnavailable with reason and remedy."""
    problems = [problem for problem in (driver_problem(), packages_problem()) if problem is not None]
    if problems:  # both, so that nobody installs CuPy where it cannot help
        raise BackendUnavailable(f"device cuda does not work here: {'; '.join(problems)}")
    try:
        from . import launch
    except Exception as e:  # whatever a broken installation raises
        raise BackendUnavailable(
            f"device cuda does not work here: CuPy cannot be imported "
            f"({type(e).__name__}: {e}); reinstall it: {INSTALL}"
        ) from e
    try:
        launch.nvrtc_version()
    except launch.RUNTIME_ERRORS as e:
        raise BackendUnavailable(
            f"device cuda does not work here: the CUDA runtime compiler (NVRTC) cannot be loaded ({e}); "
            f"install the extra that brings it: {INSTALL}"
        ) from e
    try:
        count = launch.device_count()
        if device >= count:
            raise BackendUnavailable(f"device cuda does not work here: no device {device}, there are {count}")
        launcher = launch.CupyLauncher(device)
    except launch.RUNTIME_ERRORS as e:
        if getattr(e, "status", None) == OLD_DRIVER:
            raise BackendUnavailable(
                f"device cuda does not work here: the NVIDIA driver is too old for this CuPy ({e}): "
                "update it, or install the extra [cuda12] in place of [cuda13]"
            ) from e
        raise BackendUnavailable(
            f"device cuda does not work here: the device could not be opened ({e}); nvidia-smi tells its state"
        ) from e
    if launcher.capability < MIN_CAPABILITY:
        raise BackendUnavailable(
            f"device cuda does not work here: {launcher.description} is too old; "
            f"sm_{MIN_CAPABILITY[0]}{MIN_CAPABILITY[1]} or later is needed; --device cpu works without"
        )
    from .backend import CudaBackend

    return CudaBackend(launcher)


def packages_problem() -> str | None:
    """What is wrong with the installed packages; None if CuPy is there, once. CuPy itself is not imported."""
    installed = [name for name in CUPY_PACKAGES if _installed(name)]
    if len(installed) > 1:
        return (
            f"{' and '.join(installed)} are both installed and overwrite each other's files: "
            f"pip uninstall {' '.join(installed)}, then {INSTALL}"
        )
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed ({INSTALL})"
    return None


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def driver_problem() -> str | None:
    """What is wrong with the NVIDIA driver or its devices; None if at least one device is there."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (
            "no NVIDIA driver (libcuda.so.1 was not found): install one, 580 or later for [cuda13]; "
            "a container has to be started with the GPUs"
        )
    status = driver.cuInit(0)
    if status and status != NO_DEVICE:
        return f"the NVIDIA driver did not start (cuInit gave {status}): see nvidia-smi; a new one needs a restart"
    count = ctypes.c_int(0)
    if status or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value < 1:
        return "no NVIDIA device: nvidia-smi and CUDA_VISIBLE_DEVICES tell which there are"
    return None
