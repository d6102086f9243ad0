"""NVRTC through ctypes, from the wheel nvidia-cuda-nvrtc (or its older names) or the system; needs no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from qwen35rt.backends.cuda import source

ADDED = ("-ftz=true", "--device-as-default-execution-space")  # by CuPy, to the options of every module


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    found = [str(p) for place in places for p in sorted(place.glob("*/lib/libnvrtc.so.*")) if "alt" not in p.name]
    for name in (*found, "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@dataclass(frozen=True)
class Usage:
    """What ptxas reports of a kernel: registers, bytes of static shared memory, of the stack, of spills."""

    kernel: str
    registers: int
    shared: int
    stack: int
    spills: int


_FUNCTION = re.compile(
    r"Function properties for (\w+)\s+ptxas\s+[:.]?\s*(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads\s+ptxas info\s+: Used (\d+) registers(.*)"
)


def usages(log: str) -> list[Usage]:
    """The kernels of a log of --ptxas-options=-v."""
    made = []
    for name, stack, stores, loads, registers, rest in _FUNCTION.findall(log):
        shared = re.search(r"(\d+) bytes smem", rest)
        spills = int(stores) + int(loads)
        made.append(Usage(name, int(registers), int(shared.group(1)) if shared else 0, int(stack), spills))
    return made


def compile_file(file: str, variant: str, arch: int) -> tuple[str, list[Usage]]:
    """Compile one module for sm_<arch>: -> the log and what each kernel uses. AssertionError where it fails."""
    nvrtc = library()
    assert nvrtc is not None
    text = source.source(file).encode()
    options = [*source.options(file, variant), *ADDED, f"--gpu-architecture=sm_{arch}", "--ptxas-options=-v"]
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, f"{file}.cu".encode(), 0, None, None)
    assert status == 0, status
    try:
        given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), given)
        log = _text(nvrtc, "ProgramLog", program)
        assert status == 0, f"{file} {variant} sm_{arch}: {log[:4000]}"
        return log, usages(log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(nvrtc: Any, what: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.value.decode(errors="replace")
