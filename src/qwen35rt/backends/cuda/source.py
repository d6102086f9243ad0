"""The text of CUDA modules: finds .cu files and inlines our includes. Knows no compiler and no device.

Includes are inlined because CuPy's cache of compiled modules looks at the text and the options, not at headers.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from ...errors import KernelCompileError
from ...formats import FORMATS

_INCLUDE = re.compile(r'^# *include "([\w.]+)"$', re.MULTILINE)
_KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([\d, ]+\)\s+)?(\w+)\(')
_PACKAGE = Path(__file__).resolve().parents[2]

# Files that are compiled for each weight format, and for each type of pages; the others are compiled once.
BY_FORMAT = ("embed", "linear", "moe_linear", "linear_tiles", "moe_tiles")
TILED = ("linear_tiles", "moe_tiles")  # for all formats but F32
BY_PAGES = ("attention", "kv_append")
PAGE_DEFINES = {"f16": "QRT_KV_F16", "f32": "QRT_KV_F32"}


def kernel_folder() -> Path:
    """Where the .cu files are: package data, or beside src in a checkout. Raises KernelCompileError."""
    for folder in (_PACKAGE / "cuda", _PACKAGE.parents[1] / "cuda"):
        if (folder / "common.cuh").is_file():
            return folder
    raise KernelCompileError("the CUDA sources are not installed with this package; reinstall qwen35rt")


@cache
def source(file: str) -> str:
    """The text of ``file``.cu with each of our includes in place of its first mention."""
    seen: set[str] = set()

    def inline(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        path = kernel_folder() / name
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as e:
            raise KernelCompileError(f"the CUDA source {path} cannot be read: {e}") from e
        return _INCLUDE.sub(lambda m: inline(m.group(1)), text)

    return inline(f"{file}.cu")


def files() -> list[str]:
    """Names of all .cu files, without their ending."""
    return sorted(path.stem for path in kernel_folder().glob("*.cu"))


def kernels(file: str) -> list[str]:
    """Names of the kernels of a file; those that a macro makes (``delta_net_##COLUMNS``) are written out."""
    text = source(file)
    made = [name for name in _KERNEL.findall(text) if not name.endswith("_")]
    for stem, argument in re.findall(r"__launch_bounds__\([\d, ]+\)[\s\\]+(\w+_)##(\w+)\(", text):
        users = re.findall(rf"^{stem.rstrip('_').upper()}\((\w+)\)$", text, re.MULTILINE)
        made += [stem + value for value in users if value != argument]
    return made


def variants(file: str) -> list[str]:
    """What a file is compiled for: names of weight formats, types of pages, or one empty name."""
    if file in BY_FORMAT:
        return [f.name for f in FORMATS if f.name != "F32" or file not in TILED]
    return list(PAGE_DEFINES) if file in BY_PAGES else [""]


def define(file: str, variant: str) -> str | None:
    """The macro that makes a variant of a file."""
    if file in BY_FORMAT:
        return f"QRT_{variant}"
    return PAGE_DEFINES[variant] if file in BY_PAGES else None


def options(file: str, variant: str) -> tuple[str, ...]:
    """Options of the compiler, but for the architecture."""
    macro = define(file, variant)
    return ("--std=c++17", *((f"-D{macro}=1",) if macro else ()))
