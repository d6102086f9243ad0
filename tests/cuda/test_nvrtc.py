"""NVRTC compiles every module without a GPU; ptxas reports what each kernel uses, held to a budget.

Where CI is set, everything for sm_80 and one format of each file for the other architectures. By default a part of
that: each file and several formats of products for sm_80, a few files for the others. Everything under ``-m long``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import pytest

from qwen35rt.backends.cuda import source
from qwen35rt.cpu_count import usable_cpus
from tests import ahead
from tests.cuda_host import nvrtc

# Most registers of a thread, bytes of spills and of stack. 128 registers let two blocks of 256 threads live on a
# multiprocessor; for sm_120, which nothing is tuned for, the compiler takes more.
BUDGETS = {75: (128, 0, 0), 80: (128, 0, 0), 90: (128, 0, 0), 120: (168, 16, 8)}
# (kernel, format) -> the same for all architectures, where the compiler (NVRTC 13.5) would rather have it so: three
# blocks of 128 threads instead of four; a word or two that it spills of 32 to 96 registers, of formats with much to
# unpack, instead of taking more.
MORE = {
    ("linear_8", "Q2_K"): (136, 0, 0),
    ("linear_8", "TQ1_0"): (128, 8, 8),
    ("linear_4", "TQ1_0"): (168, 8, 8),
    ("moe_linear", "TQ1_0"): (128, 16, 8),
    ("moe_linear_reduce", "NVFP4"): (128, 16, 8),
    ("linear_8", "IQ1_S"): (128, 8, 8),
}
OFTEN = ("Q4_K", "Q6_K", "Q8_0", "Q5_1", "IQ2_XS", "TQ1_0", "NVFP4", "BF16")  # of linear
TILED = ("Q2_K", "Q6_K", "F16", "BF16")  # of linear_tiles
ELSEWHERE = (
    "linear",
    "linear_tiles",
    "moe_tiles",
    "moe_lists",
    "attention",
    "attention_tiles",
    "delta_chunks",
)  # files that are compiled for other architectures

IN_CI = os.environ.get("CI") == "true"

pytestmark = pytest.mark.skipif(
    nvrtc.library() is None, reason="NVRTC is not installed (pip install nvidia-cuda-nvrtc)"
)


def _modules() -> list[Any]:
    made = []
    for file in source.files():
        for variant in source.variants(file):
            for arch in BUDGETS:
                first = variant == ("Q4_K" if file in source.BY_FORMAT else source.variants(file)[0])
                often = first and (arch == 80 or file in ELSEWHERE)
                often = often or (arch == 80 and file == "linear" and variant in OFTEN)
                often = often or (IN_CI and (first or arch == 80))
                often = often or (arch in (80, 90) and file == "linear_tiles" and variant in TILED)
                name = f"{file}-{variant}-sm_{arch}" if variant else f"{file}-sm_{arch}"
                marks = () if often else pytest.mark.long
                made.append(pytest.param(file, variant, arch, id=name, marks=marks))
    return made


@cache
def _pool() -> ProcessPoolExecutor:
    """Compilers of low priority, as many as there are cores."""
    return ProcessPoolExecutor(usable_cpus().affinity, get_context("spawn"), os.nice, (5,))


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    _pool().shutdown(cancel_futures=True)


def _compile(*module: Any) -> tuple[str, list[nvrtc.Usage]]:
    return _pool().submit(nvrtc.compile_file, *module).result()


def begin_ahead(chosen: list[pytest.Function]) -> list[pytest.Function]:
    if nvrtc.library() is None:
        return []
    _pool()  # once: threads would make it twice
    for item in chosen:
        module = tuple(item.callspec.params[name] for name in ("file", "variant", "arch"))
        ahead.begin(("nvrtc", *module), partial(_compile, *module))
    return chosen


@pytest.mark.parametrize(("file", "variant", "arch"), _modules())
def test_modules_compile_within_their_budget(file: str, variant: str, arch: int) -> None:
    log, found = ahead.result(("nvrtc", file, variant, arch), lambda: nvrtc.compile_file(file, variant, arch))
    assert {u.kernel for u in found} == set(source.kernels(file)), log
    assert "warning" not in log
    for use in found:
        most = BUDGETS[arch], MORE.get((use.kernel, variant), (0, 0, 0))
        registers, spills, stack = map(max, zip(*most, strict=True))
        assert use.registers <= registers, use
        assert use.spills <= spills, use
        assert use.stack <= stack, use
        assert use.shared == 0, use  # only dynamic shared memory
