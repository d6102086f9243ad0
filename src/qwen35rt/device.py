"""Chooses the backend for a device name, and says why. The only place that decides; nothing falls back later."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .backends.base import Backend
from .backends.split import SplitBackend
from .config import environment
from .errors import BackendUnavailable, ConfigError
from .model.program import Program

CUDA_FAILS = "device cuda does not work here: "
DEVICES = ("auto", "cpu", "cuda", "reference")
ALL_LAYERS = -1


@dataclass(frozen=True)
class Choice:
    """A backend, and in a few words why it was chosen.

    ``gpu``: the backend of the GPU where one is used, ``device_name`` as its maker calls it. ``gpu_layers``: how many
    layers go there; before ``for_layers`` what was asked for. ``others``: the backend of the other layers.
    """

    backend: Backend
    reason: str
    threads: int = 1
    isa: str | None = None  # CPU only
    gpu: Backend | None = None
    device_name: str = ""
    gpu_layers: int = 0
    others: Choice | None = None

    @property
    def description(self) -> str:
        """One line for people."""
        where = self.backend.name
        if self.isa is not None:
            where += f" ({self.isa}, {self.threads} {'thread' if self.threads == 1 else 'threads'})"
        return f"device {where}: {self.reason}"

    def for_layers(self, n_layers: int) -> Choice:
        """The choice for a model of so many layers: with fewer of them on the GPU, a backend that is split."""
        if self.gpu is None:
            return self
        others = self.others
        if others is None or self.gpu_layers >= n_layers:
            return replace(self, gpu_layers=n_layers)
        return replace(
            self,
            backend=SplitBackend(self.gpu, others.backend, self.gpu_layers),
            reason=f"{self.gpu_layers} of {n_layers} layers on {self.device_name}, the rest on the CPU",
            threads=others.threads,
            isa=others.isa,
        )

    def parts(self, program: Program) -> tuple[tuple[Backend, Program], ...]:
        """What of a program each backend gets: all, where there is one."""
        if isinstance(self.backend, SplitBackend):
            return self.backend.parts(program)
        return ((self.backend, program),)

    def retest(self) -> None:
        """After a fault: raise BackendUnavailable unless the GPU, where one is used, computes what is right again."""
        if self.gpu is not None:
            from .self_test import self_test

            self_test(self.gpu)


def choose_device(
    device: str = "auto", threads: int | None = None, isa: str | None = None, n_gpu_layers: int | str | None = None
) -> Choice:
    """Open the backend for ``device``.

    "auto": CUDA if it works, which the embedded model shows, else the CPU. "cpu": the C kernels, with ``threads``
    threads (None: QWEN35RT_THREADS, else what the machine allows) at instruction level ``isa`` (None: QWEN35RT_ISA,
    else the best). "cuda": the GPU or an error. "reference": NumPy, slow and exact. ``n_gpu_layers``: layers for the
    GPU, -1 or "all": all of them, 0: none, more than 0: the GPU or an error (None: QWEN35RT_N_GPU_LAYERS, else -1).
    Raises BackendUnavailable if an explicitly named device does not work, ConfigError for an unknown name or number.
    """
    if device not in DEVICES:
        raise ConfigError(f"device is {device!r}; one of {', '.join(DEVICES)} is needed")
    layers = _layers(device, n_gpu_layers)
    if device == "reference":
        from .backends.reference import ReferenceBackend

        return Choice(ReferenceBackend(), "asked for")
    reason = "asked for"
    if device == "auto" and layers == 0:
        reason = "no layers are for a GPU"
    elif device in ("auto", "cuda"):
        from .backends.cuda import open_cuda
        from .self_test import self_test

        explicit = device == "cuda" or layers > 0
        try:
            cuda = open_cuda()
            self_test(cuda)
        except BackendUnavailable as e:
            if explicit:
                raise
            reason = str(e).removeprefix("device ")
        else:
            others = _cpu(threads, isa, "layers beside those on the GPU") if layers > 0 else None
            why = f"{'asked for' if explicit else 'it works here'}: {cuda.description}"
            return Choice(cuda, why, gpu=cuda, device_name=cuda.description, gpu_layers=layers, others=others)
    return _cpu(threads, isa, reason)


def _cpu(threads: int | None, isa: str | None, reason: str) -> Choice:
    from .backends.cpu.backend import CpuBackend

    backend = CpuBackend(threads=threads, isa=isa)
    return Choice(backend, reason, backend.threads, backend.isa)


def _layers(device: str, asked: int | str | None) -> int:
    """The number of layers for the GPU, ALL_LAYERS for all. Raises ConfigError where it and the device disagree."""
    name = "n_gpu_layers"
    if asked is None and device in ("auto", "cuda"):
        name, asked = "QWEN35RT_N_GPU_LAYERS", environment().n_gpu_layers
    layers = read_layers(ALL_LAYERS if asked is None else asked, name)
    if layers > 0 and device not in ("auto", "cuda"):
        raise ConfigError(f"{name} is {layers}: layers on a GPU need device 'cuda' or 'auto', not {device!r}")
    if layers == 0 and device == "cuda":
        raise ConfigError(f"{name} is 0: no layers are left for device 'cuda'; ask for device 'cpu' or for layers")
    return layers


def read_layers(given: int | str, name: str) -> int:
    """A number of layers, -1 for "all". Raises ConfigError."""
    text = str(given).strip()
    if text == "all":
        return ALL_LAYERS
    if not isinstance(given, bool) and (text == str(ALL_LAYERS) or text.isdecimal()):
        return int(text)
    raise ConfigError(f"{name} is {given!r}; a number of layers from 0 up is needed, or -1 or 'all' for all of them")


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
