"""Every implementation of a backend that tests can run here. To add one, add a line to ``implementations``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from qwen35rt.backends.base import Backend, KvType
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.config import environment

ISA_LEVELS = ("scalar", "avx2", "avx512", "avx512bf16", "neon")


def oracle() -> Path:
    """The folder with the oracle's data (it may not exist)."""
    given = environment().oracle
    return Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "oracle"


@cache
def native() -> Any:
    """The compiled module, or None where it is not built."""
    try:
        return importlib.import_module("qwen35rt._native")
    except ModuleNotFoundError as e:
        if e.name != "qwen35rt._native":
            raise
        return None


def isa_levels() -> tuple[str, ...]:
    """Instruction levels that this machine can run; none where the compiled module is not built."""
    return tuple(native().isa_levels()) if native() else ()


def cpu_backend(isa: str, threads: int = 2) -> Backend:
    """The CPU backend at one instruction level."""
    made: Backend = importlib.import_module("qwen35rt.backends.cpu.backend").CpuBackend(threads=threads, isa=isa)
    return made


@dataclass(frozen=True)
class Implementation:
    """A backend under test. ``exact``: the weight types (as in a file's name) that meet unrounded activations;
    ``pages``: how it is used to keep keys and values, the usual way first."""

    name: str
    make: Callable[[], Backend]
    exact: frozenset[str]
    pages: tuple[KvType, ...] = ("f32",)

    def __str__(self) -> str:
        return self.name


def implementations() -> list[Implementation]:
    """The reference, and the CPU backend at each level of this machine."""
    files = frozenset({"f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m", "mix"})
    made = [Implementation("reference", ReferenceBackend, files)]
    for isa in isa_levels():
        exact = frozenset({"f32", "f16"} if isa == "avx512bf16" else {"f32", "f16", "bf16"})
        made.append(Implementation(f"cpu-{isa}", partial(cpu_backend, isa), exact, ("f16", "f32")))
    return made
