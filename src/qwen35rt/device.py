"""Chooses the backend for a device name, and says why. The only place that decides; nothing falls back later."""

from __future__ import annotations

from dataclasses import dataclass

from .backends.base import Backend
from .errors import BackendUnavailable, ConfigError

CUDA_FAILS = "device cuda does not work here: "
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

    "auto": CUDA if it works, which the embedded model shows, else the CPU. "cpu": the C kernels, with ``threads``
    threads (None: QWEN35RT_THREADS, else what the machine allows) at instruction level ``isa`` (None: QWEN35RT_ISA,
    else the best). "cuda": the GPU or an error. "reference": NumPy, slow and exact.
    Raises BackendUnavailable if an explicitly named device does not work, ConfigError for an unknown name.
    """
    if device not in DEVICES:
        raise ConfigError(f"device is {device!r}; one of {', '.join(DEVICES)} is needed")
    if device == "reference":
        from .backends.reference import ReferenceBackend

        return Choice(ReferenceBackend(), "asked for")
    reason = "asked for"
    if device in ("auto", "cuda"):
        from .backends.cuda import open_cuda
        from .self_test import self_test

        try:
            cuda = open_cuda()
            self_test(cuda)
        except BackendUnavailable as e:
            if device == "cuda":
                raise
            reason = str(e).removeprefix("device ")
        else:
            return Choice(cuda, f"{'asked for' if device == 'cuda' else 'it works here'}: {cuda.description}")
    from .backends.cpu.backend import CpuBackend

    backend = CpuBackend(threads=threads, isa=isa)
    return Choice(backend, reason, backend.threads, backend.isa)


def cuda_problem() -> str | None:
    """Why CUDA cannot be used: the first link of the chain that is missing; None if it works. CuPy is imported only
    where a driver and a device are there."""
    from .backends.cuda import open_cuda
    from .self_test import self_test

    try:
        self_test(open_cuda())
    except BackendUnavailable as e:
        return str(e).removeprefix(CUDA_FAILS)
    return None
